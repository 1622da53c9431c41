//! Tests of the server and of its process.

mod driver;
mod mounts;
mod moved;
mod process;
mod protocol;
mod vhost_user;
