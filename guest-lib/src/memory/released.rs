//! Mappable memory that the program has released and that is kept for its next `cuMemCreate` of the same size: the native
//! driver takes some 10 µs for either call.
//!
//! The worker frees it when the device has no memory left, and when the program asks how much is free. Its contents are
//! the program's own, as those of all memory that `cuMemCreate` returns to a process are undefined.

use wormhole_api::handle::Memory as MemoryKind;
use wormhole_api::{Handle, MemRelease};
use wormhole_lock::Mutex;

use super::kept::{Freed, Kept, MOST_BYTES};
use super::virtual_memory::forget;
use crate::error::Result;
use crate::object::context::Scope;

/// Handles that the program has no more, by the ordinals of devices.
static RELEASED: Mutex<Kept<usize, Handle<MemoryKind>>> = Mutex::new(Kept::NEW);

/// Returns memory of this size on the scope's device, to be named by another handle.
pub fn take(scope: Scope, bytes: u64) -> Option<Handle<MemoryKind>> {
    RELEASED.lock().take(scope.session.ordinal(), bytes)
}

/// Keeps memory that the program cannot name any more, or has it freed.
pub fn put(scope: Scope, memory: Handle<MemoryKind>, device: usize, bytes: u64) -> Result {
    if bytes > MOST_BYTES {
        return free(scope, memory);
    }
    scope.session.alive()?;
    let surplus = RELEASED.lock().put(Freed {
        owner: device,
        memory,
        bytes,
    });
    let mut surplus = surplus.into_iter();
    surplus.try_for_each(|freed| free(scope, freed.memory))
}

/// Has the worker free memory that the program cannot name any more.
pub fn free(scope: Scope, memory: Handle<MemoryKind>) -> Result {
    let freed = scope.session.request(&MemRelease { memory }, |()| ());
    forget(memory);
    freed
}

/// Frees the kept memory of the scope's device. Returns false if the device has none.
pub fn free_all(scope: Scope) -> Result<bool> {
    let device = scope.session.ordinal();
    let freed = RELEASED.lock().take_all(|freed| freed.owner == device);
    for freed in &freed {
        free(scope, freed.memory)?;
    }
    Ok(!freed.is_empty())
}
