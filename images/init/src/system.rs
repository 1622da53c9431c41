//! Mounts the file systems that programs expect.

use std::fs::{self, Permissions};
use std::io;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::Path;

use wormhole_init::{User, mount_one};

/// World-writable folders. They stay on the root file system, which is in memory too: a mount would hide the
/// image's files in them.
const SHARED_FOLDERS: [&str; 2] = ["/tmp", "/var/tmp"];

/// Mounts in order: file system type, path, options.
const MOUNTS: [(&str, &str, &str); 5] = [
    ("proc", "/proc", ""),
    ("sysfs", "/sys", ""),
    ("devtmpfs", "/dev", "mode=0755"),
    ("tmpfs", "/dev/shm", "mode=1777"),
    // The group is Debian's tty.
    ("devpts", "/dev/pts", "mode=0620,ptmxmode=0666,gid=5"),
];

/// Links to the descriptors of the process that follows them.
const DESCRIPTORS: [(&str, &str); 4] = [
    ("/dev/fd", "/proc/self/fd"),
    ("/dev/stdin", "/proc/self/fd/0"),
    ("/dev/stdout", "/proc/self/fd/1"),
    ("/dev/stderr", "/proc/self/fd/2"),
];

/// Device for page faults that a process serves itself.
const FAULTS: &str = "/dev/userfaultfd";
/// Prefixes of the names of devices that the program may open: disks, the window, the device for page faults, and the socket of
/// the keeper of shared files.
const OF_THE_PROGRAM: [&[u8]; 4] = [b"vd", b"dax", b"userfaultfd", b"wormhole-shared-files"];

#[derive(Debug, thiserror::Error)]
pub enum SystemError {
    #[error("cannot mount {kind} at {path}: {source}")]
    Mount {
        kind: &'static str,
        path: &'static str,
        source: io::Error,
    },
    #[error("cannot give the program its devices: {0}")]
    Devices(io::Error),
    #[error("cannot name this machine: {0}")]
    Name(io::Error),
}

pub fn mount() -> Result<(), SystemError> {
    for (kind, path, options) in MOUNTS {
        // The folder may exist; if it cannot be created, the mount fails.
        let _ = fs::create_dir_all(path);
        mount_one(kind, kind, path, 0, options).map_err(|source| SystemError::Mount {
            kind,
            path,
            source,
        })?;
    }
    for (link, target) in DESCRIPTORS {
        // As above; a failure shows in the program that needs the link.
        let _ = symlink(target, link);
    }
    for path in SHARED_FOLDERS {
        // As above; a failure shows in the program that needs the folder.
        let _ = fs::create_dir_all(path);
        let _ = fs::set_permissions(path, Permissions::from_mode(0o1777));
    }
    Ok(())
}

/// Gives the devices of the program to its user. On a kernel without a device for page faults (before Linux 6.1), the user may
/// make the system call instead.
pub fn give_devices(user: &User) -> io::Result<()> {
    if !Path::new(FAULTS).exists() {
        // Managed memory stays on the host if this fails.
        let _ = fs::write("/proc/sys/vm/unprivileged_userfaultfd", "1");
    }
    for device in fs::read_dir("/dev")? {
        let device = device?;
        let name = device.file_name();
        let is_of = |start: &&[u8]| name.as_encoded_bytes().starts_with(start);
        if OF_THE_PROGRAM.iter().any(is_of) {
            chown(device.path(), Some(user.uid), Some(user.gid))?;
        }
    }
    Ok(())
}

/// Names this machine, and lets programs look its name up.
pub fn name(name: &str) -> io::Result<()> {
    fs::write("/proc/sys/kernel/hostname", name)?;
    // A failure shows in the program that looks the name up. A root may lack the folder.
    let hosts = fs::File::options()
        .append(true)
        .create(true)
        .open("/etc/hosts");
    let _ = hosts.and_then(|mut hosts| hosts.write_all(format!("\n127.0.1.1 {name}\n").as_bytes()));
    Ok(())
}
