//! Tests of the server and of its process.

mod changes;
mod driver;
mod mounts;
mod moved;
mod process;
mod protocol;
mod vhost_user;
