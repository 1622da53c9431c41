//! Sharing of objects, as far as one process can check it: it opens its own exports.

use std::sync::atomic::Ordering;

use wormhole_api::constants::event_flags;

use super::{Check, HostMemory, NON_BLOCKING, Outcome, eventually, holds, same, worked};
use crate::{
    Device, Found, MemoryOperation, MemoryOperationKind, RawEvent, RawStream, Shared, condition,
};

pub const CHECKS: &[Check] = &[
    Check {
        name: "an event that is shared is one event, whoever records it",
        run: one_event,
    },
    Check {
        name: "a wait for a shared event is one for its last record",
        run: the_last_record,
    },
    Check {
        name: "a shared event is recorded again and again while nothing is complete",
        run: many_records,
    },
    Check {
        name: "records and waits of a shared event outlive it",
        run: destroyed,
    },
];

/// Flags of shared events.
const SHARED: u32 = event_flags::DISABLE_TIMING | event_flags::INTERPROCESS;

/// Indices of words of the host memory.
const GATE: usize = 0;
const OTHER_GATE: usize = 8;
const MARK: usize = 16;

fn new_stream(device: &dyn Device) -> Result<RawStream, String> {
    worked("create_stream", device.stream_create(NON_BLOCKING, 0))
}

/// Creates an event and opens it as another process would.
fn pair(device: &dyn Device) -> Result<(RawEvent, RawEvent), String> {
    let own = worked("create_event", device.create_event(SHARED))?;
    let Shared {
        description,
        descriptor,
        ..
    } = worked("share_event", device.share_event(own))?;
    let found = Found {
        description,
        descriptor,
        party: 1,
    };
    Ok((own, worked("open_event", device.open_event(found))?))
}

fn operation(kind: MemoryOperationKind, host: &HostMemory<'_>, word: usize) -> MemoryOperation {
    MemoryOperation {
        kind,
        flags: match kind {
            MemoryOperationKind::Wait64 => condition::GEQ,
            _ => 0,
        },
        address: host.address(word * 8),
        value: 1,
    }
}

/// Delays a stream until the word is 1.
fn hold(device: &dyn Device, stream: RawStream, host: &HostMemory<'_>, word: usize) -> Outcome {
    let wait = operation(MemoryOperationKind::Wait64, host, word);
    worked("wait", device.memory_operations(stream, &[wait]))
}

/// Makes a stream set the word to 1.
fn set(device: &dyn Device, stream: RawStream, host: &HostMemory<'_>, word: usize) -> Outcome {
    let write = operation(MemoryOperationKind::Write64, host, word);
    worked("write", device.memory_operations(stream, &[write]))
}

fn open(host: &HostMemory<'_>, word: usize) {
    host.word(word).store(1, Ordering::Release);
}

fn is_set(host: &HostMemory<'_>, word: usize) -> bool {
    host.word(word).load(Ordering::Acquire) == 1
}

fn one_event(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let (held, waiting) = (new_stream(device)?, new_stream(device)?);
    let (own, opened) = pair(device)?;
    for (mark, (recorded, other)) in (MARK..).zip([(own, opened), (opened, own)]) {
        for event in [recorded, other] {
            same("nothing to wait for", device.query_event(event), Ok(true))?;
        }
        host.word(GATE).store(0, Ordering::Release);
        hold(device, held, &host, GATE)?;
        worked("record", device.record_event(recorded, held, 0))?;
        for event in [recorded, other] {
            same(
                "a record that is held",
                device.query_event(event),
                Ok(false),
            )?;
        }
        worked("wait", device.wait_event(waiting, other, 0))?;
        set(device, waiting, &host, mark)?;
        same(
            "the stream that waits",
            device.query_stream(waiting),
            Ok(false),
        )?;
        holds("it has done nothing", !is_set(&host, mark))?;
        open(&host, GATE);
        worked("synchronize", device.synchronize_event(other))?;
        worked("synchronize", device.synchronize_stream(waiting))?;
        holds("it has gone on", is_set(&host, mark))?;
    }
    for event in [own, opened] {
        worked("destroy", device.destroy_event(event))?;
    }
    Ok(())
}

fn the_last_record(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let [first, second, waiting] = [(); 3].map(|()| new_stream(device));
    let (first, second, waiting) = (first?, second?, waiting?);
    let (own, opened) = pair(device)?;
    hold(device, first, &host, GATE)?;
    worked("record", device.record_event(own, first, 0))?;
    worked("wait", device.wait_event(waiting, opened, 0))?;
    set(device, waiting, &host, MARK)?;
    // The second record completes before the first, and is a different one.
    worked("record", device.record_event(own, second, 0))?;
    worked("synchronize", device.synchronize_event(opened))?;
    holds("who waits for the first still does", !is_set(&host, MARK))?;
    hold(device, second, &host, OTHER_GATE)?;
    worked("record", device.record_event(own, second, 0))?;
    open(&host, GATE);
    worked("synchronize", device.synchronize_stream(waiting))?;
    holds("and goes on with it", is_set(&host, MARK))?;
    same("the last record", device.query_event(opened), Ok(false))?;
    open(&host, OTHER_GATE);
    eventually("the last record is complete", || {
        device.query_event(opened) == Ok(true)
    })?;
    for event in [own, opened] {
        worked("destroy", device.destroy_event(event))?;
    }
    Ok(())
}

fn many_records(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let (held, waiting) = (new_stream(device)?, new_stream(device)?);
    let (own, opened) = pair(device)?;
    hold(device, held, &host, GATE)?;
    for _ in 0..600 {
        worked("record", device.record_event(own, held, 0))?;
    }
    worked("wait", device.wait_event(waiting, opened, 0))?;
    set(device, waiting, &host, MARK)?;
    same("the last record", device.query_event(opened), Ok(false))?;
    open(&host, GATE);
    worked("synchronize", device.synchronize_stream(waiting))?;
    holds("who waited has gone on", is_set(&host, MARK))?;
    worked("synchronize", device.synchronize_event(opened))?;
    worked("synchronize", device.synchronize_stream(held))
}

fn destroyed(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let (held, waiting) = (new_stream(device)?, new_stream(device)?);
    let (own, opened) = pair(device)?;
    hold(device, held, &host, GATE)?;
    worked("record", device.record_event(own, held, 0))?;
    worked("wait", device.wait_event(waiting, opened, 0))?;
    set(device, waiting, &host, MARK)?;
    for event in [own, opened] {
        worked("destroy", device.destroy_event(event))?;
    }
    // A new event is independent of the destroyed one, whose wait is pending.
    let (another, _) = pair(device)?;
    same("another event", device.query_event(another), Ok(true))?;
    holds("who waits still does", !is_set(&host, MARK))?;
    open(&host, GATE);
    worked("synchronize", device.synchronize_stream(waiting))?;
    holds("and then goes on", is_set(&host, MARK))
}
