//! Memory that another party can write.
//!
//! No reference or slice to it is ever made, except to an atomic. Words that synchronise are atomics;
//! everything else is copied with volatile accesses, which the compiler neither repeats nor moves
//! into later uses of the copy. What another process does to the bytes at the same time lies outside
//! the language's memory model; what this process does is ordered by the ring's protocol.

mod copy;
#[cfg(loom)]
mod model;
#[cfg(all(feature = "alloc", not(loom)))]
mod owned;
#[cfg(not(loom))]
mod session;
mod window;

#[cfg(loom)]
pub use model::SessionMemory;
#[cfg(all(feature = "alloc", not(loom)))]
pub use owned::OwnedMemory;
#[cfg(not(loom))]
pub use session::SessionMemory;
pub use window::WindowMemory;

/// Why a region cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// The base is null or not aligned.
    #[error("shared memory at {address:#x} is not aligned to {align} bytes")]
    Unaligned {
        /// Where the region starts.
        address: usize,
        /// What it must be aligned to.
        align: usize,
    },
    /// The region is too short.
    #[error("shared memory of {length:#x} bytes is shorter than the {needed:#x} bytes needed")]
    TooShort {
        /// Bytes of the region.
        length: usize,
        /// Bytes needed.
        needed: usize,
    },
    /// An access reaches past the end.
    #[error("{length:#x} bytes at offset {offset:#x} do not lie in a window of {window:#x} bytes")]
    OutOfBounds {
        /// Offset of the access.
        offset: usize,
        /// Bytes of the access.
        length: usize,
        /// Bytes of the window.
        window: usize,
    },
}
