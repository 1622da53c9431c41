//! Events.

use crate::error::{CuError, Result};
use crate::graph::capture;
use crate::graph::submit::{Operation, submit};
use crate::memory::residence;
use crate::object::context::Scope;
use crate::object::event::Record;
use crate::object::stream::target_here;
use crate::object::{context, event};
use crate::parameter::Out;
use crate::types::{CUevent, CUstream, DefaultStream};

pub fn cuEventCreate(phEvent: Out<'_, CUevent>, Flags: u32) -> Result {
    let scope = context::scope()?;
    phEvent.not_null()?;
    phEvent.put(event::create(scope, Flags)?)
}

pub fn cuEventDestroy_v2(hEvent: CUevent) -> Result {
    event::destroy(event::scope(hEvent)?, hEvent)
}

#[inline(always)]
pub fn cuEventRecordWithFlags(
    default: DefaultStream,
    hEvent: CUevent,
    hStream: CUstream,
    flags: u32,
) -> Result {
    let (scope, target) = target_here(default, hStream)?;
    if flags & !1 != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let record = Record::new(scope, target, hEvent, flags)?;
    submit(scope, target, Operation::Record(record))
}

/// Returns the scope of an event query, or fails if a capture forbids the query.
fn asked(event: CUevent) -> Result<Scope> {
    let scope = event::scope(event)?;
    let event = event::exists(event)?;
    scope.session.alive()?;
    capture::check_event(event)?;
    Ok(scope)
}

pub fn cuEventQuery(hEvent: CUevent) -> Result {
    event::query(asked(hEvent)?, hEvent)
}

pub fn cuEventSynchronize(hEvent: CUevent) -> Result {
    event::synchronize(asked(hEvent)?, hEvent)?;
    residence::settle();
    Ok(())
}

pub fn cuEventElapsedTime_v2(
    pMilliseconds: Out<'_, f32>,
    hStart: CUevent,
    hEnd: CUevent,
) -> Result {
    let scope = event::scope(hStart)?;
    if pMilliseconds.is_null() {
        return Err(CuError::INVALID_HANDLE);
    }
    let (start, end) = (event::exists(hStart)?, event::exists(hEnd)?);
    for event in [start, end] {
        capture::check_time(event)?;
        event::check_timed(event)?;
    }
    let milliseconds = event::elapsed(scope, start, end)?;
    pMilliseconds.put(milliseconds)
}
