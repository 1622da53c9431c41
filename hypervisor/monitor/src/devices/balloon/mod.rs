//! Emulates virtio-balloon (virtio 1.2, section 5.5): pages that the guest does not use go back to the host.
//!
//! The guest's `virtio_balloon` driver reports free pages by itself (`VIRTIO_BALLOON_F_PAGE_REPORTING`), in blocks of
//! 2 MiB and a few seconds after they became free. The device drops them: the host has their memory, and the guest reads
//! zeros when it uses them again. The device never asks for pages: its target size is 0.

mod device;
mod worker;

pub use device::Balloon;
pub use worker::BalloonWorker;
