//! Texture and surface references, removed from the API in CUDA 12 and still exported by drivers.

use std::ffi::c_void;

use wormhole_api::constants::address_mode::{BORDER, CLAMP};
use wormhole_api::constants::filter_mode::LINEAR;
use wormhole_api::constants::texture_flags::SEAMLESS_CUBEMAP;
use wormhole_api::constants::texture_reference_flags::OVERRIDE_FORMAT;

use crate::error::{CuError, Result};
use crate::object::texture_reference::{self, Bound, Texture};
use crate::object::{array, context, function};
use crate::parameter::{In, Out, Text};
use crate::types::{
    CUDA_ARRAY_DESCRIPTOR, CUarray, CUdeviceptr, CUfunction, CUmipmappedArray, CUmodule,
};

/// All bits up to the last `CU_TRSF_*`, as natively.
const FLAGS: u32 = (SEAMLESS_CUBEMAP << 1) - 1;

/// Converts a reference's number to its handle.
fn to_pointer(number: usize) -> *mut c_void {
    std::ptr::without_provenance_mut(number)
}

/// Changes a reference.
fn change<R>(reference: *mut c_void, change: impl FnOnce(&mut Texture) -> Result<R>) -> Result<R> {
    texture_reference::change(context::scope()?, reference.addr(), change)
}

/// Writes a value read from a texture reference.
fn put_value<T: Copy>(
    place: Out<'_, T>,
    reference: *mut c_void,
    value: impl FnOnce(&Texture) -> Result<T>,
) -> Result {
    context::scope()?;
    let found = texture_reference::find(reference.addr())?;
    place.put(value(&found)?)
}

pub fn cuModuleGetTexRef(pTexRef: Out<'_, *mut c_void>, hmod: CUmodule, name: Text<'_>) -> Result {
    let scope = context::scope()?;
    pTexRef.not_null()?;
    pTexRef.put(to_pointer(texture_reference::texture(
        scope,
        hmod,
        name.get()?,
    )?))
}

pub fn cuModuleGetSurfRef(
    pSurfRef: Out<'_, *mut c_void>,
    hmod: CUmodule,
    name: Text<'_>,
) -> Result {
    let scope = context::scope()?;
    pSurfRef.not_null()?;
    pSurfRef.put(to_pointer(texture_reference::surface(
        scope,
        hmod,
        name.get()?,
    )?))
}

pub fn cuTexRefCreate(pTexRef: Out<'_, *mut c_void>) -> Result {
    context::scope()?;
    pTexRef.not_null()?;
    pTexRef.put(to_pointer(texture_reference::create()))
}

pub fn cuTexRefDestroy(hTexRef: *mut c_void) -> Result {
    context::scope()?;
    texture_reference::destroy(hTexRef.addr())
}

/// Checks its arguments only: kernels read the references that their code names.
pub fn cuParamSetTexRef(hfunc: CUfunction, _texunit: i32, hTexRef: *mut c_void) -> Result {
    context::scope()?;
    function::find(hfunc)?;
    texture_reference::find(hTexRef.addr()).map(drop)
}

pub fn cuTexRefSetArray(hTexRef: *mut c_void, hArray: CUarray, Flags: u32) -> Result {
    change(hTexRef, |texture| {
        let (handle, shape) = array::find(hArray)?;
        if Flags & !OVERRIDE_FORMAT != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        if Flags & OVERRIDE_FORMAT != 0 {
            texture.format = shape.texels().format as u32;
            texture.channels = shape.texels().channels();
        }
        texture.bound = Bound::Array(hArray, handle);
        Ok(())
    })
}

pub fn cuTexRefSetMipmappedArray(
    hTexRef: *mut c_void,
    hMipmappedArray: CUmipmappedArray,
    Flags: u32,
) -> Result {
    change(hTexRef, |texture| {
        let (handle, shape) = array::find_mipmap_shape(hMipmappedArray)?;
        if Flags & !OVERRIDE_FORMAT != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        if Flags & OVERRIDE_FORMAT != 0 {
            texture.format = shape.texels().format as u32;
            texture.channels = shape.texels().channels();
        }
        texture.bound = Bound::Mipmap(hMipmappedArray, handle);
        Ok(())
    })
}

