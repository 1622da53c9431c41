//! Needs of workers that execute PTX on processors.

use wormhole_privileges::{Calls, FilterError, equals, masked};

use super::{Found, Needs};
use crate::seccomp::MEMORY_FILE;

pub(super) const NEEDS: Needs = Needs {
    calls,
    // No `/proc`: a read about the process's memory can take a second for each thread, also after the process was killed, and
    // the slot of a backend VM waits for its end.
    root: |_, _, _| {},
    find: |device| {
        Ok(Found {
            device: device.clone(),
            files: Vec::new(),
            environment: Vec::new(),
        })
    },
    limits_memory: true,
    identifies_processes: false,
    has_figures: false,
};

/// Bytes that one read copies. A longer one goes on after the process was killed.
const READ: u64 = 1 << 24;

/// Flags of `open` that make a file. Even where none can be made, the kernel takes the folder's lock for them, for which all
/// wait who look a name up there.
const MAKES: i32 = libc::O_CREAT | (libc::O_TMPFILE & !libc::O_DIRECTORY);

/// Adds the system calls of the device, whose memory lies in memfds.
fn calls(calls: Calls) -> Result<Calls, FilterError> {
    let few = masked(2, !(READ - 1), 0)?;
    let makes = u64::from(MAKES.unsigned_abs());
    Ok(calls
        .and_where(libc::SYS_memfd_create, vec![equals(1, MEMORY_FILE)?])
        .and_where(libc::SYS_open, vec![masked(1, makes, 0)?])
        .and_where(libc::SYS_openat, vec![masked(2, makes, 0)?])
        .and_where(libc::SYS_read, vec![few.clone()])
        .and_where(libc::SYS_pread64, vec![few]))
}
