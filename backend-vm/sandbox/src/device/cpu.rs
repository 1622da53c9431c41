//! Needs of workers that execute PTX on processors.

use std::path::Path;

use wormhole_privileges::{Calls, FilterError, equals, masked};

use super::{Found, Needs};
use crate::seccomp::MEMORY_FILE;

pub(super) const NEEDS: Needs = Needs {
    calls,
    // It has no others of `/proc`. A read of one that describes the process's memory can take a second for each thread, also
    // after the process was killed, and the slot of a backend VM waits for its end.
    root: |root, _, _| {
        for file in ["/proc/cpuinfo", "/proc/meminfo"] {
            root.file(Path::new(file), false);
        }
    },
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

/// Adds the system calls of the device, whose memory lies in memfds.
fn calls(calls: Calls) -> Result<Calls, FilterError> {
    let few = masked(2, !(READ - 1), 0)?;
    Ok(calls
        .and_where(libc::SYS_memfd_create, vec![equals(1, MEMORY_FILE)?])
        .and_where(libc::SYS_read, vec![few.clone()])
        .and_where(libc::SYS_pread64, vec![few]))
}
