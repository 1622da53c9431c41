//! Tests of the staged `wormhole`, run as a user runs it: at `process` placement, in guest VMs, on a GPU, with each
//! party killed in the middle of a run, and in cases that it must refuse.

mod backend_vm;
mod backends;
mod bad_configurations;
mod bad_input;
mod config;
mod documents;
mod emulated;
mod execution;
mod gpu;
mod guest;
mod guest_backends;
mod guest_console;
mod guest_disk;
mod guest_identity;
mod guest_image;
mod guest_kill;
mod guest_network;
mod guest_snapshot;
mod guest_terminal;
mod harness;
mod hung_mounts;
mod kill;
mod libvirt;
mod limits;
mod process;
mod qemu;
mod refusals;
mod signals;
mod waiters;
