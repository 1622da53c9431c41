//! Modules and libraries.

use std::borrow::Cow;
use std::ffi::c_void;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::Instant;

use wormhole_api::constants::library_option::{
    BINARY_IS_PRESERVED, HOST_UNIVERSAL_FUNCTION_AND_DATA_TABLE,
};
use wormhole_api::constants::module_loading_mode::{EAGER_LOADING, LAZY_LOADING};
use wormhole_api::handle::{Library as LibraryKind, Module as ModuleKind};

use crate::error::{CuError, Result};
use crate::object::context::Scope;
use crate::object::jit::{Jit, Logs};
use crate::object::module::{self, Loadable, Source};
use crate::object::{context, image, jit};
use crate::parameter::{In, InOut, Out, Pointer, Text};
use crate::session;
use crate::types::{
    CUdeviceptr, CUfunction, CUjit_option, CUkernel, CUlibrary, CUlibraryOption, CUmodule,
    CUmoduleLoadingMode,
};

/// Loads an image and writes its handle to `place`.
fn load<K: Loadable>(
    scope: Scope,
    place: Out<'_, *mut c_void>,
    bytes: &[u8],
    source: Option<Source>,
    jit: &Jit,
) -> Result {
    place.not_null()?;
    let (mut logs, start) = (Logs::default(), Instant::now());
    let handle = module::load::<K>(scope, bytes, source, jit, &mut logs);
    jit.write_logs(&logs, start.elapsed());
    let handle = handle?;
    place.put(handle)
}

/// Reads an image from a file. Adds the zero byte that ends a text.
pub(super) fn file(name: Text<'_>) -> Result<Vec<u8>> {
    let name = name.get()?;
    if name.is_empty() {
        return Err(CuError::INVALID_VALUE);
    }
    let name = std::ffi::OsStr::from_bytes(name.to_bytes());
    let mut bytes = std::fs::read(name).map_err(|_| CuError::FILE_NOT_FOUND)?;
    bytes.push(0);
    Ok(bytes)
}

pub fn cuModuleLoad(module: Out<'_, CUmodule>, fname: Text<'_>) -> Result {
    let scope = context::scope()?;
    load::<ModuleKind>(scope, module, &file(fname)?, None, &jit::NONE)
}

pub fn cuModuleLoadData(module: Out<'_, CUmodule>, image: Pointer<'_, c_void>) -> Result {
    let scope = context::scope()?;
    load::<ModuleKind>(scope, module, &image::bytes(image)?, None, &jit::NONE)
}

pub fn cuModuleLoadDataEx(
    module: Out<'_, CUmodule>,
    image: Pointer<'_, c_void>,
    _numOptions: u32,
    options: In<'_, [CUjit_option]>,
    optionValues: InOut<'_, [*mut c_void]>,
) -> Result {
    let scope = context::scope()?;
    let (jit, bytes) = (Jit::read(options, optionValues)?, image::bytes(image)?);
    load::<ModuleKind>(scope, module, &bytes, None, &jit)
}

pub fn cuModuleLoadFatBinary(module: Out<'_, CUmodule>, fatCubin: Pointer<'_, c_void>) -> Result {
    cuModuleLoadData(module, fatCubin)
}

pub fn cuModuleUnload(hmod: CUmodule) -> Result {
    let scope = context::scope_or(|| module::context_of(hmod))?;
    if module::is_of_library(hmod) {
        return Err(CuError::INVALID_HANDLE);
    }
    module::unload::<ModuleKind>(scope, hmod)
}

pub fn cuModuleGetLoadingMode(mode: Out<'_, CUmoduleLoadingMode>) -> Result {
    session::session()?;
    let eager = std::env::var("CUDA_MODULE_LOADING").is_ok_and(|value| value == "EAGER");
    mode.put(if eager { EAGER_LOADING } else { LAZY_LOADING })
}

fn function<K: Loadable>(
    place: Out<'_, *mut c_void>,
    image: *mut c_void,
    name: Text<'_>,
) -> Result {
    if place.is_null() || name.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    if image.is_null() {
        return Err(CuError::INVALID_HANDLE);
    }
    let scope = context::scope_or_primary()?;
    place.put(module::function::<K>(scope, image, name.get()?)?)
}

fn global<K: Loadable>(
    scope: Scope,
    address: Out<'_, CUdeviceptr>,
    bytes: Out<'_, usize>,
    image: *mut c_void,
    name: Text<'_>,
) -> Result {
    if name.get()?.is_empty() {
        return Err(CuError::INVALID_VALUE);
    }
    let (found, length) = module::global::<K>(scope, image, name.get()?)?;
    address.put_if_wanted(found);
    bytes.put_if_wanted(usize::try_from(length).unwrap_or(usize::MAX));
    Ok(())
}

