//! Functions and kernels (`CUfunction` and `CUkernel`), which are the same objects here.

use std::ffi::{c_char, c_void};

use wormhole_api::constants::function_loading_state::LOADED;

use super::devices::ordinal;
use crate::error::{CuError, Result};
use crate::handle::to_pointer;
use crate::object::context::{self, Scope};
use crate::object::function::{self, Owner};
use crate::object::module;
use crate::parameter::Out;
use crate::types::{
    CUdevice, CUfunc_cache, CUfunction, CUfunction_attribute, CUfunctionLoadingState, CUkernel,
    CUlibrary, CUmodule,
};

/// Returns the calling thread's scope with another device.
fn on_device(dev: CUdevice) -> Result<Scope> {
    context::on_device(ordinal(dev)?)
}

/// Fails for a null function, even before there is a session.
fn named(function: *mut c_void) -> Result {
    if function.is_null() {
        Err(CuError::INVALID_HANDLE)
    } else {
        Ok(())
    }
}

fn attribute(
    scope: Scope,
    place: Out<'_, i32>,
    id: CUfunction_attribute,
    function: *mut c_void,
) -> Result {
    let (handle, facts) = function::find_on(scope, function)?;
    place.put(facts.attribute(scope, handle, id)?)
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

fn name(place: Out<'_, *const c_char>, function: *mut c_void) -> Result {
    let (_, facts) = function::find(function)?;
    // The record of a function is never freed.
    place.put(facts.name.as_ptr())
}

fn parameter(
    function: *mut c_void,
    index: usize,
    offset: Out<'_, usize>,
    size: Out<'_, usize>,
) -> Result {
    let (_, facts) = function::find(function)?;
    let parameter = facts.parameters.get(index).ok_or(CuError::INVALID_VALUE)?;
    offset.put(parameter.offset as usize)?;
    size.put_if_wanted(parameter.size as usize);
    Ok(())
}

pub fn cuFuncGetAttribute(
    pi: Out<'_, i32>,
    attrib: CUfunction_attribute,
    hfunc: CUfunction,
) -> Result {
    pi.not_null()?;
    named(hfunc)?;
    let scope = context::scope_or_primary()?;
    scope.session.alive()?;
    attribute(scope, pi, attrib, hfunc)
}

pub fn cuFuncSetAttribute(hfunc: CUfunction, attrib: CUfunction_attribute, value: i32) -> Result {
    set_attribute(context::scope_or_primary()?, hfunc, attrib, value)
}

pub fn cuFuncSetCacheConfig(hfunc: CUfunction, config: CUfunc_cache) -> Result {
    set_cache_config(context::scope_or_primary()?, hfunc, config)
}

pub fn cuFuncGetModule(hmod: Out<'_, CUmodule>, hfunc: CUfunction) -> Result {
    let scope = context::scope()?;
    let module = match function::find(hfunc)?.1.owner {
        Owner::Module(module) => module,
        Owner::Library(library) => module::of_library(scope, library)?,
    };
    hmod.put(module)
}

pub fn cuFuncGetName(name: Out<'_, *const c_char>, hfunc: CUfunction) -> Result {
    self::name(name, hfunc)
}

pub fn cuFuncGetParamInfo(
    func: CUfunction,
    paramIndex: usize,
    paramOffset: Out<'_, usize>,
    paramSize: Out<'_, usize>,
) -> Result {
    parameter(func, paramIndex, paramOffset, paramSize)
}

pub fn cuFuncIsLoaded(state: Out<'_, CUfunctionLoadingState>, hfunc: CUfunction) -> Result {
    function::find(hfunc)?;
    state.put(LOADED)
}

pub fn cuFuncLoad(hfunc: CUfunction) -> Result {
    function::find(hfunc).map(|_| ())
}

pub fn cuKernelGetAttribute(
    pi: Out<'_, i32>,
    attrib: CUfunction_attribute,
    kernel: CUkernel,
    dev: CUdevice,
) -> Result {
    named(kernel)?;
    let scope = on_device(dev)?;
    attribute(scope, pi, attrib, kernel)
}

pub fn cuKernelSetAttribute(
    attrib: CUfunction_attribute,
    val: i32,
    kernel: CUkernel,
    dev: CUdevice,
) -> Result {
    named(kernel)?;
    set_attribute(on_device(dev)?, kernel, attrib, val)
}

pub fn cuKernelSetCacheConfig(kernel: CUkernel, config: CUfunc_cache, dev: CUdevice) -> Result {
    set_cache_config(on_device(dev)?, kernel, config)
}

pub fn cuKernelGetFunction(pFunc: Out<'_, CUfunction>, kernel: CUkernel) -> Result {
    pFunc.not_null()?;
    named(kernel)?;
    let scope = context::scope()?;
    scope.session.alive()?;
    let (function, _) = function::find_on(scope, kernel)?;
    pFunc.put(to_pointer(function))
}

pub fn cuKernelGetLibrary(pLib: Out<'_, CUlibrary>, kernel: CUkernel) -> Result {
    match function::find(kernel)?.1.owner {
        Owner::Library(library) => pLib.put(module::original(library)?),
        Owner::Module(_) => Err(CuError::INVALID_HANDLE),
    }
}

pub fn cuKernelGetName(name: Out<'_, *const c_char>, hfunc: CUkernel) -> Result {
    self::name(name, hfunc)
}

pub fn cuKernelGetParamInfo(
    kernel: CUkernel,
    paramIndex: usize,
    paramOffset: Out<'_, usize>,
    paramSize: Out<'_, usize>,
) -> Result {
    parameter(kernel, paramIndex, paramOffset, paramSize)
}
