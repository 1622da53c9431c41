//! Needs of workers that execute PTX on processors.

use wormhole_privileges::equals;

use super::{Found, Needs};
use crate::seccomp::MEMORY_FILE;

pub(super) const NEEDS: Needs = Needs {
    // Device memory lies in memfds.
    calls: |calls| Ok(calls.and_where(libc::SYS_memfd_create, vec![equals(1, MEMORY_FILE)?])),
    // A read of these files allocates as many bytes as it asks for, up to 4 MiB, which no cgroup counts.
    root: |root, _, _| root.hidden("/proc/sys"),
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
