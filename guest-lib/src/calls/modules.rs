//! Modules and libraries.

use std::borrow::Cow;
use std::ffi::{c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::Instant;

use wormhole_api::handle::{Library as LibraryKind, Module as ModuleKind};

use super::{body, put, put_if_wanted, string};
use crate::context::Scope;
use crate::error::{CuError, Result};
use crate::jit::{Jit, Logs};
use crate::module::{self, Loadable, Source};
use crate::types::{
    CUdeviceptr, CUfunction, CUjit_option, CUkernel, CUlibrary, CUlibraryOption, CUmodule,
    CUmoduleLoadingMode, CUresult,
};
use crate::{context, image, jit, session};

/// `CU_MODULE_EAGER_LOADING` and `CU_MODULE_LAZY_LOADING`.
const EAGER: CUmoduleLoadingMode = 1;
const LAZY: CUmoduleLoadingMode = 2;

/// Loads an image for `place`.
fn load<K: Loadable>(
    scope: Scope,
    place: *mut *mut c_void,
    bytes: &[u8],
    source: Option<Source>,
    jit: &Jit,
) -> Result {
    if place.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let (mut logs, start) = (Logs::default(), Instant::now());
    let handle = module::load::<K>(scope, bytes, source, jit, &mut logs);
    jit.tell(&logs, start.elapsed());
    let handle = handle?;
    // SAFETY: the caller of the export promises that the place is writable.
    unsafe { put(place, handle) }
}

/// The content of a file, as an image: with the zero byte that text ends with.
pub(super) unsafe fn file(name: *const c_char) -> Result<Vec<u8>> {
    // SAFETY: as the caller promises.
    let name = unsafe { string(name) }?;
    if name.is_empty() {
        return Err(CuError::INVALID_VALUE);
    }
    let name = std::ffi::OsStr::from_bytes(name.to_bytes());
    let mut bytes = std::fs::read(name).map_err(|_| CuError::FILE_NOT_FOUND)?;
    bytes.push(0);
    Ok(bytes)
}

pub unsafe fn cuModuleLoad(module: *mut CUmodule, fname: *const c_char) -> CUresult {
    body! {
        let scope = context::scope()?;
        // SAFETY: as the caller promises.
        load::<ModuleKind>(scope, module, &unsafe { file(fname) }?, None, &jit::NONE)
    }
}

pub unsafe fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void) -> CUresult {
    body! {
        let scope = context::scope()?;
        // SAFETY: as the caller promises.
        load::<ModuleKind>(scope, module, &unsafe { image::bytes(image) }?, None, &jit::NONE)
    }
}

pub unsafe fn cuModuleLoadDataEx(
    module: *mut CUmodule,
    image: *const c_void,
    numOptions: u32,
    options: *const CUjit_option,
    optionValues: *mut *mut c_void,
) -> CUresult {
    body! {
        let scope = context::scope()?;
        // SAFETY: as the caller promises.
        let (jit, bytes) = unsafe { (Jit::read(numOptions, options, optionValues)?, image::bytes(image)?) };
        load::<ModuleKind>(scope, module, &bytes, None, &jit)
    }
}

pub unsafe fn cuModuleLoadFatBinary(module: *mut CUmodule, fatCubin: *const c_void) -> CUresult {
    // SAFETY: as the caller promises.
    unsafe { cuModuleLoadData(module, fatCubin) }
}

pub unsafe fn cuModuleUnload(hmod: CUmodule) -> CUresult {
    body! {
        let scope = context::scope_or(|| module::context_of(hmod))?;
        if module::is_of_library(hmod) {
            return Err(CuError::INVALID_HANDLE);
        }
        module::unload::<ModuleKind>(scope, hmod)
    }
}

pub unsafe fn cuModuleGetLoadingMode(mode: *mut CUmoduleLoadingMode) -> CUresult {
    body! {
        session::session()?;
        let eager = std::env::var("CUDA_MODULE_LOADING").is_ok_and(|value| value == "EAGER");
        // SAFETY: as the caller promises.
        unsafe { put(mode, if eager { EAGER } else { LAZY }) }
    }
}

/// # Safety
/// `place` is null or writable, `name` null or a string.
unsafe fn function<K: Loadable>(
    place: *mut *mut c_void,
    image: *mut c_void,
    name: *const c_char,
) -> Result {
    if place.is_null() || name.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    if image.is_null() {
        return Err(CuError::INVALID_HANDLE);
    }
    let scope = context::scope_or_primary()?;
    // SAFETY: as the caller promises.
    unsafe { put(place, module::function::<K>(scope, image, string(name)?)?) }
}

/// # Safety
/// `address` and `bytes` are null or writable, `name` null or a string.
unsafe fn global<K: Loadable>(
    scope: Scope,
    address: *mut CUdeviceptr,
    bytes: *mut usize,
    image: *mut c_void,
    name: *const c_char,
) -> Result {
    // SAFETY: as the caller promises.
    if unsafe { string(name) }?.is_empty() {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: as the caller promises.
    let (found, length) = module::global::<K>(scope, image, unsafe { string(name) }?)?;
    // SAFETY: as the caller promises.
    unsafe {
        put_if_wanted(address, found);
        put_if_wanted(bytes, usize::try_from(length).unwrap_or(usize::MAX));
    }
    Ok(())
}

pub unsafe fn cuModuleGetFunction(
    hfunc: *mut CUfunction,
    hmod: CUmodule,
    name: *const c_char,
) -> CUresult {
    body! {
        context::scope_or_primary()?.session.alive()?;
        // SAFETY: as the caller promises.
        if !name.is_null() && unsafe { string(name) }?.is_empty() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: as the caller promises.
        unsafe { function::<ModuleKind>(hfunc, hmod, name) }
    }
}

pub unsafe fn cuModuleGetGlobal_v2(
    dptr: *mut CUdeviceptr,
    bytes: *mut usize,
    hmod: CUmodule,
    name: *const c_char,
) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe { global::<ModuleKind>(context::scope_or_primary()?, dptr, bytes, hmod, name) } }
}

