//! Streams.

use std::ptr;
use std::sync::atomic::Ordering;

use super::devices::named;
use super::{body, put, put_if_wanted};
use crate::error::{CuError, Result};
use crate::stream::{self, Target, target};
use crate::types::{CUcontext, CUdevice, CUevent, CUgreenCtx, CUresult, CUstream, DefaultStream};
use crate::{capture, context, event, green, handle};

pub unsafe fn cuStreamCreate(phStream: *mut CUstream, Flags: u32) -> CUresult {
    // SAFETY: as the caller promises.
    unsafe { cuStreamCreateWithPriority(phStream, Flags, 0) }
}

pub unsafe fn cuStreamCreateWithPriority(
    phStream: *mut CUstream,
    flags: u32,
    priority: i32,
) -> CUresult {
    body! {
        if phStream.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        let scope = context::scope()?;
        let stream = stream::create(scope, flags, priority)?;
        // SAFETY: as the caller promises.
        unsafe { put(phStream, handle::to_pointer(stream)) }
    }
}

pub unsafe fn cuStreamDestroy_v2(hStream: CUstream) -> CUresult {
    body! {
        let stream = stream::minted(hStream)?;
        let scope = context::scope_or(|| stream::owner(hStream))?;
        capture::check_destroy(stream::existing(stream)?)?;
        stream::destroy(scope, stream)
    }
}

pub unsafe fn cuStreamQuery(default: DefaultStream, hStream: CUstream) -> CUresult {
    body! {
        let (scope, target) = target(default, hStream)?;
        capture::check_wait(target)?;
        target.query(scope)
    }
}

pub unsafe fn cuStreamSynchronize(default: DefaultStream, hStream: CUstream) -> CUresult {
    body! {
        let (scope, target) = target(default, hStream)?;
        capture::check_wait(target)?;
        target.synchronize(scope)
    }
}

pub unsafe fn cuStreamWaitEvent(
    default: DefaultStream,
    hStream: CUstream,
    hEvent: CUevent,
    Flags: u32,
) -> CUresult {
    body! {
        let (scope, target) = target(default, hStream)?;
        if Flags & !1 != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        event::wait(scope, target, hEvent, Flags)
    }
}

/// Answers a question about a stream.
fn about<T>(
    default: DefaultStream,
    stream: CUstream,
    place: *mut T,
    read: impl Fn(Target) -> T,
) -> Result {
    let (_, target) = target(default, stream)?;
    // SAFETY: the caller of the export promises that the place is null or writable.
    unsafe { put(place, read(target)) }
}

pub unsafe fn cuStreamGetFlags(
    default: DefaultStream,
    hStream: CUstream,
    flags: *mut u32,
) -> CUresult {
    body! { about(default, hStream, flags, |target| target.stream.flags.load(Ordering::Relaxed)) }
}

pub unsafe fn cuStreamGetId(
    default: DefaultStream,
    hStream: CUstream,
    streamId: *mut u64,
) -> CUresult {
    body! { about(default, hStream, streamId, |target| target.stream.id.load(Ordering::Relaxed)) }
}

pub unsafe fn cuStreamGetPriority(
    default: DefaultStream,
    hStream: CUstream,
    priority: *mut i32,
) -> CUresult {
    body! { about(default, hStream, priority, |target| target.stream.priority.load(Ordering::Relaxed)) }
}

pub unsafe fn cuStreamGetDevice(
    default: DefaultStream,
    hStream: CUstream,
    device: *mut CUdevice,
) -> CUresult {
    body! {
        let (scope, target) = target(default, hStream)?;
        // SAFETY: as the caller promises.
        unsafe { put(device, named(target.device(scope))) }
    }
}

pub unsafe fn cuStreamGetCtx(
    default: DefaultStream,
    hStream: CUstream,
    pctx: *mut CUcontext,
) -> CUresult {
    body! {
        let (_, target) = target(default, hStream)?;
        let ctx = if target.handle.is_legacy() {
            context::current()
        } else {
            context::by_number(target.stream.context.load(Ordering::Relaxed))?
        };
        // SAFETY: as the caller promises.
        unsafe { put(pctx, ctx) }
    }
}

pub unsafe fn cuStreamGetCtx_v2(
    default: DefaultStream,
    hStream: CUstream,
    pctx: *mut CUcontext,
    pGreenCtx: *mut CUgreenCtx,
) -> CUresult {
    body! {
        let (scope, target) = target(default, hStream)?;
        let number = target.stream.context.load(Ordering::Relaxed);
        let green = (!target.handle.is_legacy()).then(|| green::of(number)).flatten();
        if green.is_none() {
            // SAFETY: as the caller promises.
            unsafe { put_if_wanted(pGreenCtx, ptr::null_mut()) };
            // SAFETY: as the caller promises.
            return match unsafe { cuStreamGetCtx(default, hStream, pctx) } {
                0 => Ok(()),
                code => Err(CuError(code)),
            };
        }
        // Beside its own context a stream is told to belong to the primary one.
        let (_, primary) = context::primary_context(target.device(scope))?;
        // SAFETY: as the caller promises.
        unsafe {
            put_if_wanted(pGreenCtx, context::by_number(number)?);
            put(pctx, primary)
        }
    }
}
