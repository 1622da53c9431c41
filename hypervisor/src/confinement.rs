//! Confinement of this process before any of its threads reads bytes that a guest writes.

use std::io;

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
