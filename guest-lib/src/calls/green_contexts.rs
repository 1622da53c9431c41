//! Green contexts. A `CUgreenCtx` is the `CUcontext` of the same context.

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use wormhole_api::constants::context_flags::MAP_HOST;
use wormhole_api::constants::device_resource_type::SM;
use wormhole_api::constants::green_context_flags::DEFAULT_STREAM;

use super::contexts::destroy_objects_of;
use super::devices::ordinal;
use crate::error::{CuError, Result};
use crate::handle;
use crate::object::context::Scope;
use crate::object::{context, context_events, green_context, stream};
use crate::parameter::{In, InOut, Out, Room};
use crate::session::session;
use crate::types::{
    CUcontext, CUdevResource, CUdevice, CUevent, CUgreenCtx, CUstream, DefaultStream,
    STREAM_NON_BLOCKING,
};

/// Returns the scope of a context.
fn scope_of(ctx: CUcontext) -> Result<Scope> {
    let session = session()?;
    if ctx.is_null() {
        return Err(CuError::INVALID_CONTEXT);
    }
    let (facts, handle) = context::find_active(ctx)?;
    Ok(context::scope_in(session, facts, handle))
}

/// Returns the scope of a green context.
fn scope_of_green(ctx: CUgreenCtx) -> Result<Scope> {
    let scope = scope_of(ctx)?;
    green_context::of(scope.context).ok_or(CuError::INVALID_CONTEXT)?;
    Ok(scope)
}

fn put_resource(scope: Scope, resource: Out<'_, CUdevResource>, kind: u32) -> Result {
    resource.not_null()?;
    if kind != SM {
        return Err(CuError::INVALID_RESOURCE_TYPE);
    }
    resource.put(green_context::describe(scope)?)
}

pub fn cuDeviceGetDevResource(
    dev: CUdevice,
    resource: Out<'_, CUdevResource>,
    type_: u32,
) -> Result {
    let ordinal = ordinal(dev)?;
    put_resource(context::primary_scope(session()?, ordinal), resource, type_)
}

pub fn cuCtxGetDevResource(
    hCtx: CUcontext,
    resource: Out<'_, CUdevResource>,
    type_: u32,
) -> Result {
    put_resource(scope_of(hCtx)?, resource, type_)
}

pub fn cuGreenCtxGetDevResource(
    hCtx: CUgreenCtx,
    resource: Out<'_, CUdevResource>,
    type_: u32,
) -> Result {
    put_resource(scope_of_green(hCtx)?, resource, type_)
}

pub fn cuDevSmResourceSplitByCount(
    result: Room<'_, CUdevResource, u32>,
    nbGroups: InOut<'_, u32>,
    input: In<'_, CUdevResource>,
    remaining: Out<'_, CUdevResource>,
    useFlags: u32,
    minCount: u32,
) -> Result {
    let scope = context::scope_or_primary()?;
    if nbGroups.is_null() || input.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let (wanted, input) = (nbGroups.get()?, input.get()?);
    if result.is_null() {
        let (_, possible, _) = green_context::split(scope, &input, (useFlags, minCount), 0)?;
        return nbGroups.put(possible);
    }
    if wanted == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let (groups, _, rest) = green_context::split(scope, &input, (useFlags, minCount), wanted)?;
    let made = u32::try_from(groups.len()).unwrap_or(0);
    result.list()?.put_all(groups)?;
    remaining.put_if_wanted(rest);
    nbGroups.put(made)
}

pub fn cuDevResourceGenerateDesc(
    phDesc: Out<'_, *mut c_void>,
    resources: In<'_, [CUdevResource]>,
    nbResources: u32,
) -> Result {
    session()?;
    if phDesc.is_null() || resources.is_null() || nbResources == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let description = green_context::generate(resources.values()?)?;
    phDesc.put(std::ptr::without_provenance_mut(description))
}

pub fn cuGreenCtxCreate(
    phCtx: Out<'_, CUgreenCtx>,
    desc: *mut c_void,
    dev: CUdevice,
    flags: u32,
) -> Result {
    let ordinal = ordinal(dev)?;
    if phCtx.is_null() || flags != DEFAULT_STREAM {
        return Err(CuError::INVALID_VALUE);
    }
    let made = context::create_aside(ordinal, MAP_HOST)?;
    match scope_of(made).and_then(|scope| green_context::create(scope, desc.addr())) {
        Ok(()) => phCtx.put(made),
        Err(error) => context::destroy(made).and(Err(error)),
    }
}

/// Destroys a green context. Its handle stays valid as that of a destroyed context, and stays current in its threads.
pub fn cuGreenCtxDestroy(hCtx: CUgreenCtx) -> Result {
    let scope = scope_of_green(hCtx)?;
    let waited = stream::synchronize_devices(scope);
    context::deactivate(hCtx)?;
    destroy_objects_of(scope);
    green_context::destroy(scope)?;
    waited
}

pub fn cuCtxFromGreenCtx(pContext: Out<'_, CUcontext>, hCtx: CUgreenCtx) -> Result {
    pContext.not_null()?;
    scope_of_green(hCtx)?;
    pContext.put(hCtx)
}

/// Returns the identity of a green context, or of the current context if the handle is null and that one is green.
pub fn cuGreenCtxGetId(greenCtx: CUgreenCtx, greenCtxId: Out<'_, u64>) -> Result {
    session()?;
    greenCtxId.not_null()?;
    let named = if greenCtx.is_null() {
        context::current()
    } else {
        greenCtx
    };
    scope_of_green(named)?;
    let identity = context::identity(named).ok_or(CuError::INVALID_CONTEXT)?;
    greenCtxId.put(identity)
}

pub fn cuGreenCtxRecordEvent(hCtx: CUgreenCtx, hEvent: CUevent) -> Result {
    context_events::record(scope_of_green(hCtx)?, hEvent)
}

pub fn cuGreenCtxWaitEvent(hCtx: CUgreenCtx, hEvent: CUevent) -> Result {
    context_events::wait(scope_of_green(hCtx)?, hEvent)
}

pub fn cuGreenCtxStreamCreate(
    phStream: Out<'_, CUstream>,
    greenCtx: CUgreenCtx,
    flags: u32,
    priority: i32,
) -> Result {
    let scope = scope_of_green(greenCtx)?;
    if phStream.is_null() || flags != STREAM_NON_BLOCKING {
        return Err(CuError::INVALID_VALUE);
    }
    let made = stream::create(scope, flags, priority)?;
    phStream.put(handle::to_pointer(made))
}

pub fn cuStreamGetGreenCtx(hStream: CUstream, phCtx: Out<'_, CUgreenCtx>) -> Result {
    let (_, target) = stream::target(DefaultStream::Legacy, hStream)?;
    phCtx.not_null()?;
    let number = target.stream.context.load(Ordering::Relaxed);
    let is_green = !target.handle.is_legacy() && green_context::of(number).is_some();
    let found = if is_green {
        context::by_number(number)?
    } else {
        std::ptr::null_mut()
    };
    phCtx.put(found)
}
