//! What the libraries of a guest have in common: how they find the backend, and where they say what is wrong.

mod address;
pub mod log;

pub use address::{ConnectError, connect, uninterrupted};
