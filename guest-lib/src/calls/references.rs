//! Texture and surface references, removed from the API in CUDA 12 and served by drivers still.

use std::ffi::{c_char, c_void};

use super::{body, put, string};
use crate::error::{CuError, Result};
use crate::reference::{self, Bound, Texture};
use crate::types::{
    CUDA_ARRAY_DESCRIPTOR, CUarray, CUdeviceptr, CUfunction, CUmipmappedArray, CUmodule, CUresult,
};
use crate::{array, context, function};

/// `CU_TRSA_OVERRIDE_FORMAT`.
const OVERRIDE_FORMAT: u32 = 1;
/// All `CU_TRSF_*`.
const FLAGS: u32 = 0x7F;
/// `CU_TR_ADDRESS_MODE_CLAMP`, which other modes than those up to the greatest one become.
const CLAMP: u32 = 1;
const GREATEST_MODE: u32 = 3;
/// `CU_TR_FILTER_MODE_LINEAR`.
const LINEAR: u32 = 1;

/// What a program holds for a reference.
fn to_pointer(number: usize) -> *mut c_void {
    std::ptr::without_provenance_mut(number)
}

/// Changes a reference.
fn change<R>(reference: *mut c_void, change: impl FnOnce(&mut Texture) -> Result<R>) -> Result<R> {
    reference::change(context::scope()?, reference.addr(), change)
}

/// Tells of a reference.
///
/// # Safety
/// `place` is null or writable.
unsafe fn tell<T>(
    place: *mut T,
    reference: *mut c_void,
    value: impl FnOnce(&Texture) -> Result<T>,
) -> Result {
    context::scope()?;
    let found = reference::find(reference.addr())?;
    // SAFETY: as the caller promises.
    unsafe { put(place, value(&found)?) }
}

pub unsafe fn cuModuleGetTexRef(
    pTexRef: *mut *mut c_void,
    hmod: CUmodule,
    name: *const c_char,
) -> CUresult {
    body! {
        let scope = context::scope()?;
        if pTexRef.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: as the caller promises.
        unsafe { put(pTexRef, to_pointer(reference::texture(scope, hmod, string(name)?)?)) }
    }
}

pub unsafe fn cuModuleGetSurfRef(
    pSurfRef: *mut *mut c_void,
    hmod: CUmodule,
    name: *const c_char,
) -> CUresult {
    body! {
        let scope = context::scope()?;
        if pSurfRef.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: as the caller promises.
        unsafe { put(pSurfRef, to_pointer(reference::surface(scope, hmod, string(name)?)?)) }
    }
}

pub unsafe fn cuTexRefCreate(pTexRef: *mut *mut c_void) -> CUresult {
    body! {
        context::scope()?;
        if pTexRef.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: as the caller promises.
        unsafe { put(pTexRef, to_pointer(reference::create())) }
    }
}

pub unsafe fn cuTexRefDestroy(hTexRef: *mut c_void) -> CUresult {
    body! {
        context::scope()?;
        reference::destroy(hTexRef.addr())
    }
}

/// Kernels read the references that they name, whatever is said here.
pub unsafe fn cuParamSetTexRef(hfunc: CUfunction, _texunit: i32, hTexRef: *mut c_void) -> CUresult {
    body! {
        context::scope()?;
        function::find(hfunc)?;
        reference::find(hTexRef.addr()).map(drop)
    }
}

