//! Cgroups below one that was delegated to this process: a supervisor makes those of its workers there
//! (`wormhole-sandbox`), and the monitor of a VM its own.
//!
//! This is cgroup version 2 (Linux, `Documentation/admin-guide/cgroup-v2.rst`). A cgroup is delegated if it carries systemd's
//! mark (`Delegate=yes`), or if it is the root of the hierarchy or of a cgroup namespace. Before it limits cgroups below it,
//! its processes move to [`LEAF`], since a cgroup that limits its children may hold no processes. The root of the hierarchy is
//! exempt, so its processes stay where they are.

use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Cgroup with the processes of the delegated one.
pub const LEAF: &str = "supervisor";
/// Controllers of limits, without which no cgroup is made.
pub const CONTROLLERS: [&str; 2] = ["memory", "pids"];
/// Extended attributes that systemd sets on a delegated cgroup: the system's manager the first, a user's the second.
const MARKS: [&std::ffi::CStr; 2] = [c"trusted.delegate", c"user.delegate"];
/// Attempts to empty a cgroup or to see it empty while its processes change.
const TURNS: usize = 16;

/// Reason why there are no cgroups.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    #[error("this system has no cgroup hierarchy of version 2")]
    NoHierarchy,
    #[error("the cgroup {0} is not delegated")]
    NotDelegated(PathBuf),
    #[error("the cgroup {path} has no {controller} controller")]
    NoController {
        path: PathBuf,
        controller: &'static str,
    },
    #[error("processes keep appearing in the cgroup {0}")]
    Busy(PathBuf),
    #[error("{path} cannot be {what}")]
    File {
        what: &'static str,
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
}

/// Returns the error of a file that cannot be made, read and so on.
pub fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CgroupError + use<> {
    let path = path.to_owned();
    move |cause| CgroupError::File { what, path, cause }
}

/// A cgroup that was delegated to this process.
#[derive(Debug)]
pub struct Delegated {
    path: PathBuf,
    controllers: String,
}

impl Delegated {
    /// Finds the one that this process is in.
    ///
    /// # Errors
    /// Fails if there is none, or if it has no controllers of limits.
    pub fn find() -> Result<Self, CgroupError> {
        let path = delegated()?;
        let controllers = read(&path.join("cgroup.controllers"))?;
        let found = Self { path, controllers };
        match CONTROLLERS.into_iter().find(|name| !found.has(name)) {
            Some(controller) => Err(CgroupError::NoController {
                path: found.path,
                controller,
            }),
            None => Ok(found),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether the kernel gives the cgroup a controller.
    pub fn has(&self, controller: &str) -> bool {
        let mut names = self.controllers.split_whitespace();
        names.any(|name| name == controller)
    }

    /// Prepares it for cgroups with limits below it.
    ///
    /// # Errors
    /// The kernel refuses that, or processes keep appearing.
    pub fn split(&self) -> Result<(), CgroupError> {
        // The root of the hierarchy has no `cgroup.type`, and may hold processes beside its children.
        if self.path.join("cgroup.type").exists() {
            vacate(&self.path)?;
        }
        enable(&self.path, &CONTROLLERS)
    }
}

/// Returns the mount point of the hierarchy, and the path of this process's cgroup below it.
///
/// # Errors
/// The system has no hierarchy of version 2.
pub fn own_place() -> Result<(PathBuf, PathBuf), CgroupError> {
    let mounts = read(Path::new("/proc/self/mountinfo"))?;
    let membership = read(Path::new("/proc/self/cgroup"))?;
    let mount = mounts.lines().find_map(mount_point);
    let own = membership
        .lines()
        .find_map(|line| line.strip_prefix("0::/"));
    mount
        .zip(own.map(PathBuf::from))
        .ok_or(CgroupError::NoHierarchy)
}

/// Returns the delegated cgroup that this process is in.
fn delegated() -> Result<PathBuf, CgroupError> {
    let (mount, own) = own_place()?;
    // A leaf named `supervisor` is the work of an earlier supervisor: the delegated cgroup is its parent.
    let place = own.as_path();
    let place = if place.file_name().is_some_and(|name| name == LEAF) {
        place.parent().unwrap_or(place)
    } else {
        place
    };
    let path = mount.join(place);
    if place.as_os_str().is_empty() || is_marked(&path) {
        Ok(path)
    } else {
        Err(CgroupError::NotDelegated(path))
    }
}

/// Reads the mount point from a line of `mountinfo` that mounts the whole hierarchy; `None` for any other line.
fn mount_point(line: &str) -> Option<PathBuf> {
    let (place, kind) = line.split_once(" - ")?;
    if kind.split(' ').next()? != "cgroup2" {
        return None;
    }
    let mut fields = place.split(' ').skip(3);
    let (root, at) = (fields.next()?, fields.next()?);
    (root == "/").then(|| at.into())
}

fn is_marked(path: &Path) -> bool {
    MARKS.iter().any(|mark| {
        let mut value = [0u8; 1];
        rustix::fs::getxattr(path, *mark, &mut value) == Ok(1) && value == *b"1"
    })
}

/// Moves the processes of `base` to a leaf below it.
fn vacate(base: &Path) -> Result<(), CgroupError> {
    let leaf = base.join(LEAF);
    match fs::create_dir(&leaf) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(failed("made", &leaf)(error));
        }
        _ => {}
    }
    for _ in 0..TURNS {
        let processes = read(&base.join("cgroup.procs"))?;
        if processes.is_empty() {
            return Ok(());
        }
        for process in processes.lines() {
            match write(&leaf.join("cgroup.procs"), process) {
                // ESRCH: the process has ended.
                Err(CgroupError::File { cause, .. })
                    if cause.raw_os_error() == Some(libc::ESRCH) => {}
                moved => moved?,
            }
        }
    }
    Err(CgroupError::Busy(base.to_owned()))
}

