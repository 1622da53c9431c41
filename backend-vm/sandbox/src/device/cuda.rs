//! Needs of workers on devices of the NVIDIA driver.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use wormhole_link::device::{CudaChoice, DeviceChoice};
use wormhole_privileges::{Calls, FilterError, all_equal, equals, equals_one_of, masked, within};

use super::gpus::{GpuError, Gpus};
use super::{Found, Needs};
use crate::root::Steps;
use crate::seccomp::{DISCARDS, MEMORY_FILE, with_clock};

pub(super) const NEEDS: Needs = Needs {
    calls,
    root,
    find,
    threads: |_| THREADS,
    limits_memory: false,
    identifies_processes: true,
    has_figures: true,
};

/// Threads of a worker: one for each answer slot, a dozen of the worker's own and a few of the driver's for each context, and
/// those that compile.
const THREADS: u64 = 1024;

/// System calls of the driver beside those of every worker.
const DRIVER: &[i64] = &[
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_pread64,
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_getdents64,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_pwrite64,
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_munlock,
    libc::SYS_mincore,
    libc::SYS_msync,
    libc::SYS_get_mempolicy,
    libc::SYS_membarrier,
    libc::SYS_sched_getparam,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_get_priority_max,
    libc::SYS_sched_get_priority_min,
    libc::SYS_getpriority,
    libc::SYS_pipe,
    libc::SYS_eventfd,
    libc::SYS_epoll_create,
    libc::SYS_getdents,
    libc::SYS_mkdir,
    libc::SYS_mkdirat,
    libc::SYS_rename,
    libc::SYS_unlink,
    libc::SYS_unlinkat,
    libc::SYS_rmdir,
    libc::SYS_chmod,
    libc::SYS_fchmod,
    libc::SYS_umask,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_statfs,
    libc::SYS_times,
    libc::SYS_timer_settime,
    libc::SYS_timer_delete,
    // `cuInit` names an abstract socket after its process, in the worker's own network namespace.
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_connect,
];

/// Requests of the NVIDIA modules: those of the resource manager have this type (`NV_IOCTL_MAGIC`), those of the unified
/// memory module are small numbers but for the first and the last of a file (`UVM_INITIALIZE`, `UVM_DEINITIALIZE`; open
/// kernel modules, `nv-ioctl-numbers.h`, `uvm_linux_ioctl.h`, `uvm_ioctl.h`).
const NVIDIA_TYPE: u64 = (b'F' as u64) << 8;
const TYPE_BITS: u64 = 0xFF00;
const UVM_BITS: u64 = 0xFFFF_FF00;
/// Requests that are allowed by number: `UVM_INITIALIZE`, `UVM_DEINITIALIZE`, and those of the C library.
const IOCTLS: &[u64] = &[
    0x3000_0001,
    0x3000_0002,
    libc::FIONBIO,
    libc::FIOCLEX,
    libc::FIONREAD,
    libc::TCGETS,
];

/// Limits that may be lowered: by the worker that of files, in which it captures what the driver prints, others by the driver.
/// With a lower one of core dumps the kernel would start a program.
const LIMITS: [libc::__rlimit_resource_t; 6] = [
    libc::RLIMIT_FSIZE,
    libc::RLIMIT_NOFILE,
    libc::RLIMIT_STACK,
    libc::RLIMIT_MEMLOCK,
    libc::RLIMIT_DATA,
    libc::RLIMIT_AS,
];

/// Options of `setsockopt`. Filters of packets are left out: their programs use up what the host allows for all system
/// call filters (`net.core.bpf_jit_limit`).
const SOCKET_OPTIONS: &[i32] = &[
    libc::SO_REUSEADDR,
    libc::SO_SNDBUF,
    libc::SO_RCVBUF,
    libc::SO_PASSCRED,
    libc::SO_RCVTIMEO,
    libc::SO_SNDTIMEO,
];

/// Folder of links to all PCI devices. The worker's root holds the folders of NVIDIA's devices only.
const PCI: &str = "/sys/bus/pci";
/// Vendor of NVIDIA's PCI devices.
const NVIDIA: &str = "0x10de";
/// Files about processors and memory that the driver reads (strace, driver 580). The root has no others of these
/// folders. Many of the others show the host's load: frequencies, idle states, temperatures, statistics of nodes.
const SYSTEM: [&str; 4] = [
    "/sys/devices/system/cpu/online",
    "/sys/devices/system/cpu/possible",
    "/sys/devices/system/cpu/present",
    "/sys/devices/system/memory/block_size_bytes",
];
const NODES: &str = "/sys/devices/system/node";
const OF_NODE: [&str; 3] = ["cpulist", "cpumap", "distance"];
const MODULES: &str = "/sys/module";

