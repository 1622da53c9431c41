//! Events of a whole context: recorded behind the work of all its streams, or waited for by all of them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};

use crate::error::Result;
use crate::object::context::Scope;
use crate::object::stream::{self, Target};
use crate::object::{capture_mode, event};
use crate::types::{CUevent, EVENT_DISABLE_TIMING, STREAM_NON_BLOCKING};

/// What new streams of a context wait for, by the context's number.
static GATES: LazyLock<Mutex<HashMap<u32, usize>>> = LazyLock::new(Mutex::default);
/// A context has such an event.
static ANY: AtomicBool = AtomicBool::new(false);

/// `cuCtxRecordEvent`: the event is behind all work so far of the context.
pub fn record(scope: Scope, event: CUevent) -> Result {
    event::exists(event)?;
    capture_mode::check_context()?;
    let join = stream::create(scope, STREAM_NON_BLOCKING, 0)?;
    let recorded = stream::existing(join).and_then(|join| {
        for target in stream::busy_of(scope) {
            let mark = event::create(scope, EVENT_DISABLE_TIMING)?;
            let joined =
                event::record(scope, mark, target).and_then(|()| event::wait(scope, join, mark));
            event::destroy(scope, mark)?;
            joined?;
        }
        event::record(scope, event, join)
    });
    recorded.and(stream::destroy(scope, join))
}

/// `cuCtxWaitEvent`: all work of the context from now on waits for the event.
pub fn wait(scope: Scope, event: CUevent) -> Result {
    event::exists(event)?;
    capture_mode::check_context()?;
    for target in stream::all_of(scope) {
        event::wait(scope, target, event)?;
    }
    // The program may record or destroy its event; streams to come wait for one of our own behind it.
    let join = stream::create(scope, STREAM_NON_BLOCKING, 0)?;
    let gate = stream::existing(join).and_then(|join| {
        event::wait(scope, join, event)?;
        // What earlier events held back is held back still: the join waited for their gate.
        let gate = event::create(scope, EVENT_DISABLE_TIMING)?;
        event::record(scope, gate, join)?;
        Ok(gate)
    });
    let gate = gate.and_then(|gate| stream::destroy(scope, join).map(|()| gate))?;
    let mut gates = GATES.lock().unwrap_or_else(PoisonError::into_inner);
    let before = gates.insert(scope.context, gate.addr());
    ANY.store(true, Ordering::Release);
    drop(gates);
    if let Some(before) = before {
        // It may have gone with a context that had this number before.
        let _ = event::destroy(scope, std::ptr::without_provenance_mut(before));
    }
    Ok(())
}

/// Makes a new stream wait as its context does.
#[inline]
pub fn hold(scope: Scope, target: Target) -> Result {
    if ANY.load(Ordering::Acquire) {
        hold_at_gate(scope, target)
    } else {
        Ok(())
    }
}

#[cold]
fn hold_at_gate(scope: Scope, target: Target) -> Result {
    let gates = GATES.lock().unwrap_or_else(PoisonError::into_inner);
    let gate = gates.get(&scope.context).copied();
    drop(gates);
    let gate = gate.map(std::ptr::without_provenance_mut);
    match gate.filter(|gate| event::exists(*gate).is_ok()) {
        Some(gate) => event::wait(scope, target, gate),
        None => Ok(()),
    }
}
