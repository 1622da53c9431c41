//! Shows a folder of the host to one guest, read-only or to be changed: the server behind the guest's virtiofs.
//!
//! - [`server`] answers FUSE messages, [`abi`] declares them.
//! - [`tree`] reaches the host's files.
//! - [`packets`] carries messages between the server and Wormhole's monitor, which serves the guest's queues.
//! - [`vhost_user`] serves the queues of another monitor's guest, as of QEMU, which is the first of two hops where the
//!   guest runs on the emulated host.
//! - [`confinement`] drops what the process does not need.
//!
//! Invariants: a request of any bytes is answered or dropped, without a panic. No request leads out of the exported
//! folder, changes a file unless the guest may, or makes the process hold more than a bounded number of nodes and
//! descriptors.

pub mod abi;
pub mod confinement;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod packets;
pub mod server;
pub mod tree;
pub mod vhost_user;
