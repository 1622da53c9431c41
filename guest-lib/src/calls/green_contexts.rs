//! Green contexts. They are contexts, and what programs hold for either is the same.

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use super::devices::ordinal;
use super::{body, put, put_if_wanted};
use crate::context::Scope;
use crate::error::{CuError, Result};
use crate::session::session;
use crate::types::{
    CUcontext, CUdevResource, CUdevice, CUevent, CUgreenCtx, CUresult, CUstream, DefaultStream,
    STREAM_NON_BLOCKING,
};
use crate::{array, barrier, context, event, green, handle, memory, module, stream, texture};

/// `CU_GREEN_CTX_DEFAULT_STREAM`.
const DEFAULT_STREAM: u32 = 1;
/// `CU_CTX_MAP_HOST`, the flags of green contexts.
const FLAGS: u32 = 8;

/// The scope of a context that a program names.
fn scope_of(ctx: CUcontext) -> Result<Scope> {
    let session = session()?;
    if ctx.is_null() {
        return Err(CuError::INVALID_CONTEXT);
    }
    let (facts, handle) = context::find_active(ctx)?;
    Ok(context::scope_in(session, facts, handle))
}

/// The scope of a green context.
fn scope_of_green(ctx: CUgreenCtx) -> Result<Scope> {
    let scope = scope_of(ctx)?;
    green::of(scope.context).ok_or(CuError::INVALID_CONTEXT)?;
    Ok(scope)
}

/// # Safety
/// `resource` is null or writable.
unsafe fn tell(scope: Scope, resource: *mut CUdevResource, kind: u32) -> Result {
    if resource.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    if kind != green::MULTIPROCESSORS {
        return Err(CuError::INVALID_RESOURCE_TYPE);
    }
    // SAFETY: as the caller promises.
    unsafe { put(resource, green::describe(scope)?) }
}

pub unsafe fn cuDeviceGetDevResource(
    dev: CUdevice,
    resource: *mut CUdevResource,
    type_: u32,
) -> CUresult {
    body! {
        let ordinal = ordinal(dev)?;
        // SAFETY: as the caller promises.
        unsafe { tell(context::primary_scope(session()?, ordinal), resource, type_) }
    }
}

pub unsafe fn cuCtxGetDevResource(
    hCtx: CUcontext,
    resource: *mut CUdevResource,
    type_: u32,
) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe { tell(scope_of(hCtx)?, resource, type_) } }
}

pub unsafe fn cuGreenCtxGetDevResource(
    hCtx: CUgreenCtx,
    resource: *mut CUdevResource,
    type_: u32,
) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe { tell(scope_of_green(hCtx)?, resource, type_) } }
}

pub unsafe fn cuDevSmResourceSplitByCount(
    result: *mut CUdevResource,
    nbGroups: *mut u32,
    input: *const CUdevResource,
    remaining: *mut CUdevResource,
    useFlags: u32,
    minCount: u32,
) -> CUresult {
    body! {
        let scope = context::scope_or_primary()?;
        if nbGroups.is_null() || input.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: neither is null.
        let (wanted, input) = unsafe { (nbGroups.read(), input.read()) };
        if result.is_null() {
            let (_, possible, _) = green::split(scope, &input, (useFlags, minCount), 0)?;
            // SAFETY: as the caller promises.
            return unsafe { put(nbGroups, possible) };
        }
        if wanted == 0 {
            return Err(CuError::INVALID_VALUE);
        }
        let (groups, _, rest) = green::split(scope, &input, (useFlags, minCount), wanted)?;
        // SAFETY: there is room for as many groups as are wanted, and there are no more.
        unsafe {
            result.copy_from(groups.as_ptr(), groups.len());
            put_if_wanted(remaining, rest);
            put(nbGroups, u32::try_from(groups.len()).unwrap_or(0))
        }
    }
}