/// Adds the system calls of the driver.
fn calls(calls: Calls) -> Result<Calls, FilterError> {
    // The driver locks the index of its cache of compiled PTX, and caches nothing if F_SETLK fails. The filter answers
    // 0 and sets no lock: no other process has this index.
    let lock = equals(1, libc::F_SETLK.unsigned_abs().into())?;
    let nvidia = vec![masked(1, TYPE_BITS, NVIDIA_TYPE)?, masked(1, UVM_BITS, 0)?];
    let unix = equals(0, libc::AF_UNIX.unsigned_abs().into())?;
    let mut calls = with_clock(calls.and(DRIVER), libc::SYS_timer_create)?
        .and_where(libc::SYS_memfd_create, vec![within(1, MEMORY_FILE)?])
        .idle_where(libc::SYS_fcntl, vec![lock])
        // Policies of a shared file stay in memory of the kernel that no cgroup counts. With one node for all its memory a
        // worker has the kernel kill others when that node is full.
        .idle_where(libc::SYS_mbind, Vec::new())
        .idle_where(libc::SYS_set_mempolicy, Vec::new())
        // A thread that runs only while no other does could stand with a lock of the kernel for as long as others run.
        .idle_where(libc::SYS_sched_setscheduler, Vec::new())
        .idle_where(libc::SYS_sched_setaffinity, Vec::new())
        .and_where(libc::SYS_madvise, vec![equals(2, DISCARDS)?])
        .and_where(libc::SYS_ioctl, nvidia)
        .and_where(libc::SYS_socket, vec![unix]);
    let limits = LIMITS.map(u64::from);
    calls = calls.and_where(libc::SYS_prlimit64, equals_one_of(1, limits)?);
    for call in [libc::SYS_select, libc::SYS_pselect6] {
        calls = calls.and_waits(call, 0)?;
    }
    let level = libc::SOL_SOCKET.unsigned_abs().into();
    for option in SOCKET_OPTIONS {
        let option = all_equal(&[(1, level), (2, option.unsigned_abs().into())])?;
        calls = calls.and_where(libc::SYS_setsockopt, vec![option]);
    }
    for &request in IOCTLS {
        calls = calls.and_where(libc::SYS_ioctl, vec![equals(1, request)?]);
    }
    Ok(calls)
}

/// Adds the driver's device files, its modules' parts of `/sys`, and its libraries.
fn root(root: &mut Steps, files: &[PathBuf], libraries: &[PathBuf]) {
    root.processes();
    for file in files {
        root.file(file, true);
    }
    // The driver makes a file of its process here before it shares memory with other processes.
    root.temporary("/dev/shm");
    root.part(Path::new(PCI));
    for file in SYSTEM.map(PathBuf::from).into_iter().chain(node_files()) {
        root.parents(&file);
        root.file(&file, false);
    }
    for part in nvidia_modules().into_iter().chain(nvidia_devices()) {
        root.part(&part);
    }
    for directory in libraries {
        root.tree(directory);
    }
}

/// Lists the folders of the driver's modules in `/sys/module`.
fn nvidia_modules() -> Vec<PathBuf> {
    let Ok(modules) = std::fs::read_dir(MODULES) else {
        return Vec::new();
    };
    modules
        .flatten()
        .filter(|module| module.file_name().as_bytes().starts_with(b"nvidia"))
        .map(|module| module.path())
        .collect()
}

/// Lists the folders of NVIDIA's PCI devices.
fn nvidia_devices() -> Vec<PathBuf> {
    let Ok(devices) = std::fs::read_dir(Path::new(PCI).join("devices")) else {
        return Vec::new();
    };
    let is_nvidia = |device: &PathBuf| {
        std::fs::read_to_string(device.join("vendor")).is_ok_and(|text| text.trim() == NVIDIA)
    };
    devices
        .flatten()
        .map(|device| device.path())
        .filter(is_nvidia)
        .filter_map(|device| device.canonicalize().ok())
        .collect()
}

/// Lists the files that assign processors to memory nodes.
fn node_files() -> Vec<PathBuf> {
    let Ok(nodes) = std::fs::read_dir(NODES) else {
        return Vec::new();
    };
    nodes
        .flatten()
        .map(|node| node.path())
        .filter(|node| node.is_dir())
        .flat_map(|node| OF_NODE.map(|name| node.join(name)))
        .collect()
}

/// Finds the chosen GPUs. Returns no files on a system without a driver: the worker then reports that the driver is
/// missing.
fn find(device: &DeviceChoice) -> Result<Found, GpuError> {
    let gpus = if let DeviceChoice::Cuda(choice) = device {
        Gpus::find(&choice.0)?
    } else {
        None
    };
    Ok(match gpus {
        Some(gpus) => Found {
            device: DeviceChoice::Cuda(CudaChoice(gpus.ordinals())),
            files: gpus.files(),
            environment: gpus.environment(),
        },
        None => Found {
            device: device.clone(),
            files: Vec::new(),
            environment: Vec::new(),
        },
    })
}