/// `CU_LIBRARY_BINARY_IS_PRESERVED`: the image stays where it is until the library is unloaded. The other
/// option is for host code that is registered with a library, which has no meaning across the window.
const BINARY_IS_PRESERVED: CUlibraryOption = 1;
const HOST_TABLE: CUlibraryOption = 0;

/// Whether a table of the program's own functions is asked for that is not there.
///
/// # Safety
/// `options` and `values` have `count` elements, or are null.
unsafe fn lacks_table(
    options: *const CUlibraryOption,
    values: *mut *mut c_void,
    count: u32,
) -> bool {
    (0..count as usize).any(|index| {
        // SAFETY: as the caller promises.
        unsafe {
            options.add(index).read() == HOST_TABLE
                && (values.is_null() || values.add(index).read().is_null())
        }
    })
}

/// # Safety
/// `options` has `count` elements.
unsafe fn is_preserved(options: *const CUlibraryOption, count: u32) -> bool {
    // SAFETY: as the caller promises.
    (0..count as usize).any(|index| unsafe { options.add(index).read() } == BINARY_IS_PRESERVED)
}

pub unsafe fn cuLibraryLoadData(
    library: *mut CUlibrary,
    code: *const c_void,
    jitOptions: *const CUjit_option,
    jitOptionsValues: *mut *mut c_void,
    numJitOptions: u32,
    libraryOptions: *const CUlibraryOption,
    libraryOptionValues: *mut *mut c_void,
    numLibraryOptions: u32,
) -> CUresult {
    body! {
        if library.is_null() || code.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        let scope = context::scope_or_primary()?;
        if libraryOptions.is_null() && numLibraryOptions != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: as the caller promises.
        if unsafe { lacks_table(libraryOptions, libraryOptionValues, numLibraryOptions) } {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: as the caller promises.
        let jit = unsafe { Jit::read(numJitOptions, jitOptions, jitOptionsValues) }?;
        // SAFETY: as the caller promises.
        let bytes = unsafe { image::bytes(code) }?;
        // SAFETY: as the caller promises.
        let preserved = unsafe { is_preserved(libraryOptions, numLibraryOptions) };
        let source = match &bytes {
            Cow::Borrowed(bytes) if preserved => Source::Preserved {
                address: bytes.as_ptr().expose_provenance(),
                bytes: bytes.len(),
            },
            _ => Source::Kept((&*bytes).into()),
        };
        load::<LibraryKind>(scope, library, &bytes, Some(source), &jit)
    }
}

pub unsafe fn cuLibraryLoadFromFile(
    library: *mut CUlibrary,
    fileName: *const c_char,
    jitOptions: *const CUjit_option,
    jitOptionsValues: *mut *mut c_void,
    numJitOptions: u32,
    _libraryOptions: *const CUlibraryOption,
    _libraryOptionValues: *mut *mut c_void,
    _numLibraryOptions: u32,
) -> CUresult {
    body! {
        let scope = context::scope_or_primary()?;
        // SAFETY: as the caller promises.
        let jit = unsafe { Jit::read(numJitOptions, jitOptions, jitOptionsValues) }?;
        // SAFETY: as the caller promises.
        let image: Arc<[u8]> = unsafe { file(fileName) }?.into();
        load::<LibraryKind>(scope, library, &image, Some(Source::Kept(Arc::clone(&image))), &jit)
    }
}

pub unsafe fn cuLibraryUnload(library: CUlibrary) -> CUresult {
    body! {
        if library.is_null() {
            return Err(CuError::INVALID_HANDLE);
        }
        module::unload::<LibraryKind>(context::scope_or_primary()?, library)
    }
}

pub unsafe fn cuLibraryGetKernel(
    pKernel: *mut CUkernel,
    library: CUlibrary,
    name: *const c_char,
) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe { function::<LibraryKind>(pKernel, library, name) } }
}

pub unsafe fn cuLibraryGetGlobal(
    dptr: *mut CUdeviceptr,
    bytes: *mut usize,
    library: CUlibrary,
    name: *const c_char,
) -> CUresult {
    body! {
        if name.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        if library.is_null() {
            return Err(CuError::INVALID_HANDLE);
        }
        // SAFETY: as the caller promises.
        unsafe { global::<LibraryKind>(context::scope()?, dptr, bytes, library, name) }
    }
}

/// Needs no current context: the runtime asks before it makes one current.
pub unsafe fn cuLibraryGetManaged(
    dptr: *mut CUdeviceptr,
    bytes: *mut usize,
    library: CUlibrary,
    name: *const c_char,
) -> CUresult {
    body! {
        let scope = context::scope_or_primary()?;
        // SAFETY: as the caller promises.
        let name = unsafe { string(name) }?;
        let (address, length) = module::global::<LibraryKind>(scope, library, name)?;
        if !module::is_managed(address) {
            return Err(CuError::NOT_FOUND);
        }
        // SAFETY: as the caller promises.
        unsafe {
            put_if_wanted(dptr, address);
            put_if_wanted(bytes, usize::try_from(length).unwrap_or(usize::MAX));
        }
        Ok(())
    }
}

pub unsafe fn cuLibraryGetModule(pMod: *mut CUmodule, library: CUlibrary) -> CUresult {
    body! {
        let scope = context::scope()?;
        // SAFETY: as the caller promises.
        unsafe { put(pMod, module::of_library(scope, library)?) }
    }
}
