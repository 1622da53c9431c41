//! Fences: 64-bit counters in the session segment that the device raises when the work before them completes.

use crate::{
    layout::{FENCES, session},
    memory::SessionMemory,
    sync::SyncPoint,
};

/// Index of a fence, below [`FENCES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FenceIndex(u32);

impl FenceIndex {
    /// Returns the fence with this index, or `None` if it is not below [`FENCES`].
    ///
    /// ```
    /// use wormhole_ring::{fence::FenceIndex, layout::FENCES};
    /// assert!(FenceIndex::new(FENCES as u32 - 1).is_some());
    /// assert!(FenceIndex::new(FENCES as u32).is_none());
    /// ```
    #[must_use]
    pub const fn new(index: u32) -> Option<Self> {
        if (index as usize) < FENCES {
            Some(Self(index))
        } else {
            None
        }
    }

    /// Returns the index.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Returns the offset of the fence's word in the session segment.
    #[must_use]
    pub const fn address_offset(self) -> usize {
        session::FENCE_BASE + self.0 as usize * 8
    }
}

/// The fences of a session, for both sides.
///
/// ```
/// use wormhole_ring::{fence::{FenceIndex, Fences}, memory::OwnedMemory};
/// let region = OwnedMemory::segments(1);
/// // SAFETY: the region outlives the fences.
/// let fences = Fences::new(unsafe { region.session(0) }.unwrap());
/// let fence = FenceIndex::new(7).unwrap();
/// assert_eq!(fences.load(fence), 0);
/// fences.store(fence, 41);
/// assert_eq!(fences.load(fence), 41);
/// ```
#[derive(Clone, Debug)]
pub struct Fences {
    memory: SessionMemory,
}

impl Fences {
    /// Creates the view of the fences in `memory`.
    #[must_use]
    pub fn new(memory: SessionMemory) -> Self {
        Self { memory }
    }

    /// Loads the fence's value.
    #[inline]
    #[must_use]
    pub fn load(&self, fence: FenceIndex) -> u64 {
        // SYNC POINT: fence. Writes to the window by the work before the fence are visible from here on.
        self.memory
            .word(fence.address_offset())
            .load(SyncPoint::Fence.acquire())
    }

    /// Stores the fence's value. Used by devices that execute on the CPU.
    #[inline]
    pub fn store(&self, fence: FenceIndex, value: u64) {
        // SYNC POINT: fence.
        self.memory
            .word(fence.address_offset())
            .store(value, SyncPoint::Fence.release());
    }
}
