//! Memory operations of streams, and their attributes.

use super::{body, put};
use crate::capture;
use crate::device::attribute;
use crate::error::{CuError, Result};
use crate::stream::target;
use crate::stream_memory::{
    MOST, PRIORITY, StreamAttributes, WAIT_32, WAIT_64, WRITE_32, WRITE_64, read, send,
    set_attribute,
};
use crate::types::{
    CUdeviceptr, CUresult, CUstream, CUstreamAttrID, CUstreamAttrValue, CUstreamBatchMemOpParams,
    DefaultStream,
};

/// One operation on a word.
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
    send(scope, target, &[read(&parameters)?])
}

/// Functions of the first version are for devices that allow it, which no driver does unless its module is told to.
fn permit(default: DefaultStream, stream: CUstream, permission: i32) -> Result {
    let (scope, target) = target(default, stream)?;
    if scope.session.device().value(permission) == 0 {
        // Also where the capture is invalid already.
        capture::check_work(target).map_err(|_| CuError::STREAM_CAPTURE_UNSUPPORTED)?;
        return Err(CuError::NOT_SUPPORTED);
    }
    Ok(())
}

macro_rules! words {
    ($($name:ident($value:ty): $operation:ident $(if $permission:ident)?;)*) => {$(
        pub unsafe fn $name(
            default: DefaultStream,
            stream: CUstream,
            addr: CUdeviceptr,
            value: $value,
            flags: u32,
        ) -> CUresult {
            body! {
                $(permit(default, stream, attribute::$permission)?;)?
                operate(default, stream, $operation, (addr, value.into()), flags)
            }
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

/// Several operations.
///
/// # Safety
/// `list` is null or `count` operations.
unsafe fn operate_all(
    default: DefaultStream,
    stream: CUstream,
    count: u32,
    list: *const CUstreamBatchMemOpParams,
    flags: u32,
) -> Result {
    let (scope, target) = target(default, stream)?;
    scope.session.alive()?;
    let count = count as usize;
    if flags != 0 || count > MOST || list.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: the caller vouches for that many operations.
    let list = unsafe { std::slice::from_raw_parts(list, count) };
    let operations = list.iter().map(read).collect::<Result<Vec<_>>>()?;
    send(scope, target, &operations)
}

pub unsafe fn cuStreamBatchMemOp(
    default: DefaultStream,
    stream: CUstream,
    count: u32,
    paramArray: *const CUstreamBatchMemOpParams,
    flags: u32,
) -> CUresult {
    body! {
        target(default, stream)?;
        // The driver sees this before it looks at the device.
        if count as usize > MOST {
            return Err(CuError::INVALID_VALUE);
        }
        permit(default, stream, attribute::CAN_USE_STREAM_MEM_OPS_V1)?;
        // SAFETY: passed on to the caller.
        unsafe { operate_all(default, stream, count, paramArray, flags) }
    }
}

pub unsafe fn cuStreamBatchMemOp_v2(
    default: DefaultStream,
    stream: CUstream,
    count: u32,
    paramArray: *const CUstreamBatchMemOpParams,
    flags: u32,
) -> CUresult {
    body! {
        // SAFETY: passed on to the caller.
        unsafe { operate_all(default, stream, count, paramArray, flags) }
    }
}

pub unsafe fn cuStreamGetAttribute(
    default: DefaultStream,
    hStream: CUstream,
    attr: CUstreamAttrID,
    value_out: *mut CUstreamAttrValue,
) -> CUresult {
    body! {
        let (_, target) = target(default, hStream)?;
        let value = target.stream.attribute(attr)?;
        // SAFETY: as the caller promises.
        unsafe { put(value_out, value) }
    }
}

pub unsafe fn cuStreamSetAttribute(
    default: DefaultStream,
    hStream: CUstream,
    attr: CUstreamAttrID,
    value: *const CUstreamAttrValue,
) -> CUresult {
    body! {
        let (scope, target) = target(default, hStream)?;
        if value.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: not null, so a value.
        set_attribute(scope, target, attr, &unsafe { value.read() })
    }
}

pub unsafe fn cuStreamCopyAttributes(
    default: DefaultStream,
    dst: CUstream,
    src: CUstream,
) -> CUresult {
    body! {
        let (scope, destination) = target(default, dst)?;
        let (_, source) = target(default, src)?;
        for id in StreamAttributes::KEPT.into_iter().chain([PRIORITY]) {
            let value = source.stream.attribute(id)?;
            if StreamAttributes::is_told(id, &value)
                && value != destination.stream.attribute(id)?
            {
                set_attribute(scope, destination, id, &value)?;
            }
        }
        Ok(())
    }
}
