//! Small allocations of device memory: parts of slabs, which this library divides itself, as the native driver divides
//! its own blocks. A request allocates a slab; a record names each part to the worker, so that parts alone may be used.

use std::collections::BTreeMap;

use wormhole_api::{DevicePtr, PartAlloc, PartFree, SlabAlloc, SlabFree};
use wormhole_lock::{Mutex, MutexGuard};
use wormhole_ring::arena::Arena;

use crate::error::{CuError, Result};
use crate::log;
use crate::memory::map::Allocation;
use crate::object::context::{self, Scope};
use crate::object::stream;

/// Bytes of a slab.
const SLAB: u64 = 2 << 20;
/// Most bytes of a part. The native driver divides its blocks up to this size.
const MOST: u64 = 1 << 20;
/// Parts start at a multiple of this, the alignment of textures.
const UNIT: u64 = 512;

/// The slabs of a context.
#[derive(Debug, Default)]
struct Slabs {
    /// The slabs are its extents, and the parts its allocations.
    arena: Arena,
    /// Slab that is kept while it is empty, so that a program that allocates and frees in a loop sends no requests. It
    /// may be in use again.
    kept: Option<u64>,
}

/// The slabs of each context, by its number.
static SLABS: Mutex<BTreeMap<u32, Slabs>> = Mutex::new(BTreeMap::new());

fn slabs() -> MutexGuard<'static, BTreeMap<u32, Slabs>> {
    SLABS.lock()
}

impl Slabs {
    /// Adds a slab.
    fn add(&mut self, slab: u64) -> Result {
        self.arena.add_extent(slab, SLAB).map_err(|error| {
            log::error_once!("the backend allocated memory that is in use: {error}");
            CuError::UNKNOWN
        })
    }

    /// Takes a part. Returns `None` if no slab has room for it.
    fn take(&mut self, bytes: u64) -> Option<u64> {
        let bytes = bytes.next_multiple_of(UNIT);
        let block = self.arena.allocate(bytes, UNIT).ok()?;
        Some(block.address)
    }

    /// Puts a part back. Returns a slab that is to be freed: one that is empty now, if another empty one is kept.
    fn put(&mut self, part: u64) -> Option<u64> {
        let empty = self.arena.free(part).ok()?.empty_extent?.address;
        let is_spare = |kept: u64| kept != empty && self.arena.is_unused(kept);
        if self.kept.is_some_and(is_spare) {
            return self.remove(empty);
        }
        self.kept = Some(empty);
        None
    }

    /// Removes the kept slab, if it is empty.
    fn remove_kept(&mut self) -> Option<u64> {
        let kept = self.kept.take()?;
        self.remove(kept)
    }

    fn remove(&mut self, slab: u64) -> Option<u64> {
        let removed = self.arena.remove_extent(slab).ok()?;
        Some(removed.address)
    }

    fn holds(&self, part: u64) -> bool {
        let found = self.arena.find(part);
        found.is_some_and(|block| block.address == part)
    }
}

fn free_slab(scope: Scope, slab: u64) -> Result {
    let address = DevicePtr(slab);
    scope.session.request(&SlabFree { address }, |()| ())
}

/// Allocates a part. Returns `None` for an allocation that is too large for one, and if the device has no memory for
/// another slab.
pub fn allocate(scope: Scope, bytes: u64) -> Result<Option<u64>> {
    if bytes > MOST {
        return Ok(None);
    }
    let taken = slabs().entry(scope.context).or_default().take(bytes);
    let taken = match taken {
        Some(address) => address,
        None => match grow(scope, bytes) {
            Ok(address) => address,
            Err(CuError::OUT_OF_MEMORY) => return Ok(None),
            Err(error) => return Err(error),
        },
    };
    let address = DevicePtr(taken);
    scope.session.record(&PartAlloc { address, bytes })?;
    Ok(Some(taken))
}

/// Allocates a slab and takes a part.
fn grow(scope: Scope, bytes: u64) -> Result<u64> {
    let message = SlabAlloc { bytes: SLAB };
    let slab = scope.session.request(&message, |reply| reply.address.0)?;
    let mut slabs = slabs();
    let slabs = slabs.entry(scope.context).or_default();
    slabs.add(slab)?;
    slabs.take(bytes).ok_or(CuError::UNKNOWN)
}

