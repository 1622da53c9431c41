//! Needs of workers that execute PTX on processors.

use rustix::thread::{CpuSet, sched_getaffinity};
use wormhole_device::STREAM_THREADS;
use wormhole_link::device::DeviceChoice;
use wormhole_privileges::{Calls, FilterError, all_masked, equals, masked};
use wormhole_ring::layout::SLOTS;

use super::{Found, Needs};
use crate::seccomp::{DISCARDS, MEMORY_FILE};

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
    threads,
    limits_memory: true,
    identifies_processes: false,
    has_figures: false,
};

/// Bytes that one read copies. A longer one goes on after the process was killed.
const READ: u64 = 1 << 24;

/// Bytes of address space that one call discards. The allocator discards parts of its heaps, of 64 MiB, and of stacks. The
/// kernel looks through page tables without pages in a longer range, also after the process was killed.
const DISCARDED: u64 = 1 << 30;

/// Flags of `open` that make a file, for which the kernel takes the folder's lock even where none can be made. Once its program
/// has started, the worker opens no file at all.
const MAKES: i32 = libc::O_CREAT | (libc::O_TMPFILE & !libc::O_DIRECTORY);

/// Threads of a worker beside those that are counted: its main thread, its executor with eight lanes, watcher, registrar and that
/// of unloads, and room.
const REST: usize = 24;

/// Returns the threads of a worker: one for each answer slot; those of each device's streams, with the one that watches
/// conditions; the helpers of kernels, one for each processor, and as many that have ended and that the kernel still counts.
fn threads(device: &DeviceChoice) -> u64 {
    let devices = match device {
        DeviceChoice::Cpu(choice) => usize::from(choice.count),
        DeviceChoice::Cuda(_) => 0,
    };
    let (processors, streams) = (processors(), (STREAM_THREADS + 1) * devices);
    (SLOTS + streams + 2 * processors + REST) as u64
}

/// Returns the number of processors that this process, and so a worker, may use. The call fails where there are more than a
/// set has.
fn processors() -> usize {
    sched_getaffinity(None).map_or(CpuSet::MAX_CPU, |set| set.count() as usize)
}

/// Adds the system calls of the device, whose memory lies in memfds.
fn calls(calls: Calls) -> Result<Calls, FilterError> {
    let few = masked(2, !(READ - 1), 0)?;
    let advice = u64::from(u32::MAX);
    let discards = all_masked(&[(1, !(DISCARDED - 1), 0), (2, advice, DISCARDS)])?;
    let makes = u64::from(MAKES.unsigned_abs());
    Ok(calls
        .and_where(libc::SYS_memfd_create, vec![equals(1, MEMORY_FILE)?])
        .and_where(libc::SYS_open, vec![masked(1, makes, 0)?])
        .and_where(libc::SYS_openat, vec![masked(2, makes, 0)?])
        .and_where(libc::SYS_madvise, vec![discards])
        .and_where(libc::SYS_read, vec![few.clone()])
        .and_where(libc::SYS_pread64, vec![few]))
}
