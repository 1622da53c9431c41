//! Events of a whole context: recorded after the work of all its streams, or waited for by all of them.

use std::collections::HashMap;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};

use wormhole_lock::Mutex;

use crate::error::Result;
use crate::object::context::Scope;
use crate::object::stream::{self, Target};
use crate::object::{capture_mode, event};
use crate::types::{CUevent, EVENT_DISABLE_TIMING, STREAM_NON_BLOCKING};

/// Events that new streams of a context wait for, by the context's index.
static GATES: LazyLock<Mutex<HashMap<u32, usize>>> = LazyLock::new(Mutex::default);
/// True once any context has a gate.
static ANY: AtomicBool = AtomicBool::new(false);

/// Records an event after all work submitted to the context so far (`cuCtxRecordEvent`).
pub fn record(scope: Scope, event: CUevent) -> Result {
    event::exists(event)?;
    capture_mode::check_context()?;
    let join = stream::create(scope, STREAM_NON_BLOCKING, 0)?;
    let recorded = stream::existing(join).and_then(|join| {
        stream::for_each(scope, |target| {
            if target.is_idle() {
                return Ok(());
            }
            let mark = event::create(scope, EVENT_DISABLE_TIMING)?;
            let joined =
                event::record(scope, mark, target).and_then(|()| event::wait(scope, join, mark));
            event::destroy(scope, mark)?;
            joined
        })?;
        event::record(scope, event, join)
    });
    recorded.and(stream::destroy(scope, join))
}

/// Makes all later work of the context wait for an event (`cuCtxWaitEvent`).
pub fn wait(scope: Scope, event: CUevent) -> Result {
    event::exists(event)?;
    capture_mode::check_context()?;
    stream::for_each(scope, |target| event::wait(scope, target, event))?;
    // The program may record or destroy its event. New streams wait for an internal event behind it.
    let join = stream::create(scope, STREAM_NON_BLOCKING, 0)?;
    let gate = stream::existing(join).and_then(|join| {
        event::wait(scope, join, event)?;
        // Earlier gates still hold: the stream waited for the previous gate when it was created.
        let gate = event::create(scope, EVENT_DISABLE_TIMING)?;
        event::record(scope, gate, join)?;
        Ok(gate)
    });
    let gate = gate.and_then(|gate| stream::destroy(scope, join).map(|()| gate))?;
    let mut gates = GATES.lock();
    let before = gates.insert(scope.context, gate.addr());
    ANY.store(true, Ordering::Release);
    drop(gates);
    if let Some(before) = before {
        // The event may have been destroyed with an earlier context of the same index.
        let _ = event::destroy(scope, std::ptr::without_provenance_mut(before));
    }
    Ok(())
}

/// Makes a new stream wait for the gate of its context.
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
    // The lock is held until the wait is sent: a thread that replaces the gate destroys it afterwards.
    let gates = GATES.lock();
    let gate = gates.get(&scope.context).copied();
    let gate = gate.map(std::ptr::without_provenance_mut);
    match gate.filter(|gate| event::exists(*gate).is_ok()) {
        Some(gate) => event::wait(scope, target, gate),
        None => Ok(()),
    }
}
