//! Modules and libraries.

use std::ffi::{c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use wormhole_api::handle::{Library as LibraryKind, Module as ModuleKind};

use super::{body, put, put_if_wanted, string};
use crate::context::Scope;
use crate::error::{CuError, Result};
use crate::module::{self, Loadable, Source};
use crate::types::{
    CUdeviceptr, CUfunction, CUjit_option, CUkernel, CUlibrary, CUlibraryOption, CUmodule,
    CUmoduleLoadingMode, CUresult,
};
use crate::{context, image};

/// `CU_MODULE_EAGER_LOADING` and `CU_MODULE_LAZY_LOADING`.
const EAGER: CUmoduleLoadingMode = 1;
const LAZY: CUmoduleLoadingMode = 2;

/// `CU_JIT_*`: the options that give buffers for logs.
const INFO_LOG: CUjit_option = 3;
const INFO_LOG_BYTES: CUjit_option = 4;
const ERROR_LOG: CUjit_option = 5;
const ERROR_LOG_BYTES: CUjit_option = 6;

/// The log buffers among a call's compiler options. The other options are the host driver's to choose:
/// they ask for speed or debug information, never for another result.
#[derive(Debug)]
pub(super) struct Logs {
    keys: Vec<CUjit_option>,
    values: *mut *mut c_void,
}

// SAFETY: the array of values is the program's, which lends it to the driver for the call, or until the
// link is destroyed.
unsafe impl Send for Logs {}

impl Logs {
    /// # Safety
    /// Both arrays have `count` elements.
    pub(super) unsafe fn read(
        count: u32,
        keys: *const CUjit_option,
        values: *mut *mut c_void,
    ) -> Result<Self> {
        if count == 0 {
            return Ok(Self {
                keys: Vec::new(),
                values,
            });
        }
        if keys.is_null() || values.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: as the caller promises.
        let keys = unsafe { std::slice::from_raw_parts(keys, count as usize) }.to_vec();
        Ok(Self { keys, values })
    }

    fn place(&self, key: CUjit_option) -> Option<*mut *mut c_void> {
        let index = self.keys.iter().position(|found| *found == key)?;
        // SAFETY: the index is below the length of both arrays.
        Some(unsafe { self.values.add(index) })
    }

    /// There is nothing to tell.
    pub(super) fn clear(&self) {
        self.fill(INFO_LOG, INFO_LOG_BYTES, &[]);
        self.fill(ERROR_LOG, ERROR_LOG_BYTES, &[]);
    }

    /// Fills one of the buffers; its size option becomes the length of the text.
    fn fill(&self, buffer: CUjit_option, bytes: CUjit_option, text: &[u8]) {
        let (Some(buffer), Some(bytes)) = (self.place(buffer), self.place(bytes)) else {
            return;
        };
        // SAFETY: both point into the program's array of values; a size is passed as the pointer itself.
        let (buffer, room) = unsafe { (buffer.read().cast::<u8>(), bytes.read().addr()) };
        if buffer.is_null() || room == 0 {
            return;
        }
        let length = text.len().min(room - 1);
        // SAFETY: the program vouches for `room` bytes.
        unsafe {
            buffer.copy_from_nonoverlapping(text.as_ptr(), length);
            buffer.add(length).write(0);
            bytes.write(std::ptr::without_provenance_mut(length));
        }
    }
}

/// Loads an image for `place`.
fn load<K: Loadable>(
    scope: Scope,
    place: *mut *mut c_void,
    bytes: &[u8],
    source: Option<Source>,
    logs: &Logs,
) -> Result {
    if place.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let (handle, log) = module::load::<K>(scope, bytes, source)?;
    logs.fill(INFO_LOG, INFO_LOG_BYTES, &log);
    logs.fill(ERROR_LOG, ERROR_LOG_BYTES, &[]);
    // SAFETY: the caller of the export promises that the place is writable.
    unsafe { put(place, handle) }
}

const NO_LOGS: Logs = Logs {
    keys: Vec::new(),
    values: std::ptr::null_mut(),
};

/// The content of a file, as an image: with the zero byte that text ends with.
pub(super) unsafe fn file(name: *const c_char) -> Result<Vec<u8>> {
    // SAFETY: as the caller promises.
    let name = std::ffi::OsStr::from_bytes(unsafe { string(name) }?.to_bytes());
    let mut bytes = std::fs::read(name).map_err(|_| CuError::FILE_NOT_FOUND)?;
    bytes.push(0);
    Ok(bytes)
}

pub unsafe fn cuModuleLoad(module: *mut CUmodule, fname: *const c_char) -> CUresult {
    body! {
        let scope = context::scope()?;
        // SAFETY: as the caller promises.
        load::<ModuleKind>(scope, module, &unsafe { file(fname) }?, None, &NO_LOGS)
    }
}

pub unsafe fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void) -> CUresult {
    body! {
        let scope = context::scope()?;
        // SAFETY: as the caller promises.
        load::<ModuleKind>(scope, module, unsafe { image::bytes(image) }?, None, &NO_LOGS)
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
        let (logs, bytes) = unsafe { (Logs::read(numOptions, options, optionValues)?, image::bytes(image)?) };
        load::<ModuleKind>(scope, module, bytes, None, &logs)
    }
}

