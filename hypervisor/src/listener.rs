//! Looks for the listener of a socket without waiting for it: a stranger's may have no room for a connection, and make none.

use std::fs::symlink_metadata;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// Connects to a socket.
///
/// # Errors
/// `AGAIN` if its listener has no room for a connection.
pub fn connect_at_once(path: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Returns whether a path is that of a socket on which no process listens any more.
pub fn is_left(path: &Path) -> bool {
    let is_socket = symlink_metadata(path).is_ok_and(|data| data.file_type().is_socket());
    is_socket && connect_at_once(path).err() == Some(Errno::CONNREFUSED)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_socket_without_room_is_not_waited_for_and_not_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        assert!(!is_left(&path));
        let listener = UnixListener::bind(&path).unwrap();
        assert!(!is_left(&path));
        let full = std::iter::repeat_with(|| connect_at_once(&path)).find_map(Result::err);
        assert_eq!(full, Some(Errno::AGAIN));
        assert!(!is_left(&path));
        drop(listener);
        assert!(is_left(&path));
    }
}
