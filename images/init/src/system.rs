//! Mounts the file systems that programs expect.

use std::ffi::CString;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;

/// World-writable folders. They stay on the root file system, which is in memory too: a mount would hide the
/// image's files in them.
const SHARED_FOLDERS: [&str; 2] = ["/tmp", "/var/tmp"];

/// Mounts in order: file system type, path, options.
const MOUNTS: [(&str, &str, &str); 4] = [
    ("proc", "/proc", ""),
    ("sysfs", "/sys", ""),
    ("devtmpfs", "/dev", "mode=0755"),
    ("tmpfs", "/dev/shm", "mode=1777"),
];

#[derive(Debug, thiserror::Error)]
pub enum SystemError {
    #[error("cannot mount {kind} at {path}: {source}")]
    Mount {
        kind: &'static str,
        path: &'static str,
        source: io::Error,
    },
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
    for path in SHARED_FOLDERS {
        // As above; a failure shows in the program that needs the folder.
        let _ = fs::create_dir_all(path);
        let _ = fs::set_permissions(path, Permissions::from_mode(0o1777));
    }
    Ok(())
}

/// Calls mount(2).
pub fn mount_one(
    kind: &str,
    source: &str,
    path: &str,
    flags: libc::c_ulong,
    options: &str,
) -> io::Result<()> {
    let source = CString::new(source)?;
    let kind = CString::new(kind)?;
    let path = CString::new(path)?;
    let options = CString::new(options)?;
    // SAFETY: all pointers are to strings that end in NUL and outlive the call.
    let result = unsafe {
        libc::mount(
            source.as_ptr(),
            path.as_ptr(),
            kind.as_ptr(),
            flags,
            options.as_ptr().cast(),
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