pub unsafe fn cuDevResourceGenerateDesc(
    phDesc: *mut *mut c_void,
    resources: *const CUdevResource,
    nbResources: u32,
) -> CUresult {
    body! {
        session()?;
        if phDesc.is_null() || resources.is_null() || nbResources == 0 {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: not null, so as many as is said.
        let resources = unsafe { std::slice::from_raw_parts(resources, nbResources as usize) };
        let description = green::generate(resources)?;
        // SAFETY: as the caller promises.
        unsafe { put(phDesc, std::ptr::without_provenance_mut(description)) }
    }
}

pub unsafe fn cuGreenCtxCreate(
    phCtx: *mut CUgreenCtx,
    desc: *mut c_void,
    dev: CUdevice,
    flags: u32,
) -> CUresult {
    body! {
        let ordinal = ordinal(dev)?;
        if phCtx.is_null() || flags != DEFAULT_STREAM {
            return Err(CuError::INVALID_VALUE);
        }
        let made = context::create_aside(ordinal, FLAGS)?;
        match scope_of(made).and_then(|scope| green::create(scope, desc.addr())) {
            // SAFETY: as the caller promises.
            Ok(()) => unsafe { put(phCtx, made) },
            Err(error) => context::destroy(made).and(Err(error)),
        }
    }
}

/// It stays known, as one that is destroyed; so does what is current.
pub unsafe fn cuGreenCtxDestroy(hCtx: CUgreenCtx) -> CUresult {
    body! {
        let scope = scope_of_green(hCtx)?;
        let waited = stream::synchronize_devices(scope);
        context::deactivate(hCtx)?;
        stream::destroy_of(scope);
        event::destroy_of(scope);
        texture::destroy_of(scope);
        array::destroy_of(scope);
        module::unload_of(scope);
        memory::free_of(scope);
        green::destroy(scope)?;
        waited
    }
}

pub unsafe fn cuCtxFromGreenCtx(pContext: *mut CUcontext, hCtx: CUgreenCtx) -> CUresult {
    body! {
        if pContext.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        scope_of_green(hCtx)?;
        // SAFETY: as the caller promises.
        unsafe { put(pContext, hCtx) }
    }
}

/// Without one that of the current context, if that is a green one.
pub unsafe fn cuGreenCtxGetId(greenCtx: CUgreenCtx, greenCtxId: *mut u64) -> CUresult {
    body! {
        session()?;
        if greenCtxId.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        let named = if greenCtx.is_null() { context::current() } else { greenCtx };
        scope_of_green(named)?;
        let identity = context::identity(named).ok_or(CuError::INVALID_CONTEXT)?;
        // SAFETY: as the caller promises.
        unsafe { put(greenCtxId, identity) }
    }
}

pub unsafe fn cuGreenCtxRecordEvent(hCtx: CUgreenCtx, hEvent: CUevent) -> CUresult {
    body! { barrier::record(scope_of_green(hCtx)?, hEvent) }
}

pub unsafe fn cuGreenCtxWaitEvent(hCtx: CUgreenCtx, hEvent: CUevent) -> CUresult {
    body! { barrier::wait(scope_of_green(hCtx)?, hEvent) }
}

pub unsafe fn cuGreenCtxStreamCreate(
    phStream: *mut CUstream,
    greenCtx: CUgreenCtx,
    flags: u32,
    priority: i32,
) -> CUresult {
    body! {
        let scope = scope_of_green(greenCtx)?;
        if phStream.is_null() || flags != STREAM_NON_BLOCKING {
            return Err(CuError::INVALID_VALUE);
        }
        let made = stream::create(scope, flags, priority)?;
        // SAFETY: as the caller promises.
        unsafe { put(phStream, handle::to_pointer(made)) }
    }
}

pub unsafe fn cuStreamGetGreenCtx(hStream: CUstream, phCtx: *mut CUgreenCtx) -> CUresult {
    body! {
        let (_, target) = stream::target(DefaultStream::Legacy, hStream)?;
        if phCtx.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        let number = target.stream.context.load(Ordering::Relaxed);
        let is_green = !target.handle.is_legacy() && green::of(number).is_some();
        let found = if is_green { context::by_number(number)? } else { std::ptr::null_mut() };
        // SAFETY: as the caller promises.
        unsafe { put(phCtx, found) }
    }
}
