//! Tests of the staged `wormhole`, run as a user runs it: at `process` placement, in guest VMs, on a GPU, with each
//! party killed in the middle of a run, and in cases that it must refuse.
//!
//! Tests of VMs are in modules whose names begin with `guest`: they are executed next to each other, two at a time, since
//! tests start in the order of their names. Between tests that need the machine alone, each of them would be alone as well.

mod backends;
mod bad_configurations;
mod bad_input;
mod config;
mod delegated;
mod documents;
mod emulated;
mod execution;
mod gpu;
mod guest;
mod guest_backend_driver;
mod guest_backend_vm;
mod guest_backends;
mod guest_console;
mod guest_disk;
mod guest_documents;
mod guest_ends;
mod guest_identity;
mod guest_image;
mod guest_kill;
mod guest_network;
mod guest_of_libvirt;
mod guest_of_qemu;
mod guest_passthrough;
mod guest_snapshot;
mod guest_terminal;
mod harness;
mod hung_mounts;
mod kill;
mod limits;
mod port;
mod process;
mod refusals;
mod signals;
mod transports;
mod waiters;