/// Frees an allocation that was removed from the map, if it is a part. Waits, as `cuMemFree` does, for the work of its
/// device.
pub fn free(scope: Scope, allocation: &Allocation) -> Option<Result> {
    is_part(allocation).then(|| {
        let session = scope.session.session();
        free_part(
            context::scope_numbered(session, allocation.context),
            allocation.base,
        )
    })
}

fn free_part(scope: Scope, part: u64) -> Result {
    stream::wait_for_work(scope)?;
    let address = DevicePtr(part);
    // Sent before another thread can take the part again.
    scope.session.record(&PartFree { address })?;
    let surplus = slabs()
        .get_mut(&scope.context)
        .and_then(|slabs| slabs.put(part));
    surplus.map_or(Ok(()), |slab| free_slab(scope, slab))
}

/// Frees the empty slabs of a device. Returns false if there are none.
pub fn free_empty(scope: Scope) -> Result<bool> {
    let session = scope.session.session();
    let empty: Vec<(Scope, u64)> = slabs()
        .iter_mut()
        .map(|(context, slabs)| (context::scope_numbered(session, *context), slabs))
        .filter(|(owner, _)| owner.session.ordinal() == scope.session.ordinal())
        .filter_map(|(owner, slabs)| Some((owner, slabs.remove_kept()?)))
        .collect();
    for (owner, slab) in &empty {
        free_slab(*owner, *slab)?;
    }
    Ok(!empty.is_empty())
}

/// Returns the offset of an allocation in its slab, if it is a part.
pub fn offset(allocation: &Allocation) -> Option<u64> {
    let slabs = slabs();
    let slabs = slabs.get(&allocation.context)?;
    let slab = slabs.arena.extent(allocation.base)?;
    slabs
        .holds(allocation.base)
        .then(|| allocation.base - slab.address)
}

/// Returns whether an allocation is a part.
pub fn is_part(allocation: &Allocation) -> bool {
    offset(allocation).is_some()
}

/// Frees the slabs of a context with all their parts.
pub fn free_of(scope: Scope) {
    let gone = slabs().remove(&scope.context);
    for slab in gone.iter().flat_map(|slabs| slabs.arena.extents()) {
        // The context is destroyed: a failure ends the session and shows at the next call.
        let _ = free_slab(scope, slab.address);
    }
}

/// Forgets all slabs, after the worker has freed them.
pub fn forget_all() {
    slabs().clear();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_lie_in_slabs_apart_and_aligned() {
        let mut slabs = Slabs::default();
        assert_eq!(slabs.take(1), None);
        slabs.add(SLAB).unwrap();
        assert_eq!(slabs.add(SLAB), Err(CuError::UNKNOWN));
        let mut end = SLAB;
        for bytes in [1, 512, 513, 5000, MOST] {
            let part = slabs.take(bytes).unwrap();
            assert!(part >= end && part.is_multiple_of(UNIT), "{bytes}");
            end = part + bytes;
        }
        assert_eq!(slabs.take(MOST), None, "there is less room");
        assert!(slabs.holds(SLAB) && !slabs.holds(SLAB + 1) && !slabs.holds(end));
    }

    #[test]
    fn one_empty_slab_is_kept() {
        let mut slabs = Slabs::default();
        slabs.add(SLAB).unwrap();
        slabs.add(2 * SLAB).unwrap();
        let mut parts: Vec<u64> = (0..4).map(|_| slabs.take(MOST).unwrap()).collect();
        parts.sort_unstable();
        let put = |slabs: &mut Slabs, part: usize| slabs.put(parts[part]);
        assert_eq!(put(&mut slabs, 0), None);
        assert_eq!(put(&mut slabs, 1), None, "the first empty one");
        assert_eq!(put(&mut slabs, 2), None, "not empty yet");
        assert_eq!(put(&mut slabs, 3), Some(2 * SLAB));
        for _ in 0..3 {
            let part = slabs.take(MOST).unwrap();
            assert_eq!(slabs.remove(SLAB), None, "in use");
            assert_eq!(slabs.put(part), None, "the kept one is in use again");
        }
        assert_eq!(slabs.remove_kept(), Some(SLAB));
        assert_eq!(slabs.remove_kept(), None);
        assert_eq!(slabs.take(1), None);
    }
}
