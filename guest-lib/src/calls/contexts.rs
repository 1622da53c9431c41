//! Primary and created contexts.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::LazyLock;
use std::sync::atomic::Ordering;

use wormhole_api::constants::context_flags::FLAGS_MASK;
use wormhole_api::constants::function_cache::PREFER_EQUAL;
use wormhole_api::{ContextGetLimit, ContextReset, ContextSetLimit};
use wormhole_lock::Mutex;

use super::devices::ordinal;
use crate::error::{CuError, Result};
use crate::graph::capture;
use crate::memory::{pool_reuse, residence};
use crate::object::context::{self, Scope, primary_scope};
use crate::object::{array, capture_mode, event, green_context, module, stream, texture};
use crate::parameter::{In, Out, Pointer};
use crate::session::session;
use crate::types::{CUcontext, CUctxCreateParams, CUdevice, CUfunc_cache, CUlimit};
use crate::work::{host_function, peer};
use crate::{graph, memory};

/// API version that `cuCtxGetApiVersion` reports for contexts of this interface.
const API_VERSION: u32 = 3020;

/// Cached limits (`cuCtxGetLimit`, `cuCtxSetLimit`), by device.
static LIMITS: LazyLock<Mutex<HashMap<(usize, CUlimit), u64>>> = LazyLock::new(Mutex::default);

/// Returns the current context, or error 201.
pub(super) fn current() -> Result<&'static context::Context> {
    session()?;
    Ok(context::find_active(context::current())
        .map_err(|_| CuError::INVALID_CONTEXT)?
        .0)
}

/// Looks up a context. Null means the current one.
fn named(ctx: CUcontext) -> Result<(CUcontext, &'static context::Context)> {
    session()?;
    let ctx = if ctx.is_null() {
        context::current()
    } else {
        ctx
    };
    let (facts, _) = context::find(ctx).ok_or(CuError::INVALID_CONTEXT)?;
    Ok((ctx, facts))
}

/// Returns the scope of a context. Null means the current one.
pub(super) fn scope_of(ctx: CUcontext) -> Result<Scope> {
    let (ctx, _) = named(ctx)?;
    let (context, handle) = context::find_active(ctx)?;
    Ok(context::scope_in(session()?, context, handle))
}

#[inline(always)]
pub fn cuCtxGetCurrent(pctx: Out<'_, CUcontext>) -> Result {
    session()?;
    pctx.put(context::current())
}

pub fn cuCtxSetCurrent(ctx: CUcontext) -> Result {
    session()?;
    context::set_current(ctx)
}

pub fn cuCtxPushCurrent_v2(ctx: CUcontext) -> Result {
    session()?;
    if ctx.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    context::push(ctx)
}

pub fn cuCtxPopCurrent_v2(pctx: Out<'_, CUcontext>) -> Result {
    session()?;
    let top = context::pop()?;
    pctx.put_if_wanted(top);
    Ok(())
}

pub fn cuCtxCreate_v2(pctx: Out<'_, CUcontext>, flags: u32, dev: CUdevice) -> Result {
    let device = ordinal(dev)?;
    if pctx.is_null() || flags & !FLAGS_MASK != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    pctx.put(context::create(device, flags)?)
}

/// Creates a context. Fails if execution affinity is requested, which would limit it to some multiprocessors.
pub fn cuCtxCreate_v3(
    pctx: Out<'_, CUcontext>,
    paramsArray: Pointer<'_, c_void>,
    numParams: i32,
    flags: u32,
    dev: CUdevice,
) -> Result {
    if !paramsArray.is_null() || numParams != 0 {
        return Err(CuError::UNSUPPORTED_EXEC_AFFINITY);
    }
    cuCtxCreate_v2(pctx, flags, dev)
}

/// Creates a context. Fails if execution affinity or sharing with a graphics API is requested. Parameters that are all
/// zero request nothing.
pub fn cuCtxCreate_v4(
    pctx: Out<'_, CUcontext>,
    ctxCreateParams: In<'_, CUctxCreateParams>,
    flags: u32,
    dev: CUdevice,
) -> Result {
    match ctxCreateParams.given() {
        Some(wanted) if !wanted.cigParams.is_null() => Err(CuError::NOT_SUPPORTED),
        Some(wanted)
            if !wanted.execAffinityParams.is_null() || wanted.numExecAffinityParams != 0 =>
        {
            Err(CuError::UNSUPPORTED_EXEC_AFFINITY)
        }
        _ => cuCtxCreate_v2(pctx, flags, dev),
    }
}

