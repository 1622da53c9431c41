//! The staged `wormhole`, run as a user runs it: at `process` placement, in guest VMs, on a GPU, and
//! with every party killed in the middle of a run.

mod gpu;
mod guest;
mod guest_kill;
mod harness;
mod kill;
mod process;
