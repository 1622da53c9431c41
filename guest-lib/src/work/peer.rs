//! Peer access between contexts: native CUDA records it by context, the worker by device.

use std::collections::BTreeSet;

use wormhole_api::{Access, PeerDisable, PeerEnable};
use wormhole_lock::{Mutex, MutexGuard};

use crate::error::{CuError, Result};
use crate::memory::map::Origin;
use crate::memory::memory_map;
use crate::memory::{pool, virtual_memory};
use crate::object::context::Scope;
use crate::object::stream::Target;

/// Refuses work of a stream on memory of another device to which the stream's device has no access. Copies reach all
/// memory.
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

/// A context with access to the memory of another context.
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
    PAIRS.lock()
}

/// Gives the scope's context access to the peer's memory.
pub fn enable(scope: Scope, peer: Scope) -> Result {
    let pair = Pair::new(scope, peer);
    // Held during the request, so that the worker gets one request for each pair of devices.
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

/// Ends the access of the scope's context to the peer's memory.
pub fn disable(scope: Scope, peer: Scope) -> Result {
    end(scope, |pair| *pair == Pair::new(scope, peer))?
        .then_some(())
        .ok_or(CuError::PEER_ACCESS_NOT_ENABLED)
}

/// Ends the pairs that `ends` accepts; returns true if there were any. A failed request does not keep the others.
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

/// Ends all pairs of a context that is being destroyed.
pub fn forget(scope: Scope) {
    // A failure ends the session and shows at the next call.
    let _ = end(scope, |pair| {
        pair.context == scope.context || pair.peer == scope.context
    });
}

/// Forgets all pairs, after the worker has reset its contexts.
pub fn forget_all() {
    pairs().clear();
}