pub fn cuModuleGetFunction(hfunc: Out<'_, CUfunction>, hmod: CUmodule, name: Text<'_>) -> Result {
    context::scope_or_primary()?.session.alive()?;
    if !name.is_null() && name.get()?.is_empty() {
        return Err(CuError::INVALID_VALUE);
    }
    function::<ModuleKind>(hfunc, hmod, name)
}

pub fn cuModuleGetGlobal_v2(
    dptr: Out<'_, CUdeviceptr>,
    bytes: Out<'_, usize>,
    hmod: CUmodule,
    name: Text<'_>,
) -> Result {
    global::<ModuleKind>(context::scope_or_primary()?, dptr, bytes, hmod, name)
}

/// Returns whether a host table is requested without a table. The table registers host code with a library, which has
/// no meaning across the window.
fn lacks_table(
    options: In<'_, [CUlibraryOption]>,
    values: InOut<'_, [*mut c_void]>,
) -> Result<bool> {
    let mut numbered = options.values()?.enumerate();
    Ok(numbered.any(|(index, option)| {
        option == HOST_UNIVERSAL_FUNCTION_AND_DATA_TABLE
            && !values.get(index).is_ok_and(|table| !table.is_null())
    }))
}

pub fn cuLibraryLoadData(
    library: Out<'_, CUlibrary>,
    code: Pointer<'_, c_void>,
    jitOptions: In<'_, [CUjit_option]>,
    jitOptionsValues: InOut<'_, [*mut c_void]>,
    _numJitOptions: u32,
    libraryOptions: In<'_, [CUlibraryOption]>,
    libraryOptionValues: InOut<'_, [*mut c_void]>,
    _numLibraryOptions: u32,
) -> Result {
    if library.is_null() || code.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let scope = context::scope_or_primary()?;
    if lacks_table(libraryOptions, libraryOptionValues)? {
        return Err(CuError::INVALID_VALUE);
    }
    let jit = Jit::read(jitOptions, jitOptionsValues)?;
    let bytes = image::bytes(code)?;
    // A preserved image stays unchanged in memory until the library is unloaded.
    let preserved = libraryOptions
        .values()?
        .any(|option| option == BINARY_IS_PRESERVED);
    let source = match &bytes {
        Cow::Borrowed(bytes) if preserved => Source::Preserved {
            address: bytes.as_ptr().expose_provenance(),
            bytes: bytes.len(),
        },
        _ => Source::Kept((&*bytes).into()),
    };
    load::<LibraryKind>(scope, library, &bytes, Some(source), &jit)
}

pub fn cuLibraryLoadFromFile(
    library: Out<'_, CUlibrary>,
    fileName: Text<'_>,
    jitOptions: In<'_, [CUjit_option]>,
    jitOptionsValues: InOut<'_, [*mut c_void]>,
    _numJitOptions: u32,
    _libraryOptions: In<'_, [CUlibraryOption]>,
    _libraryOptionValues: InOut<'_, [*mut c_void]>,
    _numLibraryOptions: u32,
) -> Result {
    let scope = context::scope_or_primary()?;
    let jit = Jit::read(jitOptions, jitOptionsValues)?;
    let image: Arc<[u8]> = file(fileName)?.into();
    load::<LibraryKind>(
        scope,
        library,
        &image,
        Some(Source::Kept(Arc::clone(&image))),
        &jit,
    )
}

pub fn cuLibraryUnload(library: CUlibrary) -> Result {
    if library.is_null() {
        return Err(CuError::INVALID_HANDLE);
    }
    module::unload::<LibraryKind>(context::scope_or_primary()?, library)
}

pub fn cuLibraryGetKernel(
    pKernel: Out<'_, CUkernel>,
    library: CUlibrary,
    name: Text<'_>,
) -> Result {
    function::<LibraryKind>(pKernel, library, name)
}

pub fn cuLibraryGetGlobal(
    dptr: Out<'_, CUdeviceptr>,
    bytes: Out<'_, usize>,
    library: CUlibrary,
    name: Text<'_>,
) -> Result {
    name.not_null()?;
    if library.is_null() {
        return Err(CuError::INVALID_HANDLE);
    }
    global::<LibraryKind>(context::scope()?, dptr, bytes, library, name)
}

/// Returns a managed variable. Needs no current context: the runtime calls this before it makes one current.
pub fn cuLibraryGetManaged(
    dptr: Out<'_, CUdeviceptr>,
    bytes: Out<'_, usize>,
    library: CUlibrary,
    name: Text<'_>,
) -> Result {
    let scope = context::scope_or_primary()?;
    let name = name.get()?;
    let (address, length) = module::global::<LibraryKind>(scope, library, name)?;
    if !module::is_managed(address) {
        return Err(CuError::NOT_FOUND);
    }
    dptr.put_if_wanted(address);
    bytes.put_if_wanted(usize::try_from(length).unwrap_or(usize::MAX));
    Ok(())
}

pub fn cuLibraryGetModule(pMod: Out<'_, CUmodule>, library: CUlibrary) -> Result {
    let scope = context::scope()?;
    pMod.put(module::of_library(scope, library)?)
}
