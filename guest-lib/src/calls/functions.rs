//! Functions and kernels, which are one thing here.

use std::ffi::{c_char, c_void};

use super::devices::ordinal;
use super::{body, put, put_if_wanted};
use crate::context::{self, Scope};
use crate::error::{CuError, Result};
use crate::function::{self, Owner};
use crate::handle::to_pointer;
use crate::module;
use crate::types::{
    CUdevice, CUfunc_cache, CUfunction, CUfunction_attribute, CUfunctionLoadingState, CUkernel,
    CUlibrary, CUmodule, CUresult,
};

/// `CU_FUNCTION_LOADING_STATE_LOADED`.
const LOADED: CUfunctionLoadingState = 1;

/// The calling thread's scope, for a device that a program names.
fn on_device(dev: CUdevice) -> Result<Scope> {
    context::on_device(ordinal(dev)?)
}

/// Null is no function, also before there is a session.
fn named(function: *mut c_void) -> Result {
    if function.is_null() {
        Err(CuError::INVALID_HANDLE)
    } else {
        Ok(())
    }
}

/// # Safety
/// `place` is null or writable.
unsafe fn attribute(
    scope: Scope,
    place: *mut i32,
    id: CUfunction_attribute,
    function: *mut c_void,
) -> Result {
    let (handle, facts) = function::find_on(scope, function)?;
    // SAFETY: as the caller promises.
    unsafe { put(place, facts.attribute(scope, handle, id)?) }
}

fn set_attribute(
    scope: Scope,
    function: *mut c_void,
    id: CUfunction_attribute,
    value: i32,
) -> Result {
    let (handle, facts) = function::find_on(scope, function)?;
    facts.set_attribute(scope, handle, id, value)
}

fn set_cache_config(scope: Scope, function: *mut c_void, config: CUfunc_cache) -> Result {
    let (handle, facts) = function::find_on(scope, function)?;
    facts.set_cache_config(scope, handle, config)
}

/// # Safety
/// `place` is null or writable.
unsafe fn name(place: *mut *const c_char, function: *mut c_void) -> Result {
    let (_, facts) = function::find(function)?;
    // SAFETY: as the caller promises. The facts of a function are never freed.
    unsafe { put(place, facts.name.as_ptr()) }
}

/// # Safety
/// `offset` and `size` are null or writable.
unsafe fn parameter(
    function: *mut c_void,
    index: usize,
    offset: *mut usize,
    size: *mut usize,
) -> Result {
    let (_, facts) = function::find(function)?;
    let parameter = facts.parameters.get(index).ok_or(CuError::INVALID_VALUE)?;
    // SAFETY: as the caller promises.
    unsafe {
        put(offset, parameter.offset as usize)?;
        put_if_wanted(size, parameter.size as usize);
    }
    Ok(())
}

pub unsafe fn cuFuncGetAttribute(
    pi: *mut i32,
    attrib: CUfunction_attribute,
    hfunc: CUfunction,
) -> CUresult {
    body! {
        if pi.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        named(hfunc)?;
        let scope = context::scope_or_primary()?;
        scope.session.alive()?;
        // SAFETY: as the caller promises.
        unsafe { attribute(scope, pi, attrib, hfunc) }
    }
}

pub unsafe fn cuFuncSetAttribute(
    hfunc: CUfunction,
    attrib: CUfunction_attribute,
    value: i32,
) -> CUresult {
    body! { set_attribute(context::scope_or_primary()?, hfunc, attrib, value) }
}

pub unsafe fn cuFuncSetCacheConfig(hfunc: CUfunction, config: CUfunc_cache) -> CUresult {
    body! { set_cache_config(context::scope_or_primary()?, hfunc, config) }
}

pub unsafe fn cuFuncGetModule(hmod: *mut CUmodule, hfunc: CUfunction) -> CUresult {
    body! {
        let scope = context::scope()?;
        let module = match function::find(hfunc)?.1.owner {
            Owner::Module(module) => module,
            Owner::Library(library) => module::of_library(scope, library)?,
        };
        // SAFETY: as the caller promises.
        unsafe { put(hmod, module) }
    }
}

pub unsafe fn cuFuncGetName(name: *mut *const c_char, hfunc: CUfunction) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe { self::name(name, hfunc) } }
}

pub unsafe fn cuFuncGetParamInfo(
    func: CUfunction,
    paramIndex: usize,
    paramOffset: *mut usize,
    paramSize: *mut usize,
) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe { parameter(func, paramIndex, paramOffset, paramSize) } }
}

pub unsafe fn cuFuncIsLoaded(state: *mut CUfunctionLoadingState, hfunc: CUfunction) -> CUresult {
    body! {
        function::find(hfunc)?;
        // SAFETY: as the caller promises.
        unsafe { put(state, LOADED) }
    }
}

pub unsafe fn cuFuncLoad(hfunc: CUfunction) -> CUresult {
    body! { function::find(hfunc).map(|_| ()) }
}

pub unsafe fn cuKernelGetAttribute(
    pi: *mut i32,
    attrib: CUfunction_attribute,
    kernel: CUkernel,
    dev: CUdevice,
) -> CUresult {
    body! {
        named(kernel)?;
        let scope = on_device(dev)?;
        // SAFETY: as the caller promises.
        unsafe { attribute(scope, pi, attrib, kernel) }
    }
}

pub unsafe fn cuKernelSetAttribute(
    attrib: CUfunction_attribute,
    val: i32,
    kernel: CUkernel,
    dev: CUdevice,
) -> CUresult {
    body! {
        named(kernel)?;
        set_attribute(on_device(dev)?, kernel, attrib, val)
    }
}

pub unsafe fn cuKernelSetCacheConfig(
    kernel: CUkernel,
    config: CUfunc_cache,
    dev: CUdevice,
) -> CUresult {
    body! {
        set_cache_config(on_device(dev)?, kernel, config)
    }
}

pub unsafe fn cuKernelGetFunction(pFunc: *mut CUfunction, kernel: CUkernel) -> CUresult {
    body! {
        if pFunc.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        named(kernel)?;
        let scope = context::scope()?;
        scope.session.alive()?;
        let (function, _) = function::find_on(scope, kernel)?;
        // SAFETY: as the caller promises.
        unsafe { put(pFunc, to_pointer(function)) }
    }
}

pub unsafe fn cuKernelGetLibrary(pLib: *mut CUlibrary, kernel: CUkernel) -> CUresult {
    body! {
        match function::find(kernel)?.1.owner {
            // SAFETY: as the caller promises.
            Owner::Library(library) => unsafe { put(pLib, module::original(library)?) },
            Owner::Module(_) => Err(CuError::INVALID_HANDLE),
        }
    }
}

pub unsafe fn cuKernelGetName(name: *mut *const c_char, hfunc: CUkernel) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe { self::name(name, hfunc) } }
}

pub unsafe fn cuKernelGetParamInfo(
    kernel: CUkernel,
    paramIndex: usize,
    paramOffset: *mut usize,
    paramSize: *mut usize,
) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe { parameter(kernel, paramIndex, paramOffset, paramSize) } }
}
