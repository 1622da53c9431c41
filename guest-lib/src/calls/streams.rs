//! Streams.

use std::ptr;
use std::sync::atomic::Ordering;

use super::devices::named;
use crate::error::{CuError, Result};
use crate::graph::capture;
use crate::graph::submit::{Operation, submit};
use crate::handle;
use crate::memory::residence;
use crate::object::event::Wait;
use crate::object::stream::{self, Target, target};
use crate::object::{context, green_context};
use crate::parameter::Out;
use crate::types::{CUcontext, CUdevice, CUevent, CUgreenCtx, CUstream, DefaultStream};

pub fn cuStreamCreate(phStream: Out<'_, CUstream>, Flags: u32) -> Result {
    cuStreamCreateWithPriority(phStream, Flags, 0)
}

pub fn cuStreamCreateWithPriority(
    phStream: Out<'_, CUstream>,
    flags: u32,
    priority: i32,
) -> Result {
    phStream.not_null()?;
    let scope = context::scope()?;
    let stream = stream::create(scope, flags, priority)?;
    phStream.put(handle::to_pointer(stream))
}

pub fn cuStreamDestroy_v2(hStream: CUstream) -> Result {
    let stream = stream::minted(hStream)?;
    let scope = context::scope_or(|| stream::owner(hStream))?;
    capture::check_destroy(stream::existing(stream)?)?;
    stream::destroy(scope, stream)
}

pub fn cuStreamQuery(default: DefaultStream, hStream: CUstream) -> Result {
    let (scope, target) = target(default, hStream)?;
    capture::check_wait(target)?;
    target.query(scope)
}

pub fn cuStreamSynchronize(default: DefaultStream, hStream: CUstream) -> Result {
    let (scope, target) = target(default, hStream)?;
    capture::check_wait(target)?;
    target.synchronize(scope)?;
    residence::settle();
    Ok(())
}

pub fn cuStreamWaitEvent(
    default: DefaultStream,
    hStream: CUstream,
    hEvent: CUevent,
    Flags: u32,
) -> Result {
    let (scope, target) = target(default, hStream)?;
    if Flags & !1 != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    submit(scope, target, Operation::Wait(Wait::new(hEvent, Flags)?))
}

/// Writes a value read from a stream.
fn about<T: Copy>(
    default: DefaultStream,
    stream: CUstream,
    place: Out<'_, T>,
    read: impl Fn(Target) -> T,
) -> Result {
    let (_, target) = target(default, stream)?;
    place.put(read(target))
}

pub fn cuStreamGetFlags(default: DefaultStream, hStream: CUstream, flags: Out<'_, u32>) -> Result {
    about(default, hStream, flags, |target| {
        target.stream.flags.load(Ordering::Relaxed)
    })
}

pub fn cuStreamGetId(default: DefaultStream, hStream: CUstream, streamId: Out<'_, u64>) -> Result {
    about(default, hStream, streamId, |target| {
        target.stream.id.load(Ordering::Relaxed)
    })
}

pub fn cuStreamGetPriority(
    default: DefaultStream,
    hStream: CUstream,
    priority: Out<'_, i32>,
) -> Result {
    about(default, hStream, priority, |target| {
        target.stream.priority.load(Ordering::Relaxed)
    })
}

pub fn cuStreamGetDevice(
    default: DefaultStream,
    hStream: CUstream,
    device: Out<'_, CUdevice>,
) -> Result {
    let (scope, target) = target(default, hStream)?;
    device.put(named(target.device(scope)))
}

pub fn cuStreamGetCtx(
    default: DefaultStream,
    hStream: CUstream,
    pctx: Out<'_, CUcontext>,
) -> Result {
    let (_, target) = target(default, hStream)?;
    let ctx = if target.handle.is_legacy() {
        context::current()
    } else {
        context::by_number(target.stream.context.load(Ordering::Relaxed))?
    };
    pctx.put(ctx)
}

pub fn cuStreamGetCtx_v2(
    default: DefaultStream,
    hStream: CUstream,
    pctx: Out<'_, CUcontext>,
    pGreenCtx: Out<'_, CUgreenCtx>,
) -> Result {
    let (scope, target) = target(default, hStream)?;
    let number = target.stream.context.load(Ordering::Relaxed);
    let green = (!target.handle.is_legacy())
        .then(|| green_context::of(number))
        .flatten();
    if green.is_none() {
        pGreenCtx.put_if_wanted(ptr::null_mut());
        return cuStreamGetCtx(default, hStream, pctx);
    }
    // A stream of a green context reports the primary context as its context.
    let (_, primary) = context::primary_context(target.device(scope))?;
    pGreenCtx.put_if_wanted(context::by_number(number)?);
    pctx.put(primary)
}