pub unsafe fn cuTexRefSetArray(hTexRef: *mut c_void, hArray: CUarray, Flags: u32) -> CUresult {
    body! {
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
}

pub unsafe fn cuTexRefSetMipmappedArray(
    hTexRef: *mut c_void,
    hMipmappedArray: CUmipmappedArray,
    Flags: u32,
) -> CUresult {
    body! {
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
}

pub unsafe fn cuTexRefSetAddress_v2(
    ByteOffset: *mut usize,
    hTexRef: *mut c_void,
    dptr: CUdeviceptr,
    bytes: usize,
) -> CUresult {
    body! {
        let scope = context::scope()?;
        let offset = reference::change(scope, hTexRef.addr(), |texture| {
            let offset = texture.bind_memory(scope, dptr, bytes as u64)?;
            // Who cannot be told of an offset must not have one.
            if offset != 0 && ByteOffset.is_null() {
                return Err(CuError::INVALID_VALUE);
            }
            Ok(offset)
        })?;
        // SAFETY: as the caller promises.
        unsafe { super::put_if_wanted(ByteOffset, usize::try_from(offset).unwrap_or(0)) };
        Ok(())
    }
}

pub unsafe fn cuTexRefSetAddress2D_v3(
    hTexRef: *mut c_void,
    desc: *const CUDA_ARRAY_DESCRIPTOR,
    dptr: CUdeviceptr,
    Pitch: usize,
) -> CUresult {
    body! {
        let scope = context::scope()?;
        reference::change(scope, hTexRef.addr(), |texture| {
            if desc.is_null() {
                return Err(CuError::INVALID_VALUE);
            }
            // SAFETY: not null, so a descriptor.
            let wanted = unsafe { desc.read() };
            texture.format = wanted.Format;
            texture.channels = wanted.NumChannels;
            let size = [wanted.Width, wanted.Height, Pitch].map(|size| size as u64);
            texture.bind_rows(scope, dptr, size)
        })
    }
}

pub unsafe fn cuTexRefSetFormat(
    hTexRef: *mut c_void,
    fmt: u32,
    NumPackedComponents: i32,
) -> CUresult {
    body! {
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
}

/// The index of a dimension.
fn dimension(dim: i32) -> Result<usize> {
    let index = usize::try_from(dim).ok().filter(|index| *index < 3);
    index.ok_or(CuError::INVALID_VALUE)
}

pub unsafe fn cuTexRefSetAddressMode(hTexRef: *mut c_void, dim: i32, am: u32) -> CUresult {
    body! {
        change(hTexRef, |texture| {
            texture.modes[dimension(dim)?] = if am <= GREATEST_MODE { am } else { CLAMP };
            Ok(())
        })
    }
}

pub unsafe fn cuTexRefSetMipmapFilterMode(hTexRef: *mut c_void, fm: u32) -> CUresult {
    body! {
        change(hTexRef, |texture| {
            if fm > LINEAR {
                return Err(CuError::INVALID_VALUE);
            }
            texture.level_filter = fm;
            Ok(())
        })
    }
}

pub unsafe fn cuTexRefSetMipmapLevelClamp(
    hTexRef: *mut c_void,
    minMipmapLevelClamp: f32,
    maxMipmapLevelClamp: f32,
) -> CUresult {
    body! {
        change(hTexRef, |texture| {
            texture.level_clamp = [minMipmapLevelClamp, maxMipmapLevelClamp];
            Ok(())
        })
    }
}

pub unsafe fn cuTexRefSetBorderColor(hTexRef: *mut c_void, pBorderColor: *const f32) -> CUresult {
    body! {
        change(hTexRef, |texture| {
            if pBorderColor.is_null() {
                return Err(CuError::INVALID_VALUE);
            }
            // SAFETY: not null, so four channels.
            texture.border = unsafe { pBorderColor.cast::<[f32; 4]>().read() };
            Ok(())
        })
    }
}

pub unsafe fn cuTexRefSetFlags(hTexRef: *mut c_void, Flags: u32) -> CUresult {
    body! {
        change(hTexRef, |texture| {
            if Flags & !FLAGS != 0 {
                return Err(CuError::INVALID_VALUE);
            }
            texture.flags = Flags;
            Ok(())
        })
    }
}

pub unsafe fn cuTexRefGetAddress_v2(pdptr: *mut CUdeviceptr, hTexRef: *mut c_void) -> CUresult {
    body! {
        // SAFETY: as the caller promises.
        unsafe {
            super::put_if_wanted(pdptr, 0);
            tell(pdptr, hTexRef, |texture| match texture.bound {
                Bound::Linear { address, .. } | Bound::Rows { address, .. } => Ok(address),
                _ => Err(CuError::INVALID_VALUE),
            })
        }
    }
}

pub unsafe fn cuTexRefGetArray(phArray: *mut CUarray, hTexRef: *mut c_void) -> CUresult {
    body! {
        // SAFETY: as the caller promises.
        unsafe {
            tell(phArray, hTexRef, |texture| match texture.bound {
                Bound::Array(array, _) => Ok(array),
                _ => Err(CuError::INVALID_VALUE),
            })
        }
    }
}

pub unsafe fn cuTexRefGetMipmappedArray(
    phMipmappedArray: *mut CUmipmappedArray,
    hTexRef: *mut c_void,
) -> CUresult {
    body! {
        // SAFETY: as the caller promises.
        unsafe {
            tell(phMipmappedArray, hTexRef, |texture| match texture.bound {
                Bound::Mipmap(mipmap, _) => Ok(mipmap),
                _ => Err(CuError::INVALID_VALUE),
            })
        }
    }
}

pub unsafe fn cuTexRefGetAddressMode(pam: *mut u32, hTexRef: *mut c_void, dim: i32) -> CUresult {
    body! {
        // SAFETY: as the caller promises.
        unsafe { tell(pam, hTexRef, |texture| Ok(texture.modes[dimension(dim)?])) }
    }
}

pub unsafe fn cuTexRefGetFormat(
    pFormat: *mut u32,
    pNumChannels: *mut i32,
    hTexRef: *mut c_void,
) -> CUresult {
    body! {
        context::scope()?;
        let texture = reference::find(hTexRef.addr())?;
        // SAFETY: as the caller promises.
        unsafe {
            put(pFormat, texture.format)?;
            super::put_if_wanted(pNumChannels, texture.channels.cast_signed());
        }
        Ok(())
    }
}

pub unsafe fn cuTexRefGetMipmapLevelClamp(
    pminMipmapLevelClamp: *mut f32,
    pmaxMipmapLevelClamp: *mut f32,
    hTexRef: *mut c_void,
) -> CUresult {
    body! {
        // SAFETY: as the caller promises.
        unsafe {
            tell(pminMipmapLevelClamp, hTexRef, |texture| Ok(texture.level_clamp[0]))?;
            tell(pmaxMipmapLevelClamp, hTexRef, |texture| Ok(texture.level_clamp[1]))
        }
    }
}

pub unsafe fn cuTexRefGetBorderColor(pBorderColor: *mut f32, hTexRef: *mut c_void) -> CUresult {
    body! {
        // SAFETY: four channels, as the caller promises.
        unsafe { tell(pBorderColor.cast::<[f32; 4]>(), hTexRef, |texture| Ok(texture.border)) }
    }
}

pub unsafe fn cuTexRefSetFilterMode(hTexRef: *mut c_void, value: u32) -> CUresult {
    body! {
        change(hTexRef, |texture| {
            texture.filter = value;
            Ok(())
        })
    }
}

pub unsafe fn cuTexRefSetMipmapLevelBias(hTexRef: *mut c_void, value: f32) -> CUresult {
    body! {
        change(hTexRef, |texture| {
            texture.level_bias = value;
            Ok(())
        })
    }
}

pub unsafe fn cuTexRefSetMaxAnisotropy(hTexRef: *mut c_void, value: u32) -> CUresult {
    body! {
        change(hTexRef, |texture| {
            texture.anisotropy = value;
            Ok(())
        })
    }
}

pub unsafe fn cuTexRefGetFilterMode(value: *mut u32, hTexRef: *mut c_void) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe { tell(value, hTexRef, |texture| Ok(texture.filter)) } }
}

pub unsafe fn cuTexRefGetMipmapFilterMode(value: *mut u32, hTexRef: *mut c_void) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe { tell(value, hTexRef, |texture| Ok(texture.level_filter)) } }
}

