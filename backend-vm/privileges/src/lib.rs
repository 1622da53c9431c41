//! What a process or a thread gives up before it reads what a stranger wrote: capabilities, the file system, and the
//! system calls that it does not need.
//!
//! - [`drop_capabilities`] is for a thread and the threads that it starts.
//! - [`leave_file_system`] is too (Landlock), where the kernel has it.
//! - [`Calls`] lists system calls. [`Calls::compile`] makes a [`Filter`] of the list, for a thread or for all threads.
//! - [`report_denied_calls`] names the call and the thread when a [`Filter`] ends the process.
//!
//! All of it is for good. None of it grants anything: a thread that gave up more before keeps less.

#[cfg(feature = "attempts")]
pub mod attempts;
mod calls;
mod capabilities;
mod denied;
mod files;

pub use self::calls::{Calls, Denial, Filter, FilterError, all_equal, at_most, equals, masked};
pub use self::capabilities::drop_capabilities;
pub use self::denied::{DENIED, report_denied_calls};
pub use self::files::{FilesError, leave_file_system};
