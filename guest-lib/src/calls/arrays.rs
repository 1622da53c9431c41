//! Arrays and mipmapped arrays.

use std::ffi::c_void;

use wormhole_api::array::ArrayShape;

use super::devices::device;
use super::{body, put};
use crate::error::{CuError, Result};
use crate::session::session;
use crate::types::{
    CUDA_ARRAY_DESCRIPTOR, CUDA_ARRAY3D_DESCRIPTOR, CUarray, CUdevice, CUmipmappedArray, CUresult,
};
use crate::{array, context};

/// The shape that a program describes.
///
/// # Safety
/// `description` is null or points to a descriptor.
unsafe fn described(description: *const CUDA_ARRAY3D_DESCRIPTOR) -> Result<ArrayShape> {
    if description.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: not null, so a descriptor.
    let wanted = unsafe { description.read() };
    let extent = [wanted.Width, wanted.Height, wanted.Depth].map(|extent| extent as u64);
    ArrayShape::new(extent, wanted.Format, wanted.NumChannels, wanted.Flags)
}

fn descriptor(shape: &ArrayShape) -> CUDA_ARRAY3D_DESCRIPTOR {
    let size = |extent: u64| usize::try_from(extent).unwrap_or(usize::MAX);
    let [width, height, depth] = shape.extent().map(size);
    CUDA_ARRAY3D_DESCRIPTOR {
        Width: width,
        Height: height,
        Depth: depth,
        Format: shape.texels().format as u32,
        NumChannels: shape.texels().channels(),
        Flags: shape.flags(),
    }
}

pub unsafe fn cuArray3DCreate_v2(
    pHandle: *mut CUarray,
    pAllocateArray: *const CUDA_ARRAY3D_DESCRIPTOR,
) -> CUresult {
    body! {
        let scope = context::scope()?;
        if pHandle.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: as the caller promises.
        unsafe { put(pHandle, array::create(scope, described(pAllocateArray)?)?) }
    }
}

pub unsafe fn cuArrayCreate_v2(
    pHandle: *mut CUarray,
    pAllocateArray: *const CUDA_ARRAY_DESCRIPTOR,
) -> CUresult {
    if pAllocateArray.is_null() {
        // SAFETY: no descriptor is an error that is reported in its turn.
        return unsafe { cuArray3DCreate_v2(pHandle, std::ptr::null()) };
    }
    // SAFETY: not null, so a descriptor.
    let wanted = unsafe { pAllocateArray.read() };
    let wanted = CUDA_ARRAY3D_DESCRIPTOR {
        Width: wanted.Width,
        Height: wanted.Height,
        Depth: 0,
        Format: wanted.Format,
        NumChannels: wanted.NumChannels,
        Flags: 0,
    };
    // SAFETY: as the caller promises; the descriptor is here.
    unsafe { cuArray3DCreate_v2(pHandle, &raw const wanted) }
}

pub unsafe fn cuArray3DGetDescriptor_v2(
    pArrayDescriptor: *mut CUDA_ARRAY3D_DESCRIPTOR,
    hArray: CUarray,
) -> CUresult {
    body! {
        array::scope(hArray)?.session.alive()?;
        let (_, shape) = array::find(hArray)?;
        // SAFETY: as the caller promises.
        unsafe { put(pArrayDescriptor, descriptor(&shape)) }
    }
}

pub unsafe fn cuArrayGetDescriptor_v2(
    pArrayDescriptor: *mut CUDA_ARRAY_DESCRIPTOR,
    hArray: CUarray,
) -> CUresult {
    body! {
        array::scope(hArray)?.session.alive()?;
        let (_, shape) = array::find(hArray)?;
        let whole = descriptor(&shape);
        let flat = CUDA_ARRAY_DESCRIPTOR {
            Width: whole.Width,
            Height: whole.Height,
            Format: whole.Format,
            NumChannels: whole.NumChannels,
        };
        // SAFETY: as the caller promises.
        unsafe { put(pArrayDescriptor, flat) }
    }
}

pub unsafe fn cuArrayDestroy(hArray: CUarray) -> CUresult {
    body! {
        session()?;
        array::destroy(array::scope(hArray)?, hArray)
    }
}

pub unsafe fn cuArrayGetPlane(
    _pPlaneArray: *mut CUarray,
    hArray: CUarray,
    _planeIdx: u32,
) -> CUresult {
    body! {
        context::scope()?;
        array::find(hArray)?;
        // No format that is offered has planes.
        Err(CuError::INVALID_VALUE)
    }
}

pub unsafe fn cuArrayGetMemoryRequirements(
    _memoryRequirements: *mut c_void,
    array: CUarray,
    dev: CUdevice,
) -> CUresult {
    body! {
        context::scope()?;
        array::find(array)?;
        device(dev)?;
        // Only arrays whose memory is mapped later have any.
        Err(CuError::INVALID_VALUE)
    }
}

pub unsafe fn cuArrayGetSparseProperties(
    _sparseProperties: *mut c_void,
    array: CUarray,
) -> CUresult {
    body! {
        context::scope()?;
        array::find(array)?;
        // No array that is offered is sparse.
        Err(CuError::INVALID_VALUE)
    }
}

pub unsafe fn cuMipmappedArrayCreate(
    pHandle: *mut CUmipmappedArray,
    pMipmappedArrayDesc: *const CUDA_ARRAY3D_DESCRIPTOR,
    numMipmapLevels: u32,
) -> CUresult {
    body! {
        let scope = context::scope()?;
        if pHandle.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: as the caller promises.
        unsafe {
            let shape = described(pMipmappedArrayDesc)?;
            put(pHandle, array::create_mipmap(scope, shape, numMipmapLevels)?)
        }
    }
}

pub unsafe fn cuMipmappedArrayGetLevel(
    pLevelArray: *mut CUarray,
    hMipmappedArray: CUmipmappedArray,
    level: u32,
) -> CUresult {
    body! {
        let scope = context::scope()?;
        if pLevelArray.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: as the caller promises.
        unsafe { put(pLevelArray, array::level(scope, hMipmappedArray, level)?) }
    }
}

pub unsafe fn cuMipmappedArrayDestroy(hMipmappedArray: CUmipmappedArray) -> CUresult {
    body! { array::destroy_mipmap(context::scope()?, hMipmappedArray) }
}

pub unsafe fn cuMipmappedArrayGetMemoryRequirements(
    _memoryRequirements: *mut c_void,
    mipmap: CUmipmappedArray,
    dev: CUdevice,
) -> CUresult {
    body! {
        context::scope()?;
        array::find_mipmap(mipmap)?;
        device(dev)?;
        // As of arrays.
        Err(CuError::INVALID_VALUE)
    }
}

pub unsafe fn cuMipmappedArrayGetSparseProperties(
    _sparseProperties: *mut c_void,
    mipmap: CUmipmappedArray,
) -> CUresult {
    body! {
        context::scope()?;
        array::find_mipmap(mipmap)?;
        // As of arrays.
        Err(CuError::INVALID_VALUE)
    }
}
