//! virtio-blk (virtio 1.2, section 5.2): a raw image file, or a block device of the host, as the guest's disk.
//!
//! [`DiskImage`] opens and locks the file. [`Block`] is the device in registers. [`BlockWorker`] serves the queue: it parses
//! each request (`request.rs`), moves the data between the file and guest memory without a copy of its own, and answers
//! with a status byte. Reads and writes go through the host's page cache; a flush is `fdatasync`. A driver that does not
//! ask for flushes has each write on stable storage before it is answered.
//!
//! File operations wait for the host's storage, so that each disk has a device thread of its own.

mod device;
mod image;
mod request;
mod worker;

pub use device::Block;
pub use image::{DiskAccess, DiskError, DiskImage};
pub use worker::BlockWorker;
