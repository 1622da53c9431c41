//! The CPU device: PTX executed on the host's processors.
//!
//! [`CpuDevice`] keeps the rules of a CUDA device where there is none: streams that overlap, the legacy
//! default stream, events with times, fences, faults that are sticky, memory in the same address band.
//!
//! Invariants:
//! - Memory is reached only through addresses that [`memory`] has checked.
//! - Work on streams holds what it needs (memory, output, a kernel), never the context: a context is
//!   torn down by the threads that use the device, not by the streams' own.
//! - After the first fault nothing runs: no fence behind it is ever written.

mod aperture;
mod arrays;
mod boxes;
mod description;
mod device;
mod event;
mod family;
mod graph;
mod green_contexts;
mod holes;
mod image_limits;
mod kernel;
mod launch;
mod launch_events;
mod limits;
mod linker;
mod memory;
mod module;
mod output;
mod peers;
mod pools;
mod references;
mod scheduler;
mod sharing;
mod stream_memory;
mod virtual_memory;

pub use aperture::ApertureError;
pub use device::{CpuDevice, OpenError, Options};
