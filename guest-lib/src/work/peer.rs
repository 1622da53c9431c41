//! Which contexts reach the memory of which: native keeps that by context, the worker by device.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use wormhole_api::{Access, PeerDisable, PeerEnable};

use crate::error::{CuError, Result};
use crate::memory::map::Origin;
use crate::memory::memory_map;
use crate::memory::{pool, virtual_memory};
use crate::object::context::Scope;
use crate::object::stream::Target;

/// Refuses work of a stream at memory of another device that the stream's does not reach. Copies reach all memory.
pub fn check(scope: Scope, target: Target, address: u64) -> Result {
    if scope.session.devices().len() == 1 {
        return Ok(());
    }
    let device = target.device(scope);
    let Some(allocation) = memory_map().find(address) else {
        return Ok(());
    };
    let Some(owner) = allocation.device().filter(|owner| *owner != device) else {
        return Ok(());
    };
    let reached = match allocation.origin {
        _ if allocation.for_device(address).is_some() => true,
        Origin::Pool { pool } => pool::access(pool, device) == Access::ReadWrite,
        Origin::Mapped { .. } => virtual_memory::access(address, device) == Ok(Access::ReadWrite),
        _ => pairs()
            .iter()
            .any(|pair| (pair.device, pair.peer_device) == (device, owner)),
    };
    if reached {
        Ok(())
    } else {
        Err(CuError::INVALID_VALUE)
    }
}

/// A context that reaches another's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Pair {
    context: u32,
    device: usize,
    peer: u32,
    peer_device: usize,
}

impl Pair {
    fn new(scope: Scope, peer: Scope) -> Self {
        Self {
            context: scope.context,
            device: scope.session.ordinal(),
            peer: peer.context,
            peer_device: peer.session.ordinal(),
        }
    }

    fn is_of_devices(&self, other: &Self) -> bool {
        (self.device, self.peer_device) == (other.device, other.peer_device)
    }
}

static PAIRS: Mutex<BTreeSet<Pair>> = Mutex::new(BTreeSet::new());

fn pairs() -> MutexGuard<'static, BTreeSet<Pair>> {
    PAIRS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The scope's context reaches the peer's memory from now on.
pub fn enable(scope: Scope, peer: Scope) -> Result {
    let pair = Pair::new(scope, peer);
    // Held during the request, so that the worker is told of each pair of devices once.
    let mut pairs = pairs();
    if pairs.contains(&pair) {
        return Err(CuError::PEER_ACCESS_ALREADY_ENABLED);
    }
    if !pairs.iter().any(|known| known.is_of_devices(&pair)) {
        let peer = peer.session.number();
        scope.session.request(&PeerEnable { peer }, |()| ())?;
    }
    pairs.insert(pair);
    Ok(())
}

/// It does not any more.
pub fn disable(scope: Scope, peer: Scope) -> Result {
    end(scope, |pair| *pair == Pair::new(scope, peer))?
        .then_some(())
        .ok_or(CuError::PEER_ACCESS_NOT_ENABLED)
}

/// Ends pairs; whether there were any. All of them end, whatever fails meanwhile.
fn end(scope: Scope, ends: impl Fn(&Pair) -> bool) -> Result<bool> {
    let mut pairs = pairs();
    let ended: Vec<Pair> = pairs.iter().filter(|pair| ends(pair)).copied().collect();
    let session = scope.session.session();
    let mut told = Ok(());
    for pair in &ended {
        pairs.remove(pair);
        if !pairs.iter().any(|known| known.is_of_devices(pair)) {
            let peer = session.on(pair.peer_device).number();
            let disable = PeerDisable { peer };
            told = told.and(session.on(pair.device).request(&disable, |()| ()));
        }
    }
    told.map(|()| !ended.is_empty())
}

/// A context goes.
pub fn forget(scope: Scope) {
    // A failure ends the session and shows at the next call.
    let _ = end(scope, |pair| {
        pair.context == scope.context || pair.peer == scope.context
    });
}

/// The worker has reset its contexts.
pub fn forget_all() {
    pairs().clear();
}
