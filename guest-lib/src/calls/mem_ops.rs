//! Stream memory operations, and stream attributes.

use crate::device::attribute;
use crate::error::{CuError, Result};
use crate::graph::capture;
use crate::graph::submit::{Operation, submit};
use crate::object::stream::attributes::{PRIORITY, StreamAttributes, set_attribute};
use crate::object::stream::target;
use crate::parameter::{In, Out};
use crate::types::{
    CUdeviceptr, CUstream, CUstreamAttrID, CUstreamAttrValue, CUstreamBatchMemOpParams,
    DefaultStream,
};
use crate::work::mem_ops::{WAIT_32, WAIT_64, WRITE_32, WRITE_64, read};
use wormhole_api::limits::MEMORY_OPERATIONS;

/// Submits one operation.
fn operate(
    default: DefaultStream,
    stream: CUstream,
    operation: u32,
    (address, value64): (CUdeviceptr, u64),
    flags: u32,
) -> Result {
    let (scope, target) = target(default, stream)?;
    scope.session.alive()?;
    let parameters = CUstreamBatchMemOpParams {
        operation,
        address,
        value64,
        flags,
        ..CUstreamBatchMemOpParams::default()
    };
    submit(scope, target, Operation::Memory(&[read(&parameters)?]))
}

/// Fails unless the device permits memory operations of the first version. Drivers permit them only if their kernel
/// module is configured to.
fn permit(default: DefaultStream, stream: CUstream, permission: i32) -> Result {
    let (scope, target) = target(default, stream)?;
    if scope.session.device().value(permission) == 0 {
        // An invalid capture returns the same error.
        capture::check_work(target).map_err(|_| CuError::STREAM_CAPTURE_UNSUPPORTED)?;
        return Err(CuError::NOT_SUPPORTED);
    }
    Ok(())
}

macro_rules! words {
    ($($name:ident($value:ty): $operation:ident $(if $permission:ident)?;)*) => {$(
        pub fn $name(
            default: DefaultStream,
            stream: CUstream,
            addr: CUdeviceptr,
            value: $value,
            flags: u32,
        ) -> Result {
            $(permit(default, stream, attribute::$permission)?;)?
            operate(default, stream, $operation, (addr, value.into()), flags)
        }
    )*};
}

words! {
    cuStreamWaitValue32(u32): WAIT_32 if CAN_USE_STREAM_MEM_OPS_V1;
    cuStreamWaitValue32_v2(u32): WAIT_32;
    cuStreamWriteValue32(u32): WRITE_32 if CAN_USE_STREAM_MEM_OPS_V1;
    cuStreamWriteValue32_v2(u32): WRITE_32;
    cuStreamWaitValue64(u64): WAIT_64 if CAN_USE_64_BIT_STREAM_MEM_OPS_V1;
    cuStreamWaitValue64_v2(u64): WAIT_64;
    cuStreamWriteValue64(u64): WRITE_64 if CAN_USE_64_BIT_STREAM_MEM_OPS_V1;
    cuStreamWriteValue64_v2(u64): WRITE_64;
}

/// Submits several operations.
fn operate_all(
    default: DefaultStream,
    stream: CUstream,
    list: In<'_, [CUstreamBatchMemOpParams]>,
    flags: u32,
) -> Result {
    let (scope, target) = target(default, stream)?;
    scope.session.alive()?;
    let operations = list.values()?;
    if flags != 0 || operations.len() > MEMORY_OPERATIONS || list.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let operations = operations
        .map(|one| read(&one))
        .collect::<Result<Vec<_>>>()?;
    submit(scope, target, Operation::Memory(&operations))
}

pub fn cuStreamBatchMemOp(
    default: DefaultStream,
    stream: CUstream,
    count: u32,
    paramArray: In<'_, [CUstreamBatchMemOpParams]>,
    flags: u32,
) -> Result {
    target(default, stream)?;
    // The native driver checks the count before the device's permission.
    if count as usize > MEMORY_OPERATIONS {
        return Err(CuError::INVALID_VALUE);
    }
    permit(default, stream, attribute::CAN_USE_STREAM_MEM_OPS_V1)?;
    operate_all(default, stream, paramArray, flags)
}

pub fn cuStreamBatchMemOp_v2(
    default: DefaultStream,
    stream: CUstream,
    _count: u32,
    paramArray: In<'_, [CUstreamBatchMemOpParams]>,
    flags: u32,
) -> Result {
    operate_all(default, stream, paramArray, flags)
}

pub fn cuStreamGetAttribute(
    default: DefaultStream,
    hStream: CUstream,
    attr: CUstreamAttrID,
    value_out: Out<'_, CUstreamAttrValue>,
) -> Result {
    let (_, target) = target(default, hStream)?;
    let value = target.stream.attribute(attr)?;
    value_out.put(value)
}

pub fn cuStreamSetAttribute(
    default: DefaultStream,
    hStream: CUstream,
    attr: CUstreamAttrID,
    value: In<'_, CUstreamAttrValue>,
) -> Result {
    let (scope, target) = target(default, hStream)?;
    set_attribute(scope, target, attr, &value.get()?)
}

pub fn cuStreamCopyAttributes(default: DefaultStream, dst: CUstream, src: CUstream) -> Result {
    let (scope, destination) = target(default, dst)?;
    let (_, source) = target(default, src)?;
    for id in StreamAttributes::KEPT.into_iter().chain([PRIORITY]) {
        let value = source.stream.attribute(id)?;
        if StreamAttributes::reaches_device(id, &value)
            && value != destination.stream.attribute(id)?
        {
            set_attribute(scope, destination, id, &value)?;
        }
    }
    Ok(())
}
