//! Emulates virtio-blk (virtio 1.2, section 5.2) on a raw image file or a block device of the host.
//!
//! [`DiskImage`] opens and locks the file. [`Block`] implements the registers. [`BlockWorker`] serves the queue: it
//! parses each request (`request.rs`), transfers the data between the file and guest memory without an intermediate
//! copy, and writes the status byte. Reads and writes go through the host's page cache; a flush is `fdatasync`. If the
//! driver does not negotiate VIRTIO_BLK_F_FLUSH, each write is on stable storage before it completes.
//!
//! Many reads are under way at the same time where the kernel has an io_uring (`ring.rs`). Other requests are executed one
//! after the other: a write only copies to the page cache, and is complete before a flush that follows it.
//!
//! File operations block on the host's storage, so each disk has its own device thread.

mod device;
mod identity;
mod image;
mod request;
mod ring;
mod worker;

pub use device::Block;
pub(crate) use identity::DiskFile;
pub use identity::{Difference, DiskIdentity};
pub use image::{DiskAccess, DiskError, DiskImage};
pub use worker::BlockWorker;
