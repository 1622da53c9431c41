//! Emulates devices. Each device is one folder or file.

pub mod balloon;
pub mod block;
pub mod console;
pub mod fs;
pub mod net;
pub mod pci;
pub mod power;
pub mod rng;
pub mod serial;
pub mod vfio;
pub mod virtio;
pub mod vsock;
