//! What the first process of a Wormhole image is told and what it reports.
//!
//! `wormhole-init` is PID 1 of guests and of the emulated host. The side that builds the image writes a
//! [`RunFile`] into it; the process runs the program named there and ends with a [`Report`]. Both formats
//! are read from the other side of a machine's boundary, so both readers take any bytes and never panic.

pub mod exec;
pub mod report;
pub mod run_file;

pub use exec::{Execution, NotExecuted};
pub use report::{Ending, MAX_FILES, Report};
pub use run_file::{RunFile, Sink};

/// Where the run file lies in an image.
pub const RUN_FILE: &str = "/etc/wormhole/run";

/// Where the list of kernel modules lies in an image: a path and its parameters on each line, in the
/// order in which they are to be loaded.
pub const MODULE_LIST: &str = "/etc/wormhole/modules";

/// Exit statuses that are not the program's own.
pub mod status {
    /// The window is not there, or the kernel uses it as ordinary memory.
    pub const WINDOW: u8 = 123;
    /// The image could not be set up.
    pub const SETUP: u8 = 125;
    /// The program is there but cannot be executed.
    pub const NOT_EXECUTABLE: u8 = 126;
    /// The program, or the loader that it names, is not there.
    pub const NOT_FOUND: u8 = 127;
}
