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