/// Destroys the objects of a context, and frees its memory.
pub(super) fn destroy_objects_of(scope: Scope) {
    stream::destroy_of(scope);
    capture::end_orphaned();
    event::destroy_of(scope);
    texture::destroy_of(scope);
    array::destroy_of(scope);
    module::unload_of(scope);
    memory::free_of(scope);
}

pub fn cuCtxDestroy_v2(ctx: CUcontext) -> Result {
    let session = session()?;
    if ctx.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let found = context::find_active(ctx).map_err(|_| CuError::INVALID_CONTEXT)?;
    let scope = context::scope_in(session, found.0, found.1);
    if green_context::of(scope.context).is_some() {
        return Err(CuError::INVALID_CONTEXT);
    }
    // The native driver waits for the context's work, and destroys its memory and modules with it.
    let waited = stream::synchronize_devices(scope);
    context::destroy(ctx)?;
    peer::forget(scope);
    graph::executable::destroy_of(scope);
    destroy_objects_of(scope);
    waited
}

pub fn cuCtxGetDevice(device: Out<'_, CUdevice>) -> Result {
    device.not_null()?;
    let ordinal = current()?.device();
    device.put(super::devices::named(ordinal))
}

pub fn cuCtxGetDevice_v2(device: Out<'_, CUdevice>, ctx: CUcontext) -> Result {
    device.not_null()?;
    let ordinal = named(ctx)?.1.device();
    device.put(super::devices::named(ordinal))
}

pub fn cuCtxGetFlags(flags: Out<'_, u32>) -> Result {
    let value = current()?.flags.load(Ordering::Relaxed);
    flags.put(value)
}

pub fn cuCtxGetId(ctx: CUcontext, ctxId: Out<'_, u64>) -> Result {
    let (ctx, _) = named(ctx)?;
    let id = context::identity(ctx).ok_or(CuError::INVALID_CONTEXT)?;
    ctxId.put(id)
}

pub fn cuCtxGetApiVersion(ctx: CUcontext, version: Out<'_, u32>) -> Result {
    named(ctx)?;
    version.put(API_VERSION)
}

pub fn cuCtxGetCacheConfig(pconfig: Out<'_, CUfunc_cache>) -> Result {
    let value = current()?.cache_config.load(Ordering::Relaxed);
    pconfig.put(value)
}

pub fn cuCtxSetCacheConfig(config: CUfunc_cache) -> Result {
    let context = current()?;
    if config > PREFER_EQUAL {
        return Err(CuError::INVALID_VALUE);
    }
    context.cache_config.store(config, Ordering::Relaxed);
    Ok(())
}

pub fn cuCtxGetStreamPriorityRange(
    leastPriority: Out<'_, i32>,
    greatestPriority: Out<'_, i32>,
) -> Result {
    let session = context::scope()?.session;
    session.alive()?;
    let (least, greatest) = session.device().priorities;
    leastPriority.put_if_wanted(least);
    greatestPriority.put_if_wanted(greatest);
    Ok(())
}

pub fn cuCtxGetLimit(pvalue: Out<'_, usize>, limit: CUlimit) -> Result {
    let scope = context::scope()?;
    let key = (scope.session.ordinal(), limit);
    let known = LIMITS.lock().get(&key).copied();
    let value = match known {
        Some(value) => value,
        None => ask_limit(scope, limit)?,
    };
    pvalue.put(usize::try_from(value).unwrap_or(usize::MAX))
}

fn ask_limit(scope: Scope, limit: CUlimit) -> Result<u64> {
    let value = scope
        .session
        .request(&ContextGetLimit { limit }, |reply| reply.value)?;
    LIMITS
        .lock()
        .insert((scope.session.ordinal(), limit), value);
    Ok(value)
}

