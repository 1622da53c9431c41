//! Shared parts of the guest libraries: connecting to the backend, and logging.

mod address;
pub mod log;

pub use address::{ConnectError, connect, uninterrupted};
