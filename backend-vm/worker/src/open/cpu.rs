//! Opens devices that execute PTX on processors.

use std::sync::Arc;
use std::time::Duration;

use rustix::process::{DumpableBehavior, Resource, set_dumpable_behavior};
use wormhole_cpu_device::{CpuDevice, Options};
use wormhole_device::Device;
use wormhole_link::device::CpuChoice;

use super::{Opened, Tuning};
use crate::{chains, lanes};

/// System calls with a path, also with `AT_EMPTY_PATH`, which permits an empty path and demands none; and `uname`, which takes a
/// lock of the whole kernel. A worker has no files of the host to map: the kernel reclaims pages of a file that is mapped often
/// so slowly that others wait for it.
const GIVEN_UP: &[i64] = &[
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_access,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_readlink,
    libc::SYS_readlinkat,
    libc::SYS_getcwd,
    libc::SYS_uname,
];

/// Gives up dumps of the process's memory, which some settings of the kernel send to a service of the host. Returns the system
/// calls to be denied.
pub(super) fn give_up() -> &'static [i64] {
    if let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        tracing::warn!("the kernel may dump the worker's memory: {error}");
    }
    GIVEN_UP
}

pub(super) fn open(choice: &CpuChoice) -> Result<Opened, String> {
    let options = Options {
        check: choice.check,
        most: device_memory(),
        ..Options::default()
    };
    let devices = CpuDevice::open_several(&options, choice.count)
        .map_err(|error| wormhole_link::chain(&error))?;
    Ok(Opened {
        devices: devices
            .into_iter()
            .map(|device| Arc::new(device) as Arc<dyn Device>)
            .collect(),
        tuning: Tuning {
            // The devices need the processors themselves.
            linger: Duration::ZERO,
            lanes: lanes::Plan::affordable(),
            chains: chains::Plan::wanted(chains::Plan::Always),
        },
    })
}

/// Returns the bytes that devices in this process's memory may use, if the supervisor has set
/// `RLIMIT_DATA`: two thirds of the limit. By default the limit is three quarters of the system's
/// memory, so this is half of it. The rest is for the window and the worker itself.
fn device_memory() -> Option<u64> {
    let limit = rustix::process::getrlimit(Resource::Data).current?;
    Some(limit / 3 * 2)
}