pub unsafe fn cuModuleLoadFatBinary(module: *mut CUmodule, fatCubin: *const c_void) -> CUresult {
    // SAFETY: as the caller promises.
    unsafe { cuModuleLoadData(module, fatCubin) }
}

pub unsafe fn cuModuleUnload(hmod: CUmodule) -> CUresult {
    body! {
        let scope = context::scope()?;
        if module::is_of_library(hmod) {
            return Err(CuError::INVALID_HANDLE);
        }
        module::unload::<ModuleKind>(scope, hmod)
    }
}

pub unsafe fn cuModuleGetLoadingMode(mode: *mut CUmoduleLoadingMode) -> CUresult {
    body! {
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
    let scope = context::scope_or_primary()?;
    if place.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: as the caller promises.
    unsafe { put(place, module::function::<K>(scope, image, string(name)?)?) }
}

/// # Safety
/// `address` and `bytes` are null or writable, `name` null or a string.
unsafe fn global<K: Loadable>(
    address: *mut CUdeviceptr,
    bytes: *mut usize,
    image: *mut c_void,
    name: *const c_char,
) -> Result {
    let scope = context::scope()?;
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
    // SAFETY: as the caller promises.
    body! { unsafe { function::<ModuleKind>(hfunc, hmod, name) } }
}

pub unsafe fn cuModuleGetGlobal_v2(
    dptr: *mut CUdeviceptr,
    bytes: *mut usize,
    hmod: CUmodule,
    name: *const c_char,
) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe { global::<ModuleKind>(dptr, bytes, hmod, name) } }
}

/// `CU_LIBRARY_BINARY_IS_PRESERVED`: the image stays where it is until the library is unloaded. The other
/// option is for host code that is registered with a library, which has no meaning across the window.
const BINARY_IS_PRESERVED: CUlibraryOption = 1;

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
    _libraryOptionValues: *mut *mut c_void,
    numLibraryOptions: u32,
) -> CUresult {
    body! {
        let scope = context::scope_or_primary()?;
        // SAFETY: as the caller promises.
        let logs = unsafe { Logs::read(numJitOptions, jitOptions, jitOptionsValues) }?;
        // SAFETY: as the caller promises.
        let bytes = unsafe { image::bytes(code) }?;
        // SAFETY: as the caller promises.
        let source = if unsafe { is_preserved(libraryOptions, numLibraryOptions) } {
            Source::Preserved { address: bytes.as_ptr().expose_provenance(), bytes: bytes.len() }
        } else {
            Source::Kept(bytes.into())
        };
        load::<LibraryKind>(scope, library, bytes, Some(source), &logs)
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
        let logs = unsafe { Logs::read(numJitOptions, jitOptions, jitOptionsValues) }?;
        // SAFETY: as the caller promises.
        let image: Arc<[u8]> = unsafe { file(fileName) }?.into();
        load::<LibraryKind>(scope, library, &image, Some(Source::Kept(Arc::clone(&image))), &logs)
    }
}

pub unsafe fn cuLibraryUnload(library: CUlibrary) -> CUresult {
    body! { module::unload::<LibraryKind>(context::scope_or_primary()?, library) }
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
    // SAFETY: as the caller promises.
    body! { unsafe { global::<LibraryKind>(dptr, bytes, library, name) } }
}

pub unsafe fn cuLibraryGetModule(pMod: *mut CUmodule, library: CUlibrary) -> CUresult {
    body! {
        let scope = context::scope()?;
        // SAFETY: as the caller promises.
        unsafe { put(pMod, module::of_library(scope, library)?) }
    }
}