pub fn cuTexRefSetAddress_v2(
    ByteOffset: Out<'_, usize>,
    hTexRef: *mut c_void,
    dptr: CUdeviceptr,
    bytes: usize,
) -> Result {
    let scope = context::scope()?;
    let offset = texture_reference::change(scope, hTexRef.addr(), |texture| {
        let offset = texture.bind_memory(scope, dptr, bytes as u64)?;
        // Without an output for the offset, the offset must be 0.
        if offset != 0 && ByteOffset.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        Ok(offset)
    })?;
    ByteOffset.put_if_wanted(usize::try_from(offset).unwrap_or(0));
    Ok(())
}

pub fn cuTexRefSetAddress2D_v3(
    hTexRef: *mut c_void,
    desc: In<'_, CUDA_ARRAY_DESCRIPTOR>,
    dptr: CUdeviceptr,
    Pitch: usize,
) -> Result {
    let scope = context::scope()?;
    texture_reference::change(scope, hTexRef.addr(), |texture| {
        let wanted = desc.get()?;
        texture.format = wanted.Format;
        texture.channels = wanted.NumChannels;
        let size = [wanted.Width, wanted.Height, Pitch].map(|size| size as u64);
        texture.bind_rows(scope, dptr, size)
    })
}

pub fn cuTexRefSetFormat(hTexRef: *mut c_void, fmt: u32, NumPackedComponents: i32) -> Result {
    change(hTexRef, |texture| {
        let channels = u32::try_from(NumPackedComponents).map_err(|_| CuError::INVALID_VALUE)?;
        if ![1, 2, 4].contains(&channels) {
            return Err(CuError::INVALID_VALUE);
        }
        texture.format = fmt;
        texture.channels = channels;
        Ok(())
    })
}

/// Checks a dimension and returns it as an index.
fn dimension(dim: i32) -> Result<usize> {
    let index = usize::try_from(dim).ok().filter(|index| *index < 3);
    index.ok_or(CuError::INVALID_VALUE)
}

pub fn cuTexRefSetAddressMode(hTexRef: *mut c_void, dim: i32, am: u32) -> Result {
    change(hTexRef, |texture| {
        // As natively, CLAMP replaces unknown modes.
        texture.modes[dimension(dim)?] = if am <= BORDER { am } else { CLAMP };
        Ok(())
    })
}

pub fn cuTexRefSetMipmapFilterMode(hTexRef: *mut c_void, fm: u32) -> Result {
    change(hTexRef, |texture| {
        if fm > LINEAR {
            return Err(CuError::INVALID_VALUE);
        }
        texture.level_filter = fm;
        Ok(())
    })
}

pub fn cuTexRefSetMipmapLevelClamp(
    hTexRef: *mut c_void,
    minMipmapLevelClamp: f32,
    maxMipmapLevelClamp: f32,
) -> Result {
    change(hTexRef, |texture| {
        texture.level_clamp = [minMipmapLevelClamp, maxMipmapLevelClamp];
        Ok(())
    })
}

pub fn cuTexRefSetBorderColor(hTexRef: *mut c_void, pBorderColor: In<'_, [f32; 4]>) -> Result {
    change(hTexRef, |texture| {
        texture.border = pBorderColor.get()?;
        Ok(())
    })
}

pub fn cuTexRefSetFlags(hTexRef: *mut c_void, Flags: u32) -> Result {
    change(hTexRef, |texture| {
        if Flags & !FLAGS != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        texture.flags = Flags;
        Ok(())
    })
}

pub fn cuTexRefGetAddress_v2(pdptr: Out<'_, CUdeviceptr>, hTexRef: *mut c_void) -> Result {
    pdptr.put_if_wanted(0);
    put_value(pdptr, hTexRef, |texture| match texture.bound {
        Bound::Linear { address, .. } | Bound::Rows { address, .. } => Ok(address),
        _ => Err(CuError::INVALID_VALUE),
    })
}

pub fn cuTexRefGetArray(phArray: Out<'_, CUarray>, hTexRef: *mut c_void) -> Result {
    put_value(phArray, hTexRef, |texture| match texture.bound {
        Bound::Array(array, _) => Ok(array),
        _ => Err(CuError::INVALID_VALUE),
    })
}

