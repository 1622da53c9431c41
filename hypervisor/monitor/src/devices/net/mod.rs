//! Emulates virtio-net (virtio 1.2, section 5.1) on a tap interface of the host.
//!
//! [`Tap`] attaches to the interface. [`Net`] implements the registers. [`NetWorker`] moves frames between the two
//! queues and the tap. Each frame has a `struct virtio_net_hdr` before it, which the kernel's tap driver reads and
//! writes (`IFF_VNET_HDR`): checksums and segmentation that the driver negotiates are left to the host's network stack.
//!
//! Each interface has its own device thread.

mod device;
mod tap;
mod worker;

pub use device::{MacAddress, Net};
pub use tap::{Tap, TapError};
pub use worker::NetWorker;