pub fn cuCtxSetLimit(limit: CUlimit, value: usize) -> Result {
    let scope = context::scope()?;
    capture_mode::check_call()?;
    let message = ContextSetLimit {
        limit,
        value: value as u64,
    };
    let value = scope.session.request(&message, |reply| reply.value)?;
    let key = (scope.session.ordinal(), limit);
    LIMITS.lock().insert(key, value);
    Ok(())
}

pub fn cuCtxSynchronize() -> Result {
    let scope = context::scope()?;
    capture_mode::check_context()?;
    stream::synchronize_all(scope)?;
    residence::settle();
    Ok(())
}

pub fn cuCtxSynchronize_v2(ctx: CUcontext) -> Result {
    let scope = scope_of(ctx).map_err(|error| match error {
        CuError::INVALID_CONTEXT if !ctx.is_null() => CuError::CONTEXT_IS_DESTROYED,
        error => error,
    })?;
    capture_mode::check_context()?;
    stream::synchronize_all(scope)?;
    residence::settle();
    Ok(())
}

pub fn cuDevicePrimaryCtxRetain(pctx: Out<'_, CUcontext>, dev: CUdevice) -> Result {
    let device = ordinal(dev)?;
    pctx.not_null()?;
    let (primary, _) = context::primary_context(device)?;
    if let (false, Some(fault)) = (primary.is_active(), session()?.fault()) {
        return Err(fault);
    }
    pctx.put(context::retain_primary(device)?)
}

pub fn cuDevicePrimaryCtxRelease_v2(dev: CUdevice) -> Result {
    let device = ordinal(dev)?;
    if context::release_primary(device)? {
        reset_primary(device)
    } else {
        Ok(())
    }
}

pub fn cuDevicePrimaryCtxReset_v2(dev: CUdevice) -> Result {
    reset_primary(ordinal(dev)?)
}

/// Destroys all objects of a device's primary context. After a fault the device stays unusable, as documented: "To
/// continue using CUDA, the process must be terminated and relaunched" (CUDA driver API, `CUresult`, errors 700 to
/// 719). The reset itself succeeds; afterwards the context counts as destroyed, and retaining it fails, as with
/// driver 580 on an H200.
fn reset_primary(device: usize) -> Result {
    let session = session()?;
    let (facts, handle) = context::primary_context(device)?;
    if !facts.is_active() {
        return Ok(());
    }
    let scope = primary_scope(session, device);
    // A failure ends the session, and shows in the wait.
    let _ = pool_reuse::free_all(session);
    // Pending fences would be lost with their streams.
    let waited = stream::synchronize_devices(scope);
    facts.clear(handle);
    context::deactivate_primary(device)?;
    if context::others_active(device) {
        // The worker's context also serves the program's other active contexts, and a reset of it resets all devices.
        peer::forget(scope);
        graph::executable::destroy_of(scope);
        destroy_objects_of(scope);
        return waited;
    }
    let reset = match session.fault() {
        Some(_) => Ok(()),
        None => waited.and_then(|()| scope.session.request(&ContextReset {}, |()| ())),
    };
    LIMITS.lock().clear();
    peer::forget_all();
    capture::forget_all();
    // Host functions first: the words of their nodes, which identify the function to call, are reused by new graphs.
    host_function::forget_all();
    graph::executable::forget_all(scope);
    stream::forget_all(scope);
    event::forget_all(scope);
    texture::forget_all();
    array::forget_all();
    module::forget_all(scope);
    memory::forget_all(scope);
    reset
}

pub fn cuDevicePrimaryCtxGetState(
    dev: CUdevice,
    flags: Out<'_, u32>,
    active: Out<'_, i32>,
) -> Result {
    if flags.is_null() || active.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let (context, _) = context::primary_context(ordinal(dev)?)?;
    flags.put(context.flags.load(Ordering::Relaxed))?;
    active.put(i32::from(context.is_active()))
}

pub fn cuDevicePrimaryCtxSetFlags_v2(dev: CUdevice, flags: u32) -> Result {
    let device = ordinal(dev)?;
    if flags & !FLAGS_MASK != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let (context, _) = context::primary_context(device)?;
    context.flags.store(flags, Ordering::Relaxed);
    Ok(())
}