pub fn cuTexRefGetMipmappedArray(
    phMipmappedArray: Out<'_, CUmipmappedArray>,
    hTexRef: *mut c_void,
) -> Result {
    put_value(phMipmappedArray, hTexRef, |texture| match texture.bound {
        Bound::Mipmap(mipmap, _) => Ok(mipmap),
        _ => Err(CuError::INVALID_VALUE),
    })
}

pub fn cuTexRefGetAddressMode(pam: Out<'_, u32>, hTexRef: *mut c_void, dim: i32) -> Result {
    put_value(pam, hTexRef, |texture| Ok(texture.modes[dimension(dim)?]))
}

pub fn cuTexRefGetFormat(
    pFormat: Out<'_, u32>,
    pNumChannels: Out<'_, i32>,
    hTexRef: *mut c_void,
) -> Result {
    context::scope()?;
    let texture = texture_reference::find(hTexRef.addr())?;
    pFormat.put(texture.format)?;
    pNumChannels.put_if_wanted(texture.channels.cast_signed());
    Ok(())
}

pub fn cuTexRefGetMipmapLevelClamp(
    pminMipmapLevelClamp: Out<'_, f32>,
    pmaxMipmapLevelClamp: Out<'_, f32>,
    hTexRef: *mut c_void,
) -> Result {
    put_value(pminMipmapLevelClamp, hTexRef, |texture| {
        Ok(texture.level_clamp[0])
    })?;
    put_value(pmaxMipmapLevelClamp, hTexRef, |texture| {
        Ok(texture.level_clamp[1])
    })
}

pub fn cuTexRefGetBorderColor(pBorderColor: Out<'_, [f32; 4]>, hTexRef: *mut c_void) -> Result {
    put_value(pBorderColor, hTexRef, |texture| Ok(texture.border))
}

pub fn cuTexRefSetFilterMode(hTexRef: *mut c_void, value: u32) -> Result {
    change(hTexRef, |texture| {
        texture.filter = value;
        Ok(())
    })
}

pub fn cuTexRefSetMipmapLevelBias(hTexRef: *mut c_void, value: f32) -> Result {
    change(hTexRef, |texture| {
        texture.level_bias = value;
        Ok(())
    })
}

pub fn cuTexRefSetMaxAnisotropy(hTexRef: *mut c_void, value: u32) -> Result {
    change(hTexRef, |texture| {
        texture.anisotropy = value;
        Ok(())
    })
}

pub fn cuTexRefGetFilterMode(value: Out<'_, u32>, hTexRef: *mut c_void) -> Result {
    put_value(value, hTexRef, |texture| Ok(texture.filter))
}

pub fn cuTexRefGetMipmapFilterMode(value: Out<'_, u32>, hTexRef: *mut c_void) -> Result {
    put_value(value, hTexRef, |texture| Ok(texture.level_filter))
}

pub fn cuTexRefGetMipmapLevelBias(value: Out<'_, f32>, hTexRef: *mut c_void) -> Result {
    put_value(value, hTexRef, |texture| Ok(texture.level_bias))
}

pub fn cuTexRefGetMaxAnisotropy(value: Out<'_, u32>, hTexRef: *mut c_void) -> Result {
    put_value(value, hTexRef, |texture| Ok(texture.anisotropy))
}

pub fn cuTexRefGetFlags(value: Out<'_, u32>, hTexRef: *mut c_void) -> Result {
    put_value(value, hTexRef, |texture| Ok(texture.flags))
}

pub fn cuSurfRefSetArray(hSurfRef: *mut c_void, hArray: CUarray, Flags: u32) -> Result {
    let scope = context::scope()?;
    if hSurfRef.is_null() {
        return Err(CuError::INVALID_HANDLE);
    }
    let (handle, shape) = array::find(hArray)?;
    if Flags != 0 || shape.flags() & wormhole_api::array::SURFACE_LDST == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    texture_reference::bind_surface(scope, hSurfRef.addr(), (hArray, handle))
}

pub fn cuSurfRefGetArray(phArray: Out<'_, CUarray>, hSurfRef: *mut c_void) -> Result {
    context::scope()?;
    let array = texture_reference::surface_array(hSurfRef.addr())?;
    phArray.put(array)
}
