//! Access to memory that another party can write.
//!
//! No reference or slice to it is ever created, except to an atomic. Words that synchronise are atomics; all other
//! bytes are copied with volatile accesses, which the compiler neither repeats nor moves into later uses of the copy.
//! Concurrent accesses of another process lie outside the language's memory model; the ring's protocol orders the
//! accesses of this process.

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

/// Errors of a shared region and of accesses to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// The base is null or not aligned.
    #[error("shared memory at {address:#x} is not aligned to {align} bytes")]
    Unaligned {
        /// Address of the region.
        address: usize,
        /// Required alignment.
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
    /// An access reaches past the end of the window.
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
