//! Layout and protocol of the memory window that guest and backend share: rings, answer slots, fences, arena.
//!
//! Both sides link this crate. It defines every byte offset and every memory ordering of the shared memory, and the
//! messages of the control channel. It needs no operating system. The feature `alloc` adds the arena, the segment table,
//! heap-allocated regions, and a queue between threads of one process; `std`, the default, implies `alloc` and adds `band`, which calls `mmap`, the
//! sleep of waiting threads, and the ends of a `stream`.
//!
//! Invariants:
//! - No `&` or `&mut` to shared memory exists, except to atomics. Bytes are copied out with volatile reads and parsed
//!   afterwards ([`memory`]).
//! - The consumer of a ring trusts nothing it reads: a value that no correct producer writes is a [`ring::Violation`].
//!   The producer checks the cursors in the same way and reports [`ring::PushError::Corrupt`].
//! - `push` and `take` allocate nothing, take no lock and make no system call.
//! - Each Release and its Acquire use the same [`sync::SyncPoint`], and carry a comment `SYNC POINT: name` with its
//!   name.

#![cfg_attr(not(feature = "std"), no_std)]

#[cfg(feature = "alloc")]
extern crate alloc;

#[cfg(feature = "alloc")]
pub mod arena;
#[cfg(feature = "std")]
pub mod band;
pub mod bootstrap;
pub mod control;
mod delay;
pub mod fence;
#[cfg(all(feature = "std", not(loom)))]
mod futex;
pub mod layout;
pub mod memory;
#[cfg(feature = "alloc")]
pub mod queue;
pub mod ring;
pub mod session;
pub mod shared_files;
pub mod slot;
pub mod status;
pub mod stream;
pub mod sync;
pub mod transport;
pub mod wait;
pub mod waits;