pub unsafe fn cuTexRefGetMipmapLevelBias(value: *mut f32, hTexRef: *mut c_void) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe { tell(value, hTexRef, |texture| Ok(texture.level_bias)) } }
}

pub unsafe fn cuTexRefGetMaxAnisotropy(value: *mut u32, hTexRef: *mut c_void) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe { tell(value, hTexRef, |texture| Ok(texture.anisotropy)) } }
}

pub unsafe fn cuTexRefGetFlags(value: *mut u32, hTexRef: *mut c_void) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe { tell(value, hTexRef, |texture| Ok(texture.flags)) } }
}

pub unsafe fn cuSurfRefSetArray(hSurfRef: *mut c_void, hArray: CUarray, Flags: u32) -> CUresult {
    body! {
        let scope = context::scope()?;
        if hSurfRef.is_null() {
            return Err(CuError::INVALID_HANDLE);
        }
        let (handle, shape) = array::find(hArray)?;
        if Flags != 0 || shape.flags() & wormhole_api::array::SURFACE_LDST == 0 {
            return Err(CuError::INVALID_VALUE);
        }
        reference::bind_surface(scope, hSurfRef.addr(), (hArray, handle))
    }
}

pub unsafe fn cuSurfRefGetArray(phArray: *mut CUarray, hSurfRef: *mut c_void) -> CUresult {
    body! {
        context::scope()?;
        let array = reference::surface_array(hSurfRef.addr())?;
        // SAFETY: as the caller promises.
        unsafe { put(phArray, array) }
    }
}
