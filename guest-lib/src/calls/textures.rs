//! Texture and surface objects.

use wormhole_api::TextureLinearWidth;

use super::devices::ordinal;
use crate::error::{CuError, Result};
use crate::object::{context, texture};
use crate::parameter::{In, Out};
use crate::session::session;
use crate::types::{
    CUDA_RESOURCE_DESC, CUDA_RESOURCE_VIEW_DESC, CUDA_TEXTURE_DESC, CUdevice, CUsurfObject,
    CUtexObject,
};

pub fn cuTexObjectCreate(
    pTexObject: Out<'_, CUtexObject>,
    pResDesc: In<'_, CUDA_RESOURCE_DESC>,
    pTexDesc: In<'_, CUDA_TEXTURE_DESC>,
    pResViewDesc: In<'_, CUDA_RESOURCE_VIEW_DESC>,
) -> Result {
    let scope = context::scope()?;
    if pTexObject.is_null() || pResDesc.is_null() || pTexDesc.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let (resource, sampling) = (pResDesc.get()?, pTexDesc.get()?);
    let made = texture::create(scope, &resource, &sampling, pResViewDesc.given().as_ref())?;
    pTexObject.put(made)
}

pub fn cuTexObjectDestroy(texObject: CUtexObject) -> Result {
    texture::destroy(context::scope()?, texObject)
}

pub fn cuTexObjectGetResourceDesc(
    pResDesc: Out<'_, CUDA_RESOURCE_DESC>,
    texObject: CUtexObject,
) -> Result {
    context::scope()?;
    pResDesc.put(texture::find(texObject)?.resource)
}

pub fn cuTexObjectGetTextureDesc(
    pTexDesc: Out<'_, CUDA_TEXTURE_DESC>,
    texObject: CUtexObject,
) -> Result {
    context::scope()?;
    pTexDesc.put(texture::find(texObject)?.sampling)
}

pub fn cuTexObjectGetResourceViewDesc(
    pResViewDesc: Out<'_, CUDA_RESOURCE_VIEW_DESC>,
    texObject: CUtexObject,
) -> Result {
    context::scope()?;
    pResViewDesc.not_null()?;
    // Without a view the call succeeds and writes nothing.
    if let Some(view) = texture::find(texObject)?.view {
        pResViewDesc.put(view)?;
    }
    Ok(())
}

pub fn cuSurfObjectCreate(
    pSurfObject: Out<'_, CUsurfObject>,
    pResDesc: In<'_, CUDA_RESOURCE_DESC>,
) -> Result {
    let scope = context::scope()?;
    if pSurfObject.is_null() || pResDesc.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let resource = pResDesc.get()?;
    pSurfObject.put(texture::create_surface(scope, &resource)?)
}

pub fn cuSurfObjectDestroy(surfObject: CUsurfObject) -> Result {
    texture::destroy_surface(context::scope()?, surfObject)
}

pub fn cuSurfObjectGetResourceDesc(
    pResDesc: Out<'_, CUDA_RESOURCE_DESC>,
    surfObject: CUsurfObject,
) -> Result {
    context::scope()?;
    pResDesc.put(texture::find_surface(surfObject)?)
}

pub fn cuDeviceGetTexture1DLinearMaxWidth(
    maxWidthInElements: Out<'_, usize>,
    format: u32,
    numChannels: u32,
    dev: CUdevice,
) -> Result {
    let session = session()?;
    maxWidthInElements.not_null()?;
    let device = session.on(ordinal(dev)?);
    let message = TextureLinearWidth {
        format,
        channels: numChannels,
    };
    let texels = device.request(&message, |reply| reply.texels)?;
    maxWidthInElements.put(usize::try_from(texels).unwrap_or(usize::MAX))
}
