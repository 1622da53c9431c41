//! Pointer attributes.

use std::ffi::c_void;

use wormhole_api::constants::{
    device_ordinal, memory_type, pointer_access_flags, pointer_attribute as attribute,
};

use crate::error::{CuError, Result};
use crate::handle::to_pointer;
use crate::memory::map::{Allocation, Origin};
use crate::memory::{self, memory_map};
use crate::memory::{pool, virtual_memory};
use crate::object::context;
use crate::object::sharing;
use crate::parameter::{In, Pointer};
use crate::session::session;
use crate::types::{CUdeviceptr, CUpointer_attribute};

/// Ordinal for an address that belongs to no device.
const NO_DEVICE: u32 = device_ordinal::INVALID.cast_unsigned();

/// Value of an attribute, with the width that the driver writes. Booleans are words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Value {
    Word(u32),
    Long(u64),
}

impl Value {
    fn write(self, place: Pointer<'_, c_void>) -> Result {
        // SAFETY: the value is as wide as the driver API documents its attribute.
        unsafe {
            match self {
                Self::Word(value) => place.of().put(value),
                Self::Long(value) => place.of().put(value),
            }
        }
    }
}

/// Returns an attribute of an address in an allocation, or `None` if the attribute does not apply to it.
#[inline]
fn value(
    attribute: CUpointer_attribute,
    address: u64,
    allocation: &Allocation,
) -> Result<Option<Value>> {
    let is_host = !allocation.is_managed() && allocation.for_host(address).is_some();
    let device = match allocation.origin {
        Origin::Registered { .. } => allocation.for_device(address),
        _ => Some(address),
    };
    Ok(Some(match attribute {
        attribute::CONTEXT if allocation.outlives_context() => Value::Long(0),
        attribute::CONTEXT => Value::Long(context::by_number(allocation.context)?.addr() as u64),
        attribute::MEMORY_TYPE => Value::Word(if is_host {
            memory_type::HOST
        } else {
            memory_type::DEVICE
        }),
        // Equal to the address, except for registered memory.
        attribute::DEVICE_POINTER => return Ok(device.map(Value::Long)),
        attribute::HOST_POINTER => return Ok(allocation.for_host(address).map(Value::Long)),
        attribute::IS_LEGACY_CUDA_IPC_CAPABLE => Value::Word(u32::from(
            allocation.origin == Origin::Device
                && sharing::has_handles(session()?.on(device_of(allocation) as usize)),
        )),
        attribute::IS_GPU_DIRECT_RDMA_CAPABLE => Value::Word(0),
        attribute::SYNC_MEMOPS => Value::Word(u32::from(allocation.synchronous)),
        attribute::IS_MANAGED => Value::Word(u32::from(allocation.is_managed())),
        attribute::BUFFER_ID => Value::Long(allocation.id),
        attribute::DEVICE_ORDINAL => Value::Word(device_of(allocation)),
        attribute::RANGE_START_ADDR | attribute::MAPPING_BASE_ADDR => Value::Long(allocation.base),
        attribute::RANGE_SIZE | attribute::MAPPING_SIZE => Value::Long(allocation.bytes),
        attribute::MAPPED => Value::Word(u32::from(device.is_some())),
        attribute::ALLOWED_HANDLE_TYPES => Value::Long(match allocation.origin {
            Origin::Mapped { memory } => virtual_memory::handle_types(memory).into(),
            Origin::Pool { pool } => pool::handle_types(pool).into(),
            _ => 0,
        }),
        attribute::ACCESS_FLAGS => Value::Word(pointer_access_flags::READWRITE),
        attribute::MEMPOOL_HANDLE => Value::Long(match allocation.origin {
            Origin::Pool { pool } => to_pointer(pool).addr() as u64,
            _ => 0,
        }),
        attribute::MEMORY_BLOCK_ID => Value::Long(allocation.id),
        _ => return Err(CuError::INVALID_VALUE),
    }))
}

/// Returns the ordinal of an allocation's device. For memory that belongs to no context, this is the device that
/// holds it.
fn device_of(allocation: &Allocation) -> u32 {
    let device = allocation.device().map(u32::try_from);
    device
        .and_then(std::result::Result::ok)
        .unwrap_or(NO_DEVICE)
}

/// Returns an attribute's value for an address that CUDA does not know.
fn null_value(attribute: CUpointer_attribute) -> Result<Value> {
    Ok(match attribute {
        attribute::CONTEXT
        | attribute::DEVICE_POINTER
        | attribute::HOST_POINTER
        | attribute::BUFFER_ID
        | attribute::RANGE_START_ADDR
        | attribute::RANGE_SIZE
        | attribute::ALLOWED_HANDLE_TYPES
        | attribute::MEMPOOL_HANDLE..=attribute::MEMORY_BLOCK_ID => Value::Long(0),
        attribute::DEVICE_ORDINAL => Value::Word(NO_DEVICE),
        attribute::MEMORY_TYPE..=attribute::ACCESS_FLAGS => Value::Word(0),
        _ => return Err(CuError::INVALID_VALUE),
    })
}

#[inline(always)]
pub fn cuPointerGetAttribute(
    data: Pointer<'_, c_void>,
    attribute: CUpointer_attribute,
    ptr: CUdeviceptr,
) -> Result {
    session()?;
    data.not_null()?;
    let allocation = memory_map().find(ptr).ok_or(CuError::INVALID_VALUE)?;
    let value = value(attribute, ptr, &allocation)?.ok_or(CuError::INVALID_VALUE)?;
    value.write(data)
}

pub fn cuPointerGetAttributes(
    numAttributes: u32,
    attributes: In<'_, [CUpointer_attribute]>,
    data: In<'_, [*mut c_void]>,
    ptr: CUdeviceptr,
) -> Result {
    session()?;
    if attributes.is_null() || data.is_null() || numAttributes == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let allocation = memory_map().find(ptr);
    for index in 0..numAttributes as usize {
        let attribute = attributes.get(index)?;
        // SAFETY: each place is as wide as its attribute, by the contract of `In`.
        let place = unsafe { Pointer::new(data.get(index)?) };
        let known = match &allocation {
            Some(allocation) => value(attribute, ptr, allocation)?,
            None => None,
        };
        let value = match known {
            Some(value) => value,
            None => null_value(attribute)?,
        };
        value.write(place)?;
    }
    Ok(())
}

/// Sets `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`, the only settable attribute.
pub fn cuPointerSetAttribute(
    value: Pointer<'_, c_void>,
    attribute: CUpointer_attribute,
    ptr: CUdeviceptr,
) -> Result {
    context::scope()?;
    if value.is_null() || attribute != attribute::SYNC_MEMOPS {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: the attribute is a word.
    let wanted = unsafe { value.of::<u32>() }.get()?;
    memory::set_synchronous(ptr, wanted != 0)
}
