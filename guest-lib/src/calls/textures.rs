//! Texture and surface objects.

use wormhole_api::array::Texels;

use super::devices::device;
use super::{body, put};
use crate::error::CuError;
use crate::types::{
    CUDA_RESOURCE_DESC, CUDA_RESOURCE_VIEW_DESC, CUDA_TEXTURE_DESC, CUdevice, CUresult,
    CUsurfObject, CUtexObject,
};
use crate::{context, texture};

/// The most of a texture of linear memory, as the driver says of devices of compute capability 9.0.
const MOST_TEXELS: u64 = 1 << 30;
const MOST_BYTES: u64 = 1 << 32;

pub unsafe fn cuTexObjectCreate(
    pTexObject: *mut CUtexObject,
    pResDesc: *const CUDA_RESOURCE_DESC,
    pTexDesc: *const CUDA_TEXTURE_DESC,
    pResViewDesc: *const CUDA_RESOURCE_VIEW_DESC,
) -> CUresult {
    body! {
        let scope = context::scope()?;
        if pTexObject.is_null() || pResDesc.is_null() || pTexDesc.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: not null, so descriptions; the view may be absent.
        let (resource, sampling, view) = unsafe {
            let view = (!pResViewDesc.is_null()).then(|| pResViewDesc.read());
            (pResDesc.read(), pTexDesc.read(), view)
        };
        let made = texture::create(scope, &resource, &sampling, view.as_ref())?;
        // SAFETY: as the caller promises.
        unsafe { put(pTexObject, made) }
    }
}

pub unsafe fn cuTexObjectDestroy(texObject: CUtexObject) -> CUresult {
    body! { texture::destroy(context::scope()?, texObject) }
}

pub unsafe fn cuTexObjectGetResourceDesc(
    pResDesc: *mut CUDA_RESOURCE_DESC,
    texObject: CUtexObject,
) -> CUresult {
    body! {
        context::scope()?;
        // SAFETY: as the caller promises.
        unsafe { put(pResDesc, texture::find(texObject)?.resource) }
    }
}

pub unsafe fn cuTexObjectGetTextureDesc(
    pTexDesc: *mut CUDA_TEXTURE_DESC,
    texObject: CUtexObject,
) -> CUresult {
    body! {
        context::scope()?;
        // SAFETY: as the caller promises.
        unsafe { put(pTexDesc, texture::find(texObject)?.sampling) }
    }
}

pub unsafe fn cuTexObjectGetResourceViewDesc(
    pResViewDesc: *mut CUDA_RESOURCE_VIEW_DESC,
    texObject: CUtexObject,
) -> CUresult {
    body! {
        context::scope()?;
        if pResViewDesc.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // Without a view nothing is written, and that is no error.
        if let Some(view) = texture::find(texObject)?.view {
            // SAFETY: as the caller promises.
            unsafe { put(pResViewDesc, view) }?;
        }
        Ok(())
    }
}

pub unsafe fn cuSurfObjectCreate(
    pSurfObject: *mut CUsurfObject,
    pResDesc: *const CUDA_RESOURCE_DESC,
) -> CUresult {
    body! {
        let scope = context::scope()?;
        if pSurfObject.is_null() || pResDesc.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: not null, so a description.
        let resource = unsafe { pResDesc.read() };
        // SAFETY: as the caller promises.
        unsafe { put(pSurfObject, texture::create_surface(scope, &resource)?) }
    }
}

pub unsafe fn cuSurfObjectDestroy(surfObject: CUsurfObject) -> CUresult {
    body! { texture::destroy_surface(context::scope()?, surfObject) }
}

pub unsafe fn cuSurfObjectGetResourceDesc(
    pResDesc: *mut CUDA_RESOURCE_DESC,
    surfObject: CUsurfObject,
) -> CUresult {
    body! {
        context::scope()?;
        // SAFETY: as the caller promises.
        unsafe { put(pResDesc, texture::find_surface(surfObject)?) }
    }
}

pub unsafe fn cuDeviceGetTexture1DLinearMaxWidth(
    maxWidthInElements: *mut usize,
    format: u32,
    numChannels: u32,
    dev: CUdevice,
) -> CUresult {
    body! {
        device(dev)?;
        let texel = Texels::new(format, numChannels)?.bytes();
        let most = MOST_TEXELS.min(MOST_BYTES / texel);
        // SAFETY: as the caller promises.
        unsafe { put(maxWidthInElements, usize::try_from(most).unwrap_or(0)) }
    }
}
