//! Images of guests and of the emulated host.
//!
//! An [`Image`] is a kernel and its modules from Debian's packages; it is built once, without root, and kept
//! in a folder. What changes from run to run travels in an overlay, a second cpio archive behind the first:
//! the first process (`wormhole-init`), the program with its libraries, the CUDA driver library, and the run
//! file. So an image stays valid when Wormhole itself changes.
//!
//! Nothing here needs privileges, and nothing is left half done: files and folders are made under another
//! name and renamed.

mod cpio;
mod debian;
mod emulated_host;
mod error;
mod image;
mod kernel;
mod libraries;
mod modules;
mod overlay;
mod sums;
mod taken;

pub use debian::fetch_package;
pub use emulated_host::{DiskFile, EmulatedHost};
pub use error::ImageError;
pub use image::{
    BuildOptions, COMMAND_LINE, Image, build_emulated_host, build_guest, default_folder,
};
pub use kernel::{Kernel, UnknownKernel};
pub use overlay::{EXIT_PORT, GuestRun, HostRun, guest_overlay, host_overlay, ports};
pub use sums::Damage;
pub use taken::{TAKEN, build_guest_that_takes_its_window};
pub use wormhole_init::{Ending, Execution, NotExecuted, Report, status};
