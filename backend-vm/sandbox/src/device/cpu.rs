//! Needs of workers that execute PTX on processors.

use wormhole_privileges::equals;

use super::{Found, Needs};
use crate::seccomp::MEMORY_FILE;

pub(super) const NEEDS: Needs = Needs {
    // Device memory lies in memfds.
    calls: |calls| Ok(calls.and_where(libc::SYS_memfd_create, vec![equals(1, MEMORY_FILE)?])),
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
