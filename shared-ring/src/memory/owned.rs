use alloc::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use core::ptr::NonNull;

use super::{MemoryError, SessionMemory, WindowMemory};
use crate::layout;

/// A zeroed heap region in place of a window, for tests, examples and fuzz targets.
///
/// ```
/// use wormhole_ring::memory::OwnedMemory;
/// let region = OwnedMemory::segments(1);
/// // SAFETY: `region` outlives the session.
/// let session = unsafe { region.session(0) }.unwrap();
/// assert_eq!(session.base().addr() % 4096, 0);
/// ```
#[derive(Debug)]
pub struct OwnedMemory {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the region is owned; it is accessed through `SessionMemory` and `WindowMemory` only.
unsafe impl Send for OwnedMemory {}
// SAFETY: as above.
unsafe impl Sync for OwnedMemory {}

impl OwnedMemory {
    /// Allocates a zeroed region of `count` segments.
    ///
    /// # Panics
    /// `count` is 0 or the region exceeds the address space.
    #[must_use]
    pub fn segments(count: usize) -> Self {
        assert!(count > 0, "a region has at least one segment");
        let layout = count
            .checked_mul(layout::SEGMENT_BYTES)
            .and_then(|bytes| Layout::from_size_align(bytes, layout::BOOTSTRAP_BYTES).ok())
            .expect("the region fits the address space");
        // SAFETY: the layout is not empty.
        let base = unsafe { alloc_zeroed(layout) };
        Self {
            base: NonNull::new(base).unwrap_or_else(|| handle_alloc_error(layout)),
            layout,
        }
    }

    /// Returns the region as a window.
    ///
    /// # Safety
    /// The region outlives the result, its clones and all values made from them.
    ///
    /// # Errors
    /// As [`WindowMemory::new`].
    pub unsafe fn window(&self) -> Result<WindowMemory, MemoryError> {
        // SAFETY: the region stays allocated as the caller promises.
        unsafe { WindowMemory::new(self.base.as_ptr(), self.layout.size()) }
    }

    /// Returns the session in segment number `segment` of the region.
    ///
    /// # Safety
    /// The region outlives the result, its clones and all values made from them.
    ///
    /// # Errors
    /// The segment does not lie in the region.
    pub unsafe fn session(&self, segment: u32) -> Result<SessionMemory, MemoryError> {
        // SAFETY: as above.
        unsafe { self.window() }?.session(segment)
    }

    /// Zeroes the region again, which is faster than a new allocation.
    ///
    /// # Safety
    /// No value made from the region is used during this call; values that cache the region's content are not used
    /// afterwards either.
    pub unsafe fn clear(&self) {
        // SAFETY: the region is allocated and, by the contract above, not accessed by other code.
        unsafe { self.base.write_bytes(0, self.layout.size()) };
    }
}

impl Drop for OwnedMemory {
    fn drop(&mut self) {
        // SAFETY: allocated in `segments` with this layout.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}
