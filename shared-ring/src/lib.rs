//! The window that guest and backend share: layout, rings, answer slots, fences, arena.
//!
//! Both sides link this crate; it holds every byte offset and every memory ordering of the shared
//! memory, and the messages of the control channel. It needs no operating system: the feature
//! `alloc` adds what keeps tables, and `std`, the default, implies it and adds what maps addresses.
//!
//! Invariants:
//! - No `&` or `&mut` to shared memory exists, except to atomics. Bytes are copied out with volatile
//!   reads and looked at afterwards ([`memory`]).
//! - The consumer of a ring believes nothing it reads: what a correct producer cannot have written is
//!   a [`ring::Violation`]. The producer's side is bounded the same way and reports
//!   [`ring::PushError::Corrupt`].
//! - `push` and `take` allocate nothing, take no lock and make no system call.
//! - Each Release and its Acquire name their [`sync::SyncPoint`], and carry a comment
//!   `SYNC POINT: name` with the same name.

#![cfg_attr(not(feature = "std"), no_std)]

#[cfg(feature = "alloc")]
extern crate alloc;

#[cfg(feature = "alloc")]
pub mod arena;
#[cfg(feature = "std")]
pub mod band;
pub mod bootstrap;
pub mod control;
pub mod fence;
pub mod layout;
pub mod memory;
pub mod ring;
pub mod session;
pub mod slot;
pub mod status;
pub mod sync;
pub mod wait;
pub mod waits;