/// Lets cgroups below this one limit what these controllers count.
///
/// # Errors
/// The kernel refuses that.
pub fn enable(path: &Path, controllers: &[&str]) -> Result<(), CgroupError> {
    let names: Vec<String> = controllers.iter().map(|name| format!("+{name}")).collect();
    write(&path.join("cgroup.subtree_control"), &names.join(" "))
}

/// Limits the tasks and the memory of a cgroup.
///
/// # Errors
/// The kernel does not accept the limits.
pub fn limit(path: &Path, memory: u64, tasks: u64) -> Result<(), CgroupError> {
    limit_tasks(path, tasks)?;
    write(&path.join("memory.max"), &memory.to_string())
}

/// Limits the tasks of a cgroup.
///
/// # Errors
/// The kernel does not accept the limit.
pub fn limit_tasks(path: &Path, tasks: u64) -> Result<(), CgroupError> {
    write(&path.join("pids.max"), &tasks.to_string())
}

/// Waits until the cgroup has no process, or for `patience` without a change.
pub fn wait_until_empty(path: &Path, patience: Option<&Timespec>) {
    let Ok(mut events) = File::open(path.join("cgroup.events")) else {
        return;
    };
    for _ in 0..TURNS {
        let mut text = String::new();
        let read = events
            .rewind()
            .and_then(|()| events.read_to_string(&mut text));
        if read.is_err() || text.contains("populated 0") {
            return;
        }
        let mut changed = [PollFd::new(&events, PollFlags::PRI)];
        if poll(&mut changed, patience) == Ok(0) {
            return;
        }
    }
}

/// Returns the cgroups in this one.
pub fn children(path: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(path) else {
        return Vec::new();
    };
    entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.is_dir())
        .collect()
}

/// Reads a file of a cgroup.
///
/// # Errors
/// It cannot be read.
pub fn read(path: &Path) -> Result<String, CgroupError> {
    fs::read_to_string(path).map_err(failed("read", path))
}

/// Writes to a file of a cgroup.
///
/// # Errors
/// The kernel refuses the value.
pub fn write(path: &Path, value: &str) -> Result<(), CgroupError> {
    File::options()
        .write(true)
        .open(path)
        .and_then(|mut file| file.write_all(value.as_bytes()))
        .map_err(failed("written", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hierarchy_is_found_among_the_mounts() {
        let v1 = "33 24 0:29 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory";
        let v2 = "34 24 0:30 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate";
        let part = "35 24 0:30 /a /mnt rw - cgroup2 cgroup2 rw";
        assert_eq!(mount_point(v1), None);
        assert_eq!(mount_point(part), None);
        assert_eq!(mount_point(v2), Some("/sys/fs/cgroup".into()));
    }
}
