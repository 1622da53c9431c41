//! CUDA device: the real driver, loaded at run time.
//!
//! [`CudaDevice`] drives one device through its primary context. It translates [`Device`] calls into driver calls. Its
//! own state is the loaded images and the executable graphs.
//!
//! A worker calls, in this order and before it starts a thread: [`reserve_bands`], [`capture_output`],
//! [`CudaDevice::open`].
//!
//! Invariants:
//! - Streams, events and functions are the driver's own handles; the caller passes back only live handles that it got
//!   here. The driver does not check them.
//! - Nothing here panics on a machine without a driver or with another driver.

mod arrays;
mod bands;
mod capture;
mod chains;
mod code;
mod comparison;
mod conditional;
mod current;
mod described;
mod device;
mod driver;
mod elf;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod graph;
mod green_contexts;
mod images;
mod jit;
mod launch_events;
mod library;
mod managed;
mod mem_ops;
mod open;
mod peers;
mod pools;
mod printing;
mod shared_events;
mod sharing;
mod texture_references;
mod virtual_memory;

pub use bands::{BandError, reserve_bands};
pub use capture::{Originals, capture_output};
pub use device::CudaDevice;
pub use driver::DriverError;
pub use open::{OpenError, Options};
