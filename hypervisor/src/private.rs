//! Folders and sockets that only this user can use, whatever this process's umask.
//!
//! A stranger who connects can send descriptors whose close never ends, and one who enters a folder can read and change
//! its files.

use std::env;
use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::fs::Mode;
use rustix::process::umask;
use tempfile::{Builder, TempDir};

/// Number of random characters in a folder's name.
const RANDOM: usize = 16;

/// Makes a temporary folder.
///
/// # Errors
/// It cannot be made.
pub fn folder(prefix: &str) -> io::Result<TempDir> {
    folder_in(&env::temp_dir(), prefix)
}

/// Makes a temporary folder below another.
///
/// # Errors
/// It cannot be made.
pub fn folder_in(parent: &Path, prefix: &str) -> io::Result<TempDir> {
    Builder::new()
        .prefix(prefix)
        .rand_bytes(RANDOM)
        .permissions(Permissions::from_mode(0o700))
        .tempdir_in(parent)
}

/// Binds a socket with its mode.
///
/// # Errors
/// It cannot be bound.
pub fn listener(path: &Path) -> io::Result<UnixListener> {
    let mask = umask(Mode::RWXG | Mode::RWXO | Mode::XUSR);
    let bound = UnixListener::bind(path);
    umask(mask);
    bound
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_users_cannot_enter_a_private_folder() {
        let folder = folder("wormhole-test-").expect("a folder");
        let mode = folder.path().metadata().expect("it is there").permissions();
        assert_eq!(mode.mode() & 0o7777, 0o700);
    }
}
