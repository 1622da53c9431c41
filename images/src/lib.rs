//! Builds images of guests and of the emulated host, and runs the emulated host.
//!
//! An [`Image`] is a kernel and its modules from Debian's packages. It is built once, without root, and stored
//! in a folder. The parts that change between runs are in an overlay, a second cpio archive after the first:
//! the first process (`wormhole-init`), the program with its libraries, the CUDA driver library, and the run
//! file. An image therefore stays valid when Wormhole itself changes.
//!
//! A disk image, by contrast, is a whole Debian system, which boots with a first process of its own.
//!
//! Building needs no privileges, except for disks. An image's folder is never incomplete: it is built under a temporary name and
//! renamed.

mod cpio;
mod debian;
mod disk;
mod driver;
mod emulated_host;
mod error;
mod guest_package;
mod image;
mod kernel;
mod libraries;
mod modules;
mod oci;
mod overlay;
mod sums;
mod window_as_ram;

pub use debian::fetch_package;
pub use disk::{
    DISK_COMMAND_LINE, DebianDisk, DebianOptions, NotAPackage, PackageName, Suite, build_base,
    build_disk,
};
#[cfg(feature = "fuzzing")]
pub use driver::fuzzing;
pub use driver::{Driver, DriverError, DriverSource};
pub use emulated_host::{
    DiskFile, EmulatedHost, MachineNetwork, MachineSignals, NetworkEnd, NvmeDisk, SocketServer,
};
pub use error::ImageError;
pub use guest_package::{GuestParts, PACKAGE};
pub use image::{
    BuildOptions, COMMAND_LINE, Image, Listed, ListedDriver, build_backend, build_backend_with,
    build_emulated_host, build_guest, default_folder,
};
pub use kernel::{Kernel, UnknownKernel};
pub use oci::{ImageProgram, OciError, is_layout, remove_unpacked, unpack};
pub use overlay::{
    BackendRun, ConsoleRun, EXIT_PORT, GuestRun, HOST_FILES, HostRun, HostScript, backend_overlay,
    console_overlay, guest_overlay, host_overlay, is_emulation_failure, ports, script_host,
    script_overlay, volume_place,
};
pub use sums::Damage;
pub use window_as_ram::{TAKEN, build_guest_that_takes_its_window};
pub use wormhole_init::{
    Absence, COLLECT_BYTES, COLLECT_DEPTH, COLLECT_FILES, Collected, Ending, Execution, FILES_TAG,
    InterpreterFault, Network, NotExecuted, RESIZE, Report, TerminalSize, User, Volume, status,
    volume_tag,
};
