//! Listening socket for tenants.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use wormhole_link::made::{Made, Place};
use wormhole_link::users::peer_of;

use super::access_list;
use super::datagram::{self, Plain};

/// Reason why tenants cannot connect.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error("cannot listen on {path}")]
    Bind {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("{0} is there already and is not a socket: name a path that is free")]
    NotASocket(PathBuf),
    #[error("another process listens on {0}")]
    Taken(PathBuf),
}

/// A listening socket, its path, and the users that may connect.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
    place: Made,
    /// User of this process.
    own: u32,
    users: Vec<u32>,
}

/// A connection, and the user who made it. A stranger's user may not connect.
#[derive(Debug)]
pub enum Accepted {
    Tenant(OwnedFd, u32),
    Stranger(OwnedFd, u32),
}

impl Listener {
    /// Listens at `path`, and replaces a socket that no process listens on any more. Root, this
    /// process's user and `users` may connect.
    ///
    /// # Errors
    /// The path is taken by a file of another kind or by a socket in use, or the socket cannot be bound.
    pub fn bind(path: &Path, users: &[u32]) -> Result<Self, ListenError> {
        let failed = |cause| ListenError::Bind {
            path: path.to_owned(),
            cause,
        };
        let place = Place::of(path).map_err(failed)?;
        let socket = match UnixListener::bind(path) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                let (left, file) = place.made().map_err(failed)?;
                if !file.metadata().map_err(failed)?.file_type().is_socket() {
                    return Err(ListenError::NotASocket(path.to_owned()));
                }
                match try_connect(path) {
                    Err(Errno::CONNREFUSED) => {}
                    // The socket has a listener; its queue may be full.
                    Ok(_) | Err(Errno::AGAIN) => return Err(ListenError::Taken(path.to_owned())),
                    Err(error) => return Err(failed(error.into())),
                }
                left.remove();
                UnixListener::bind(path).map_err(failed)?
            }
            bound => bound.map_err(failed)?,
        };
        let own = rustix::process::geteuid().as_raw();
        let place = open_to(&place, users, own).map_err(failed)?;
        socket.set_nonblocking(true).map_err(failed)?;
        Ok(Self {
            socket,
            place,
            own,
            users: [&[0, own], users].concat(),
        })
    }

    /// Returns the number of users who may attach.
    pub fn users(&self) -> usize {
        self.users.iter().collect::<BTreeSet<_>>().len()
    }

    /// Returns the user of the supervisor.
    pub fn own_user(&self) -> u32 {
        self.own
    }

    /// Returns the socket's name. Another file may have taken its place.
    pub fn place(&self) -> &Made {
        &self.place
    }

    /// Accepts the next connection.
    ///
    /// # Errors
    /// Same as `accept`; `WouldBlock` if no connection is waiting.
    pub fn accept(&self) -> io::Result<Accepted> {
        let stream = OwnedFd::from(self.socket.accept()?.0);
        let user = peer_of(&stream)?.user;
        Ok(if self.users.contains(&user) {
            Accepted::Tenant(stream, user)
        } else {
            Accepted::Stranger(stream, user)
        })
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

/// Lets this user and `users` connect to the socket that was bound at a place. On a file system
/// without access control lists every user can connect; the supervisor checks the user of each
/// connection.
///
/// Another user who can write to the folder may have replaced the file since. So it is opened once,
/// without following links, and its mode changes only if it is a socket of this user.
fn open_to(place: &Place, users: &[u32], own: u32) -> io::Result<Made> {
    let (made, there) = place.made()?;
    let metadata = there.metadata()?;
    if !metadata.file_type().is_socket() || metadata.uid() != own {
        return Err(io::Error::other(
            "another file took its place: name a path in a folder that only this user can write",
        ));
    }
    // fchmod fails on an O_PATH descriptor, so its name in /proc is used.
    let name = format!("/proc/self/fd/{}", there.as_raw_fd());
    fs::set_permissions(&name, Permissions::from_mode(0o600))?;
    if !users.is_empty() {
        match access_list::open_to(Path::new(&name), users) {
            Ok(()) => {}
            Err(Errno::OPNOTSUPP) => fs::set_permissions(name, Permissions::from_mode(0o666))?,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(made)
}

/// Connects to a socket without blocking.
fn try_connect(path: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Returns whether the event loop itself can close a connection that was accepted and then shut
/// down: no descriptor is queued in it, and none can arrive. Drops bytes that were queued. Valid
/// only if no other process has a copy of the socket.
pub fn has_no_descriptors(stream: &OwnedFd) -> bool {
    /// Largest number of reads: more than a connection's buffer takes.
    const READS: usize = 32;
    // Otherwise a byte out of band would be freed unseen, with its descriptors.
    if rustix::net::sockopt::set_socket_oobinline(stream, true).is_err() {
        return false;
    }
    let mut buffer = [0; 16 << 10];
    for _ in 0..READS {
        match datagram::receive_plain(stream, &mut buffer) {
            Ok(Plain::Bytes { count: 0, .. }) => return true,
            Ok(Plain::Bytes { .. }) => {}
            Ok(Plain::Descriptors) | Err(_) => return false,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

    use super::*;

    fn bytes(stream: &OwnedFd, count: usize) {
        let sent = rustix::net::send(stream, &vec![0; count], SendFlags::empty());
        assert_eq!(sent, Ok(count));
    }

    /// Sends a byte with a descriptor.
    fn send(stream: &OwnedFd, flags: SendFlags) {
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = [stream.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
        sendmsg(stream, &[IoSlice::new(&[0])], &mut control, flags).unwrap();
    }

    #[test]
    fn a_connection_is_closed_here_if_it_has_no_descriptors() {
        let has_none = |bring: fn(&OwnedFd)| {
            let (near, far) = UnixStream::pair().unwrap();
            let (near, far) = (OwnedFd::from(near), OwnedFd::from(far));
            bring(&near);
            rustix::net::shutdown(&far, rustix::net::Shutdown::Both).unwrap();
            has_no_descriptors(&far)
        };
        assert!(has_none(|_| ()));
        assert!(has_none(|stream| bytes(stream, 100_000)));
        assert!(!has_none(|stream| send(stream, SendFlags::empty())));
        assert!(!has_none(|stream| send(stream, SendFlags::OOB)));
        assert!(!has_none(|stream| {
            bytes(stream, 100_000);
            send(stream, SendFlags::empty());
        }));
        assert!(!has_none(|stream| {
            bytes(stream, 10);
            send(stream, SendFlags::OOB);
            bytes(stream, 10);
        }));
    }

    #[test]
    fn a_file_that_is_no_socket_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "kept").unwrap();
        let error = Listener::bind(&path, &[]).unwrap_err();
        assert!(matches!(error, ListenError::NotASocket(_)), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "kept");
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let error = Listener::bind(&link, &[]).unwrap_err();
        assert!(matches!(error, ListenError::NotASocket(_)), "{error}");
        assert!(link.is_symlink());
    }

    #[test]
    fn only_a_socket_of_this_user_gets_a_mode() {
        let folder = tempfile::tempdir().unwrap();
        let [secret, link, socket] =
            ["secret", "link", "socket"].map(|name| folder.path().join(name));
        fs::write(&secret, "kept").unwrap();
        fs::set_permissions(&secret, Permissions::from_mode(0o600)).unwrap();
        std::os::unix::fs::symlink(&secret, &link).unwrap();
        let own = rustix::process::geteuid().as_raw();
        let open_to = |path, own| open_to(&Place::of(path).unwrap(), &[], own);
        for path in [&secret, &link] {
            let error = open_to(path, own).unwrap_err();
            assert!(error.to_string().contains("took its place"), "{error}");
        }
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!(mode(&secret), 0o600);
        let _socket = UnixListener::bind(&socket).unwrap();
        assert!(open_to(&socket, own + 1).is_err());
        open_to(&socket, own).unwrap();
        assert_eq!(mode(&socket), 0o600);
    }

    #[test]
    fn the_named_users_alone_can_connect_where_there_are_access_lists() {
        const NAMED: u32 = 65534;
        const STRANGER: u32 = 65533;
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root can become another user");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
        let path = folder.path().join("socket");
        let listener = Listener::bind(&path, &[NAMED, 3, NAMED]).unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        if access_list::open_to(&file, &[NAMED]) == Err(Errno::OPNOTSUPP) {
            eprintln!("skipped: the folder's file system has no access control lists");
            return;
        }
        let connect = |user| {
            std::thread::scope(|scope| {
                let thread = scope.spawn(|| {
                    rustix::thread::set_thread_uid(rustix::process::Uid::from_raw(user)).unwrap();
                    try_connect(&path).map(drop)
                });
                thread.join().unwrap()
            })
        };
        assert_eq!(connect(STRANGER), Err(Errno::ACCESS));
        for user in [0, NAMED] {
            assert_eq!(connect(user), Ok(()));
            assert!(matches!(listener.accept(), Ok(Accepted::Tenant(_, found)) if found == user));
        }
    }

    #[test]
    fn a_socket_without_a_listener_is_replaced_and_one_in_use_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        drop(UnixListener::bind(&path).unwrap());
        let listener = Listener::bind(&path, &[]).unwrap();
        let error = Listener::bind(&path, &[]).unwrap_err();
        assert!(matches!(error, ListenError::Taken(_)), "{error}");
        listener.place().remove();
        assert!(!path.exists());
    }

    #[test]
    fn a_socket_whose_listener_accepts_nobody_is_in_use() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let socket = UnixListener::bind(&path).unwrap();
        // A second call sets the length of the queue.
        rustix::net::listen(&socket, 0).unwrap();
        let waiting: Vec<OwnedFd> = std::iter::from_fn(|| try_connect(&path).ok()).collect();
        assert!(!waiting.is_empty());
        let error = Listener::bind(&path, &[]).unwrap_err();
        assert!(matches!(error, ListenError::Taken(_)), "{error}");
        assert!(path.exists());
    }

    #[test]
    fn only_the_bound_socket_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let first = Listener::bind(&path, &[]).unwrap();
        fs::rename(&path, folder.path().join("moved")).unwrap();
        let _second = Listener::bind(&path, &[]).unwrap();
        first.place().remove();
        assert!(path.exists());
        fs::remove_file(&path).unwrap();
        fs::write(&path, "another's").unwrap();
        first.place().remove();
        assert!(path.exists());
    }
}
