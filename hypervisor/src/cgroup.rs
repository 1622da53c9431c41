//! The cgroup of a VM's monitor, in a cgroup that was delegated to its starter. Elsewhere the monitor stays where it is.
//!
//! The cgroup is `vm-PID.N` beside those of workers. A process that the monitor starts outside removes it when the monitor has
//! ended, however it ended. One that is left all the same is removed by the next monitor in the same place. KVM keeps a thread of
//! its own there until no process holds a descriptor of the VM any more: a guest of a backend VM has one of that VM's figures.
//!
//! The kernel charges a page to the cgroup that touches it first. So `memory.max` has room for the guest's memory and the whole
//! window, although workers touch parts of the window first.

use std::fs;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use clap::Args;
use wormhole_cgroups::{
    CgroupError, Delegated, children, failed, limit, limit_tasks, wait_until_empty, write,
};

use crate::installation::Installation;

const VM: &str = "vm-";
/// Memory of a monitor beside its guest's: its own, the files that a run collects, unread messages in sockets, and files of the
/// host that it has read.
const BESIDE: u64 = 192 << 20;
/// Part of the guest's memory that the kernel's tables for it take at most: those of the process, those of KVM and of an IOMMU,
/// each 8 bytes for 4 KiB, and KVM's notes on pages.
const TABLES: u64 = 64;
/// More threads than a monitor has: some for each processor and device of the guest, one for each stream and tenant, and the
/// kernel's own for its disks.
const TASKS: u64 = 4096;
/// Attempts to enter a cgroup that another monitor takes for one that was left.
const TURNS: u32 = 16;

/// Arguments of the process that removes a cgroup.
#[derive(Debug, Args)]
pub struct Options {
    path: PathBuf,
}

/// Runs as the process: removes the cgroup of its starter once no process or thread of the kernel is left there.
pub fn remove(options: &Options) {
    // The starter closes its end when it has entered the cgroup.
    let _ = io::stdin().read(&mut [0]);
    wait_until_empty(&options.path, None);
    // It may be gone with the one above it.
    let _ = fs::remove_dir(&options.path);
}

/// Moves this process, which is to be the monitor of a VM with so many bytes of memory and window, into a cgroup of its own
/// where that can be. `None` limits no memory. Call it when all other processes are started, and before the VM is made.
pub fn enter(installation: &Installation, bytes: Option<u64>) {
    let Ok(delegated) = Delegated::find() else {
        return;
    };
    remove_left(delegated.path());
    if delegated.split().is_err() {
        return;
    }
    for _ in 0..TURNS {
        let entered = Cgroup::make(delegated.path()).and_then(|cgroup| {
            match bytes {
                Some(bytes) => limit(&cgroup.path, most(bytes), TASKS)?,
                None => limit_tasks(&cgroup.path, TASKS)?,
            }
            cgroup.enter(installation)
        });
        match entered {
            Err(CgroupError::File { cause, .. }) if is_gone(&cause) => {}
            _ => return,
        }
    }
}

/// Returns the limit of memory for a monitor.
fn most(bytes: u64) -> u64 {
    bytes.saturating_add(bytes / TABLES).saturating_add(BESIDE)
}

/// Returns whether a file of a cgroup could not be written because the cgroup was removed.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENODEV)
}

/// Removes the cgroups of monitors that have ended. The kernel keeps those that have a process.
fn remove_left(base: &Path) {
    let is_ours = |path: &PathBuf| {
        let name = path.file_name();
        name.is_some_and(|name| name.as_bytes().starts_with(VM.as_bytes()))
    };
    for path in children(base).into_iter().filter(is_ours) {
        let _ = fs::remove_dir(path);
    }
}

/// A cgroup without a process. It is removed on drop, which fails once it has one.
struct Cgroup {
    path: PathBuf,
}

impl Cgroup {
    fn make(base: &Path) -> Result<Self, CgroupError> {
        let pid = std::process::id();
        for number in 0.. {
            // A monitor in another PID namespace may have the same process number.
            let path = base.join(format!("{VM}{pid}.{number}"));
            match fs::create_dir(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => return made.map_err(failed("made", &path)).map(|()| Self { path }),
            }
        }
        Err(CgroupError::Busy(base.to_owned()))
    }

    /// Moves this process there, and leaves its removal to another one.
    fn enter(self, installation: &Installation) -> Result<(), CgroupError> {
        // The remover stays outside, and waits for the end of this process once that is in the cgroup.
        let remover = self.start_remover(installation);
        let _remover = remover.map_err(failed("left to another process", &self.path))?;
        write(
            &self.path.join("cgroup.procs"),
            &std::process::id().to_string(),
        )
    }

    fn start_remover(&self, installation: &Installation) -> io::Result<Child> {
        Command::new(installation.command())
            .arg("remove-cgroup")
            .arg(&self.path)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // No signal of a terminal reaches it.
            .process_group(0)
            .spawn()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_tables_fit_beside_the_memory_that_they_are_for() {
        assert_eq!(most(0), BESIDE);
        assert_eq!(most(1 << 40), (1 << 40) + (16 << 30) + BESIDE);
        assert_eq!(most(u64::MAX), u64::MAX);
    }

    #[test]
    fn cgroups_of_others_stay() {
        let base = tempfile::tempdir().expect("a folder");
        let at = |name: &str| base.path().join(name);
        for name in ["vm-1.0", "vm-2.0", "vm-2.0/process", "workers-1.0"] {
            fs::create_dir(at(name)).expect("a folder");
        }
        remove_left(base.path());
        // A folder with another one in it is one that cannot be removed, as a cgroup with a process is.
        let is_there = ["vm-1.0", "vm-2.0", "workers-1.0"].map(|name| at(name).exists());
        assert_eq!(is_there, [false, true, true]);
        let pid = std::process::id();
        let made: Vec<_> = (0..2)
            .map(|_| Cgroup::make(base.path()).expect("made"))
            .collect();
        for (number, cgroup) in made.iter().enumerate() {
            assert_eq!(cgroup.path, at(&format!("vm-{pid}.{number}")));
        }
        drop(made);
        assert!(!at(&format!("vm-{pid}.0")).exists());
    }
}
