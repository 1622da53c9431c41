//! Shared parts of what runs in a guest: connecting to the backend, asking it for facts, and logging.

mod address;
pub mod environment;
pub mod log;
mod observer;

pub use address::{ConnectError, connect, connect_vsock, uninterrupted};
pub use observer::{Answer, Observer, ObserverError};

/// Window of a VM whose programs are not told another one: a link to its DAX device, made by a udev rule of the Debian
/// package `wormhole-guest`.
pub const WINDOW: &str = "/dev/wormhole-window";

/// Socket of the agent that passes control streams through a virtio-serial port. Programs prefer it to vsock, which
/// a guest may have as well.
pub const AGENT: &str = "/run/wormhole-control";

/// Device of vsock. Its driver's module makes it also where there is no host to connect to.
pub const VSOCK: &str = "/dev/vsock";
