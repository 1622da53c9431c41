//! Order between streams: of copies between devices, and of launches on several devices.

use std::collections::BTreeSet;

use super::submit::{Operation, submit};
use crate::error::Result;
use crate::memory::memory_map;
use crate::object::context::{Scope, primary_scope};
use crate::object::event::{self, Record, Wait};
use crate::object::stream::{Target, legacy};
use crate::types::EVENT_DISABLE_TIMING;

/// Hands a copy to a stream. A copy of the legacy stream that names memory of other devices comes after what was handed
/// to these before, and before what is handed to them later (CUDA C++ programming guide, "Peer-to-peer memory copy").
pub fn in_order(
    scope: Scope,
    target: Target,
    addresses: [u64; 2],
    copy: impl FnOnce() -> Result,
) -> Result {
    if scope.session.devices().len() == 1 || !target.handle.is_legacy() {
        return copy();
    }
    let own = scope.session.ordinal();
    let others = addresses.into_iter().filter_map(device_of);
    let others: BTreeSet<usize> = others.filter(|device| *device != own).collect();
    let others = others.iter().map(|&device| {
        let scope = primary_scope(scope.session.session(), device);
        (scope, legacy(scope))
    });
    for other in others.clone() {
        follow((scope, target), other)?;
    }
    copy()?;
    for other in others {
        follow(other, (scope, target))?;
    }
    Ok(())
}

/// Makes later work of each of these streams wait for the present work of all of them.
pub fn join_streams(streams: &[(Scope, Target)]) -> Result {
    for (index, stream) in streams.iter().enumerate() {
        let others = streams.iter().enumerate();
        for (_, other) in others.filter(|(number, _)| *number != index) {
            follow(*stream, *other)?;
        }
    }
    Ok(())
}

/// Makes later work of a stream wait for the present work of another stream.
fn follow((scope, target): (Scope, Target), (before, other): (Scope, Target)) -> Result {
    let event = event::create(before, EVENT_DISABLE_TIMING)?;
    let ordered = Record::new(before, other, event, 0)
        .and_then(|record| submit(before, other, Operation::Record(record)))
        .and_then(|()| Wait::new(event, 0))
        .and_then(|wait| submit(scope, target, Operation::Wait(wait)));
    ordered.and(event::destroy(before, event))
}

/// Returns the number of the device whose memory lies at an address.
fn device_of(address: u64) -> Option<usize> {
    let allocation = memory_map().find(address)?;
    if allocation.for_device(address).is_some() {
        return None;
    }
    allocation.device()
}
