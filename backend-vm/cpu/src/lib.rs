//! The CPU device, which executes PTX on the host's processors.
//!
//! [`CpuDevice`] implements the semantics of a CUDA device without a GPU: overlapping streams, the legacy default
//! stream, events with times, fences, sticky faults, and memory in the same address band.
//!
//! Invariants:
//! - Memory is accessed only through addresses that [`memory`] has checked.
//! - Work on streams holds references to the memory, output and kernels that it uses, never to the context. So the
//!   threads that use the device tear a context down, not the streams' own threads.
//! - After the first fault no work runs, and no fence behind it is ever written.

mod aperture;
mod arrays;
mod chains;
mod comparison;
mod copy3d;
mod description;
mod device;
mod errors;
mod event;
mod graph;
mod green_contexts;
mod holes;
mod image_limits;
mod kernel;
mod launch;
mod launch_events;
mod limits;
mod linker;
mod mem_ops;
mod memory;
mod module;
mod output;
mod peer_set;
mod peers;
mod pools;
mod scheduler;
mod sharing;
mod texture_references;
mod virtual_memory;

pub use aperture::ApertureError;
pub use device::{CpuDevice, OpenError, Options};
