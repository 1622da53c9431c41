//! Confinement of this process before any of its threads reads bytes that a guest writes.

use std::io;
use std::thread::JoinHandle;

use wormhole_link::tasks;
use wormhole_privileges::{
    FilesError, Filter, FilterError, drop_capabilities, leave_file_system, report_denied_calls,
};

/// Reason why the process cannot be confined.
#[derive(Debug, thiserror::Error)]
pub enum ConfinementError {
    #[error(transparent)]
    Filter(#[from] FilterError),
    #[error(transparent)]
    Files(#[from] FilesError),
    #[error("capabilities cannot be dropped")]
    Capabilities(#[source] io::Error),
    #[error("denied system calls cannot be reported")]
    Report(#[source] io::Error),
}

/// Starts a thread before this process confines itself, without capabilities: [`enter`] takes them from one thread. A thread
/// that keeps them does nothing.
///
/// # Errors
/// The thread cannot be made.
pub fn spawn<T: Default + Send + 'static>(
    name: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    tasks::spawn(name, move || match drop_capabilities() {
        Ok(()) => body(),
        Err(_) => T::default(),
    })
}

/// Restricts all threads of this process to the calls of the filter, and removes capabilities and the file system from
/// this thread and those that it starts.
///
/// # Errors
/// The kernel does not support filters.
pub fn enter(filter: &Filter) -> Result<(), ConfinementError> {
    report_denied_calls().map_err(ConfinementError::Report)?;
    drop_capabilities().map_err(ConfinementError::Capabilities)?;
    leave_file_system()?;
    Ok(filter.install_on_all_threads()?)
}
