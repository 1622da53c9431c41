//! Emulates virtio-net (virtio 1.2, section 5.1).
//!
//! [`Net`] implements the registers. [`NetWorker`] moves frames between the two queues and the host's end, a
//! [`HostEnd`]: a tap interface ([`Tap`]) or the stream of a process ([`FrameStream`]). Each frame has a `struct
//! virtio_net_hdr` before it, which the kernel's tap driver reads and writes (`IFF_VNET_HDR`): checksums and segmentation
//! that the driver negotiates are left to the host's network stack. A stream has whole frames without headers, so that
//! its driver is offered neither.
//!
//! Each interface has its own device thread.

mod device;
mod frame;
mod host_end;
mod stream;
mod tap;
mod worker;

pub use device::{MacAddress, Net};
pub use frame::GuestFrame;
pub use host_end::HostEnd;
pub use stream::{FrameStream, StreamEnd};
pub use tap::{Tap, TapError};
pub use worker::NetWorker;
