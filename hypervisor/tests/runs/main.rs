//! Tests of the staged `wormhole`, run as a user runs it: at `process` placement, in guest VMs, on a GPU, with each
//! party killed in the middle of a run, and in cases that it must refuse.

mod backends;
mod bad_configurations;
mod bad_input;
mod config;
mod documents;
mod execution;
mod gpu;
mod guest;
mod guest_backends;
mod guest_kill;
mod guest_network;
mod harness;
mod hung_mounts;
mod kill;
mod limits;
mod process;
mod refusals;
mod signals;
mod waiters;
