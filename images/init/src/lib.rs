//! Defines the formats of the first process of a Wormhole image, its input and its report, and executes programs.
//!
//! Also prepares the window, for guests with another first process.
//!
//! `wormhole-init` is PID 1 of guests and of the emulated host. The builder of the overlay writes a
//! [`RunFile`] into it; the process runs the program in it and ends with a [`Report`]. Both formats
//! cross a machine's boundary, so both parsers accept any bytes and never panic.

pub mod collect;
pub mod exec;
mod ext4;
mod mount;
pub mod network;
pub mod report;
pub mod run_file;
pub mod shared_files;
pub mod user;
pub mod window;

pub use collect::{Absence, COLLECT_BYTES, COLLECT_DEPTH, COLLECT_FILES, Collected};
pub use exec::{Execution, InterpreterFault, NotExecuted};
pub use mount::mount_one;
pub use network::Network;
pub use report::{Ending, MAX_FILES, Report};
pub use run_file::{RunFile, Sink, TerminalSize, Volume};
pub use user::User;

/// Path of the run file in an image.
pub const RUN_FILE: &str = "/etc/wormhole/run";

/// Path of the list of kernel modules in an image. Each line has a module's path and parameters, in load
/// order.
pub const MODULE_LIST: &str = "/etc/wormhole/modules";

/// Folder of Wormhole's parts in an image.
pub const PARTS: &str = "/usr/lib/wormhole";

/// Folder of the same parts in a guest with the host's files. It lies on a file system of the guest's own, so that no
/// file of the host is in its place.
pub const PARTS_BESIDE_FILES: &str = "/run/wormhole";

/// Tag of the virtio file system with the host's files.
pub const FILES_TAG: &str = "host";

/// Number in a stream of signals that announces the terminal's size (SIGWINCH): a
/// [`TerminalSize`](run_file::TerminalSize) follows.
pub const RESIZE: u8 = 28;

/// Returns the tag of the virtio file system of a volume.
#[must_use]
pub fn volume_tag(number: usize) -> String {
    format!("volume-{number}")
}

/// Exit statuses of failures before the program runs.
pub mod status {
    /// The window is missing or unusable, for example because the kernel uses it as system RAM.
    pub const WINDOW: u8 = 123;
    /// The machine could not be set up, or the program's end could not be awaited.
    pub const SETUP: u8 = 125;
    /// The program exists but cannot be executed.
    pub const NOT_EXECUTABLE: u8 = 126;
    /// The program, or its interpreter or loader, does not exist.
    pub const NOT_FOUND: u8 = 127;
}
