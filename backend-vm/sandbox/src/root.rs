//! Plans the root file system of a worker, as a list of steps that the child carries out without allocating.

use std::ffi::{CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use wormhole_link::device::DeviceKind;

use crate::device::needs;

/// Mount point of the new root while it is assembled. Every system has this directory, and no step binds from it.
pub(super) const STAGE: &str = "/proc";
/// Path of the worker's executable in the new root.
pub(super) const PROGRAM: &str = "/worker";

/// Step that assembles the root. Paths are C strings that begin with `STAGE`, but for sources and targets.
#[derive(Debug)]
pub(super) enum Step {
    Directory(CString),
    /// Makes an empty file as a mount point.
    File(CString),
    Link {
        target: CString,
        at: CString,
    },
    /// Binds `source`, read-only unless `writable`. A failed mount is an error unless `optional`.
    Bind {
        source: CString,
        at: CString,
        optional: bool,
        writable: bool,
        /// Binds the mounts below `source` too (MS_REC).
        recursive: bool,
    },
    Temporary(CString),
    Proc(CString),
    /// Covers a file, if it exists, by an empty one.
    Mask(CString),
    /// Covers a folder, if it exists, by an empty one.
    MaskFolder(CString),
}

/// Files of `/proc` that reveal keys, timers, and the use of processors and memory, and so the work of others.
const MASKED: [&str; 31] = [
    "/proc/buddyinfo",
    "/proc/cgroups",
    "/proc/diskstats",
    "/proc/interrupts",
    "/proc/kallsyms",
    "/proc/key-users",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/loadavg",
    "/proc/locks",
    "/proc/mdstat",
    // The use counts of `kvm` and `nvidia`.
    "/proc/modules",
    "/proc/pagetypeinfo",
    "/proc/partitions",
    "/proc/sched_debug",
    "/proc/schedstat",
    "/proc/slabinfo",
    "/proc/softirqs",
    "/proc/stat",
    "/proc/swaps",
    "/proc/sys/fs/aio-nr",
    "/proc/sys/fs/dentry-state",
    "/proc/sys/fs/file-nr",
    "/proc/sys/fs/inode-nr",
    "/proc/sys/fs/inode-state",
    "/proc/sys/kernel/pty/nr",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/uptime",
    "/proc/vmstat",
    "/proc/zoneinfo",
];

/// Folders of `/proc` that are masked for the same reason as [`MASKED`].
const MASKED_FOLDERS: [&str; 4] = [
    // The transfers of all processes between files and GPUs.
    "/proc/driver/nvidia-fs",
    "/proc/fs",
    "/proc/irq",
    "/proc/pressure",
];

/// Returns the steps for a worker on a kind of device. The worker may open `device_files`. `library_directories` are
/// directories of shared libraries beside the system's.
pub(super) fn steps(
    kind: DeviceKind,
    program: &Path,
    device_files: &[PathBuf],
    library_directories: &[PathBuf],
) -> Vec<Step> {
    let mut steps = Steps(Vec::new());
    for directory in ["/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin"] {
        steps.system(Path::new(directory));
    }
    steps.directory("/etc");
    for file in ["/etc/ld.so.cache", "/etc/localtime"] {
        steps.file(Path::new(file), false);
    }
    steps.directory("/dev");
    for device in ["/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"] {
        steps.file(Path::new(device), true);
    }
    steps.directory("/proc");
    steps.temporary("/tmp");
    (needs(kind).root)(&mut steps, device_files, library_directories);
    steps.0.push(Step::File(staged(Path::new(PROGRAM))));
    steps.0.push(Step::Bind {
        source: c_string(program.as_os_str()),
        at: staged(Path::new(PROGRAM)),
        optional: false,
        writable: false,
        recursive: false,
    });
    steps.directory("/old");
    steps.0
}

/// Steps that are being collected.
pub(super) struct Steps(Vec<Step>);

impl Steps {
    pub(super) fn directory(&mut self, path: &str) {
        self.0.push(Step::Directory(staged(Path::new(path))));
    }

    /// Mounts `/proc` for the worker's own user, without what is masked.
    pub(super) fn processes(&mut self) {
        self.0.push(Step::Proc(staged(Path::new("/proc"))));
        let masks = MASKED.map(|file| Step::Mask(staged(Path::new(file))));
        self.0.extend(masks);
        let masks = MASKED_FOLDERS.map(|folder| Step::MaskFolder(staged(Path::new(folder))));
        self.0.extend(masks);
    }

    /// Mounts a tmpfs that the worker may write to.
    pub(super) fn temporary(&mut self, path: &str) {
        self.directory(path);
        self.0.push(Step::Temporary(staged(Path::new(path))));
    }

    /// Adds a top-level directory of the system, which may be a link (`/lib` → `usr/lib`).
    fn system(&mut self, path: &Path) {
        let Ok(metadata) = path.symlink_metadata() else {
            return;
        };
        if metadata.is_symlink() {
            if let Ok(target) = std::fs::read_link(path) {
                self.0.push(Step::Link {
                    target: c_string(target.as_os_str()),
                    at: staged(path),
                });
            }
        } else if metadata.is_dir() {
            self.tree(path);
        }
    }

    pub(super) fn tree(&mut self, path: &Path) {
        self.view(path, true);
    }

    /// Adds a directory without the mounts below it.
    pub(super) fn part(&mut self, path: &Path) {
        self.view(path, false);
    }

    fn view(&mut self, path: &Path, recursive: bool) {
        if !path.is_absolute() || !path.is_dir() {
            return;
        }
        self.parents(path);
        self.0.push(Step::Directory(staged(path)));
        self.0.push(Step::Bind {
            source: c_string(path.as_os_str()),
            at: staged(path),
            optional: true,
            writable: false,
            recursive,
        });
    }

    /// Makes the directories above a path.
    pub(super) fn parents(&mut self, path: &Path) {
        let mut parents: Vec<&Path> = path
            .ancestors()
            .skip(1)
            .filter(|at| at.parent().is_some())
            .collect();
        parents.reverse();
        for parent in parents {
            self.0.push(Step::Directory(staged(parent)));
        }
    }

    pub(super) fn file(&mut self, path: &Path, writable: bool) {
        if !path.exists() {
            return;
        }
        self.0.push(Step::File(staged(path)));
        self.0.push(Step::Bind {
            source: c_string(path.as_os_str()),
            at: staged(path),
            optional: true,
            writable,
            recursive: false,
        });
    }
}

fn staged(path: &Path) -> CString {
    let mut whole = STAGE.as_bytes().to_vec();
    whole.extend_from_slice(path.as_os_str().as_bytes());
    c_string(OsStr::from_bytes(&whole))
}

pub(super) fn c_string(text: &OsStr) -> CString {
    CString::new(text.as_bytes()).unwrap_or_else(|_| {
        CString::new(
            text.as_bytes()
                .split(|&byte| byte == 0)
                .next()
                .unwrap_or(b""),
        )
        .unwrap_or_default()
    })
}
