//! Arrays and mipmapped arrays.

use std::ffi::c_void;

use wormhole_api::array::ArrayShape;

use super::devices::device;
use crate::error::{CuError, Result};
use crate::object::{array, context};
use crate::parameter::{In, Out, Pointer};
use crate::session::session;
use crate::types::{
    CUDA_ARRAY_DESCRIPTOR, CUDA_ARRAY3D_DESCRIPTOR, CUarray, CUdevice, CUmipmappedArray,
};

/// Converts a descriptor to an array shape.
fn described(wanted: CUDA_ARRAY3D_DESCRIPTOR) -> Result<ArrayShape> {
    let extent = [wanted.Width, wanted.Height, wanted.Depth].map(|extent| extent as u64);
    ArrayShape::new(extent, wanted.Format, wanted.NumChannels, wanted.Flags)
}

pub fn cuArray3DCreate_v2(
    pHandle: Out<'_, CUarray>,
    pAllocateArray: In<'_, CUDA_ARRAY3D_DESCRIPTOR>,
) -> Result {
    create(pHandle, || pAllocateArray.get())
}

fn create(
    place: Out<'_, CUarray>,
    wanted: impl FnOnce() -> Result<CUDA_ARRAY3D_DESCRIPTOR>,
) -> Result {
    let scope = context::scope()?;
    place.not_null()?;
    place.put(array::create(scope, described(wanted()?)?)?)
}

pub fn cuArrayCreate_v2(
    pHandle: Out<'_, CUarray>,
    pAllocateArray: In<'_, CUDA_ARRAY_DESCRIPTOR>,
) -> Result {
    let with_depth = |wanted: CUDA_ARRAY_DESCRIPTOR| CUDA_ARRAY3D_DESCRIPTOR {
        Width: wanted.Width,
        Height: wanted.Height,
        Depth: 0,
        Format: wanted.Format,
        NumChannels: wanted.NumChannels,
        Flags: 0,
    };
    create(pHandle, || pAllocateArray.get().map(with_depth))
}

pub fn cuArray3DGetDescriptor_v2(
    pArrayDescriptor: Out<'_, CUDA_ARRAY3D_DESCRIPTOR>,
    hArray: CUarray,
) -> Result {
    array::scope(hArray)?.session.alive()?;
    let (_, shape) = array::find(hArray)?;
    pArrayDescriptor.put(shape.descriptor())
}

pub fn cuArrayGetDescriptor_v2(
    pArrayDescriptor: Out<'_, CUDA_ARRAY_DESCRIPTOR>,
    hArray: CUarray,
) -> Result {
    array::scope(hArray)?.session.alive()?;
    let (_, shape) = array::find(hArray)?;
    let whole = shape.descriptor();
    let flat = CUDA_ARRAY_DESCRIPTOR {
        Width: whole.Width,
        Height: whole.Height,
        Format: whole.Format,
        NumChannels: whole.NumChannels,
    };
    pArrayDescriptor.put(flat)
}

pub fn cuArrayDestroy(hArray: CUarray) -> Result {
    session()?;
    array::destroy(array::scope(hArray)?, hArray)
}

pub fn cuArrayGetPlane(_pPlaneArray: Out<'_, CUarray>, hArray: CUarray, _planeIdx: u32) -> Result {
    context::scope()?;
    array::find(hArray)?;
    // No supported format has planes.
    Err(CuError::INVALID_VALUE)
}

pub fn cuArrayGetMemoryRequirements(
    _memoryRequirements: Pointer<'_, c_void>,
    array: CUarray,
    dev: CUdevice,
) -> Result {
    context::scope()?;
    array::find(array)?;
    device(dev)?;
    // Only arrays with deferred mapping have memory requirements, and those are not supported.
    Err(CuError::INVALID_VALUE)
}

pub fn cuArrayGetSparseProperties(
    _sparseProperties: Pointer<'_, c_void>,
    array: CUarray,
) -> Result {
    context::scope()?;
    array::find(array)?;
    // Sparse arrays are not supported.
    Err(CuError::INVALID_VALUE)
}

pub fn cuMipmappedArrayCreate(
    pHandle: Out<'_, CUmipmappedArray>,
    pMipmappedArrayDesc: In<'_, CUDA_ARRAY3D_DESCRIPTOR>,
    numMipmapLevels: u32,
) -> Result {
    let scope = context::scope()?;
    pHandle.not_null()?;
    let shape = described(pMipmappedArrayDesc.get()?)?;
    pHandle.put(array::create_mipmap(scope, shape, numMipmapLevels)?)
}

pub fn cuMipmappedArrayGetLevel(
    pLevelArray: Out<'_, CUarray>,
    hMipmappedArray: CUmipmappedArray,
    level: u32,
) -> Result {
    let scope = context::scope()?;
    pLevelArray.not_null()?;
    pLevelArray.put(array::level(scope, hMipmappedArray, level)?)
}

pub fn cuMipmappedArrayDestroy(hMipmappedArray: CUmipmappedArray) -> Result {
    array::destroy_mipmap(context::scope()?, hMipmappedArray)
}

pub fn cuMipmappedArrayGetMemoryRequirements(
    _memoryRequirements: Pointer<'_, c_void>,
    mipmap: CUmipmappedArray,
    dev: CUdevice,
) -> Result {
    context::scope()?;
    array::find_mipmap(mipmap)?;
    device(dev)?;
    // The same holds as for arrays.
    Err(CuError::INVALID_VALUE)
}

pub fn cuMipmappedArrayGetSparseProperties(
    _sparseProperties: Pointer<'_, c_void>,
    mipmap: CUmipmappedArray,
) -> Result {
    context::scope()?;
    array::find_mipmap(mipmap)?;
    // The same holds as for arrays.
    Err(CuError::INVALID_VALUE)
}
