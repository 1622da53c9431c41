//! Memory that graphs allocate. It is allocated when its node is created, since the program gets its address then, and
//! freed when neither graph nor launch needs it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use wormhole_api::{DevicePtr, MemAlloc, MemFree};

use super::{Model, with};
use crate::error::{CuError, Result};
use crate::memory::map::{Allocation, Origin};
use crate::memory::{self, memory_map};
use crate::object::capture_mode;
use crate::object::context::Scope;
use crate::session::session;

/// One allocation of a graph.
#[derive(Debug)]
pub struct GraphMemory {
    pub address: u64,
    pub bytes: u64,
    /// Ordinal of the memory's device.
    device: usize,
}

static USED: AtomicU64 = AtomicU64::new(0);
static HIGH: AtomicU64 = AtomicU64::new(0);

/// Returns the bytes that graphs have allocated: now, and at most so far.
pub fn usage() -> (&'static AtomicU64, &'static AtomicU64) {
    (&USED, &HIGH)
}

impl GraphMemory {
    pub fn allocate(scope: Scope, bytes: u64) -> Result<Arc<Self>> {
        if bytes == 0 {
            return Err(CuError::INVALID_VALUE);
        }
        let address = scope
            .session
            .request(&MemAlloc { bytes }, |reply| reply.address.0)?;
        memory_map().insert(address, bytes, Origin::Graph, scope.context);
        let used = USED.fetch_add(bytes, Ordering::Relaxed) + bytes;
        HIGH.fetch_max(used, Ordering::Relaxed);
        Ok(Arc::new(Self {
            address,
            bytes,
            device: scope.session.ordinal(),
        }))
    }

    /// Frees the memory if this is the last reference.
    pub fn let_go(memory: Arc<Self>) {
        let Some(memory) = Arc::into_inner(memory) else {
            return;
        };
        let is_graph = |allocation: &Allocation| allocation.origin == Origin::Graph;
        if memory_map().remove(memory.address, is_graph).is_ok()
            && let Ok(session) = session()
        {
            let message = MemFree {
                address: DevicePtr(memory.address),
            };
            // No call waits for the result: a failure ends the session and shows at the next call.
            let _ = session.on(memory.device).request(&message, |()| ());
        }
    }
}

impl Drop for GraphMemory {
    fn drop(&mut self) {
        USED.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Implements `cuMemFree`.
pub fn free(scope: Scope, address: u64) -> Result {
    let is_graph =
        |allocation: &Allocation| allocation.base == address && allocation.origin == Origin::Graph;
    if !memory_map().find(address).as_ref().is_some_and(is_graph) {
        return memory::free(scope, address);
    }
    capture_mode::check_call()?;
    with(|model| model.free(address))
}

impl Model {
    /// Implements `cuMemFree` for memory that a launch has allocated: the graph may allocate it again.
    fn free(&mut self, address: u64) -> Result {
        let memory = self.live.remove(&address).ok_or(CuError::INVALID_VALUE)?;
        self.gone.memory.push(memory);
        Ok(())
    }
}
