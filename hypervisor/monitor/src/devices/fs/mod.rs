//! Emulates virtio-fs (virtio 1.2, section 5.11): a folder of the host in the guest.
//!
//! [`Fs`] implements the registers. [`FsWorker`] moves FUSE requests from the guest's queues to a server, and its
//! replies to the guest's buffers. The server is another process, at the other end of a socket of packets
//! (SOCK_SEQPACKET), with one message a packet. So the monitor opens no file, and the server maps no memory of the
//! guest, which stays private and in huge pages (vhost-user needs shared memory).
//!
//! A device has its own device thread.

mod device;
mod worker;

pub use device::{BadTag, Fs, Tag};
pub use worker::FsWorker;
