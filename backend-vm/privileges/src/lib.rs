//! Drops privileges of a process or a thread before it reads untrusted input: capabilities, the file system, and the
//! system calls that it does not need.
//!
//! - [`drop_capabilities`] and [`keep_capabilities`] apply to a thread and the threads that it starts.
//! - [`leave_file_system`], [`only_read_below`] and [`only_change_below`] apply to the same threads, by Landlock, if the
//!   kernel has it.
//! - [`leave_namespaces`] takes the network from the same threads.
//! - [`Calls`] lists system calls. [`Calls::compile`] compiles the list to a seccomp [`Filter`], for a thread or for
//!   all threads.
//! - [`report_denied_calls`] prints the call and the thread when a [`Filter`] ends the process.
//!
//! All of it is irreversible. None of it grants a privilege that a thread has dropped before.

#[cfg(feature = "attempts")]
pub mod attempts;
mod calls;
mod capabilities;
mod denied;
mod files;
mod namespaces;

pub use self::calls::{
    Calls, Denial, Filter, FilterError, all_equal, all_masked, at_most, equals, equals_one_of,
    masked, within,
};
pub use self::capabilities::{READ_ANY_FILE, drop_capabilities, keep_capabilities};
pub use self::denied::{DENIED, report_denied_calls};
pub use self::files::{FilesError, leave_file_system, only_change_below, only_read_below};
pub use self::namespaces::leave_namespaces;
