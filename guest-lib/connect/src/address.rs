//! Connects to the backend whose address the environment contains.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::Path;
use std::time::Duration;

use wormhole_ring::control::VSOCK_PORT;

use crate::{AGENT, VSOCK, environment};

/// Error from connecting to the backend.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error(
        "WORMHOLE_CONTROL is not set, and this machine has neither {AGENT} nor {VSOCK}: no backend is known"
    )]
    NoBackend,
    #[error("WORMHOLE_CONTROL={text}: expected unix:PATH, unix:@NAME or vsock:CID:PORT")]
    Address { text: String },
    #[error("the backend at {address} cannot be reached: {source}")]
    Connect { address: String, source: io::Error },
    #[error(
        "the listener at {address} belongs to user {user}, who is neither this process's user nor root: it is not trusted"
    )]
    Stranger { address: String, user: libc::uid_t },
}

impl ConnectError {
    /// Returns a hint for the user.
    #[must_use]
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::NoBackend => Some(
                "hint: start the program with `wormhole run -- PROGRAM`, or set WORMHOLE_CONTROL",
            ),
            Self::Connect { .. } => {
                Some("hint: is the backend running, and does WORMHOLE_CONTROL name it?")
            }
            Self::Address { .. } | Self::Stranger { .. } => None,
        }
    }
}

/// Address of the backend.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Address {
    Path(String),
    Abstract(String),
    Vsock { cid: u32, port: u32 },
}

impl Address {
    /// Parses the value of `WORMHOLE_CONTROL`. Without a value, returns the address of the agent if there `is` its socket,
    /// else that of the host if this is a VM.
    fn from_environment(
        value: Option<&str>,
        is: impl Fn(&str) -> bool,
    ) -> Result<Self, ConnectError> {
        let Some(text) = value else {
            return match (is(AGENT), is(VSOCK)) {
                (true, _) => Ok(Self::Path(AGENT.to_owned())),
                (false, true) => Ok(Self::Vsock {
                    cid: libc::VMADDR_CID_HOST,
                    port: VSOCK_PORT,
                }),
                (false, false) => Err(ConnectError::NoBackend),
            };
        };
        let parsed = match text.split_once(':') {
            Some(("unix", path)) => match path.strip_prefix('@') {
                Some(name) => Some(Self::Abstract(name.to_owned())),
                None => (!path.is_empty()).then(|| Self::Path(path.to_owned())),
            },
            Some(("vsock", rest)) => rest.split_once(':').and_then(|(cid, port)| {
                Some(Self::Vsock {
                    cid: cid.parse().ok()?,
                    port: port.parse().ok()?,
                })
            }),
            _ => None,
        };
        parsed.ok_or_else(|| ConnectError::Address {
            text: text.to_owned(),
        })
    }

    fn connect(&self) -> io::Result<UnixStream> {
        // Each attempt uses a new socket.
        uninterrupted(|| match self {
            Self::Path(path) => UnixStream::connect(path),
            Self::Abstract(name) => {
                UnixStream::connect_addr(&SocketAddr::from_abstract_name(name.as_bytes())?)
            }
            Self::Vsock { cid, port } => connect_vsock(*cid, *port),
        })
    }
}

impl Address {
    /// Returns the user id of the listener at a Unix address (`SO_PEERCRED`); `None` for vsock.
    fn listener(&self, stream: &UnixStream) -> io::Result<Option<libc::uid_t>> {
        if matches!(self, Self::Vsock { .. }) {
            return Ok(None);
        }
        let mut peer = libc::ucred {
            pid: 0,
            uid: 0,
            gid: 0,
        };
        let mut length = libc::socklen_t::try_from(size_of::<libc::ucred>()).unwrap_or_default();
        // SAFETY: the call writes the option's value, a ucred (unix(7)) of the given length.
        let done = unsafe {
            libc::getsockopt(
                stream.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut peer).cast(),
                &raw mut length,
            )
        };
        if done == 0 {
            Ok(Some(peer.uid))
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "unix:{path}"),
            Self::Abstract(name) => write!(f, "unix:@{name}"),
            Self::Vsock { cid, port } => write!(f, "vsock:{cid}:{port}"),
        }
    }
}

/// Repeats a call while it fails with EINTR.
///
/// # Errors
/// Any error of the call except EINTR.
pub fn uninterrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}

/// Connects to the backend whose address is in `WORMHOLE_CONTROL`, to this VM's agent, or to the host of this VM.
///
/// # Errors
/// No backend is configured, it cannot be reached, or its listener belongs to an untrusted user.
pub fn connect() -> Result<UnixStream, ConnectError> {
    let value = environment::trusted("WORMHOLE_CONTROL");
    let is = |path: &str| Path::new(path).exists();
    let address = Address::from_environment(value.as_deref(), is)?;
    let name = || address.to_string();
    let failed = |source| ConnectError::Connect {
        address: name(),
        source,
    };
    let connected = address.connect().and_then(|stream| {
        let listener = address.listener(&stream)?;
        Ok((stream, listener))
    });
    // SAFETY: the call takes no arguments and cannot fail.
    let own = unsafe { libc::geteuid() };
    match connected.map_err(failed)? {
        (_, Some(user)) if !is_trusted(user, own) => Err(ConnectError::Stranger {
            address: name(),
            user,
        }),
        (connection, Some(_)) => receive_stream(&connection).map_err(failed),
        (stream, None) => Ok(stream),
    }
}

/// Control data of one descriptor: a header of 16 bytes, and the descriptor rounded up to 8.
#[repr(C, align(8))]
struct OneDescriptor([u8; 24]);

/// Receives the control stream that the listener at a Unix address sends over a connection, beside a byte. The backend
/// makes the stream itself, because it reads no socket of which a launcher can have a copy.
fn receive_stream(connection: &UnixStream) -> io::Result<UnixStream> {
    let mut byte = 0_u8;
    let mut part = libc::iovec {
        iov_base: (&raw mut byte).cast(),
        iov_len: 1,
    };
    let mut control = OneDescriptor([0; 24]);
    // SAFETY: all zeroes is a valid msghdr.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = control.0.len();
    uninterrupted(|| {
        let flags = libc::MSG_CMSG_CLOEXEC;
        // SAFETY: the header points at live local buffers of the lengths it says.
        let count = unsafe { libc::recvmsg(connection.as_raw_fd(), &raw mut message, flags) };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    })?;
    // SAFETY: the kernel has filled the control data and set its length. It made the descriptor for this call.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        if header.is_null() || (*header).cmsg_type != libc::SCM_RIGHTS {
            return Err(io::Error::other("it gave no control stream"));
        }
        let number = libc::CMSG_DATA(header).cast::<i32>().read_unaligned();
        Ok(UnixStream::from_raw_fd(number))
    }
}

/// Returns whether a backend of `user` may serve a process of the user `own`. The backend of any other user would have
/// access to the process's memory.
fn is_trusted(user: libc::uid_t, own: libc::uid_t) -> bool {
    user == own || user == 0
}

/// Time for the other side of a vsock to accept a stream. The kernel's own limit, 2 s, is short for a host that has far more
/// to run than processors.
const CONNECT_LIMIT: Duration = Duration::from_secs(60);
/// `SO_VM_SOCKETS_CONNECT_TIMEOUT` of Linux's `vm_sockets.h`.
const CONNECT_TIMEOUT: libc::c_int = 6;

/// Connects a vsock stream. Reads, writes and shutdown are the same as for any stream socket, so
/// [`UnixStream`] can wrap it.
///
/// # Errors
/// As `socket` and `connect`.
pub fn connect_vsock(cid: u32, port: u32) -> io::Result<UnixStream> {
    // SAFETY: the call takes integers only.
    let socket = unsafe { libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if socket < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just created and has no other owner.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    // SAFETY: all zeroes is a valid sockaddr_vm.
    let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    address.svm_family = libc::sa_family_t::try_from(libc::AF_VSOCK).unwrap_or_default();
    address.svm_cid = cid;
    address.svm_port = port;
    let length = libc::socklen_t::try_from(size_of::<libc::sockaddr_vm>()).unwrap_or_default();
    let limit = libc::timeval {
        tv_sec: CONNECT_LIMIT.as_secs().cast_signed(),
        tv_usec: 0,
    };
    let size = libc::socklen_t::try_from(size_of_val(&limit)).unwrap_or_default();
    // SAFETY: an open descriptor, and local structures of the lengths given. A kernel that does not know the option keeps
    // its own limit.
    let done = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::AF_VSOCK,
            CONNECT_TIMEOUT,
            (&raw const limit).cast(),
            size,
        );
        libc::connect(socket.as_raw_fd(), (&raw const address).cast(), length)
    };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(UnixStream::from(socket))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixListener;
    use std::os::unix::thread::JoinHandleExt;
    use std::ptr::null_mut;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::thread::JoinHandle;

    use super::*;

    #[test]
    fn addresses_are_understood_or_named() {
        let parse = |text: &str| Address::from_environment(Some(text), |_| false);
        assert_eq!(
            parse("unix:/run/w").unwrap(),
            Address::Path("/run/w".into())
        );
        assert_eq!(parse("unix:@w").unwrap(), Address::Abstract("w".into()));
        assert_eq!(
            parse("vsock:2:9000").unwrap(),
            Address::Vsock { cid: 2, port: 9000 }
        );
        for text in ["", "tcp:1", "vsock:2", "vsock:a:b", "unix:"] {
            assert!(
                matches!(parse(text), Err(ConnectError::Address { .. })),
                "{text}"
            );
        }
        for text in ["unix:/run/w", "unix:@w", "vsock:2:9000"] {
            assert_eq!(parse(text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn the_agent_is_preferred_to_vsock() {
        let found = |there: &[&str]| Address::from_environment(None, |path| there.contains(&path));
        assert!(matches!(found(&[]), Err(ConnectError::NoBackend)));
        let host = Address::Vsock { cid: 2, port: 9000 };
        assert_eq!(found(&[VSOCK]).unwrap(), host);
        let agent = Address::Path(AGENT.to_owned());
        for there in [&[AGENT][..], &[AGENT, VSOCK]] {
            assert_eq!(found(there).unwrap(), agent);
        }
    }

    #[test]
    fn a_listener_is_known_by_its_user_and_strangers_are_not_believed() {
        let name = format!("wormhole-listener-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let listener = UnixListener::bind_addr(&address).unwrap();
        let address = Address::Abstract(name);
        let stream = address.connect().unwrap();
        // SAFETY: the call takes no arguments and cannot fail.
        let own = unsafe { libc::geteuid() };
        assert_eq!(address.listener(&stream).unwrap(), Some(own));
        drop(listener);
        assert!(is_trusted(1000, 1000) && is_trusted(0, 1000));
        assert!(!is_trusted(1000, 0) && !is_trusted(1001, 1000));
    }

    #[test]
    fn a_connection_without_a_control_stream_is_an_error() {
        let (near, far) = UnixStream::pair().unwrap();
        drop(far);
        let error = receive_stream(&near).unwrap_err();
        assert_eq!(error.to_string(), "it gave no control stream");
        let (near, mut far) = UnixStream::pair().unwrap();
        far.write_all(&[0]).unwrap();
        let error = receive_stream(&near).unwrap_err();
        assert_eq!(error.to_string(), "it gave no control stream");
    }

    static SIGNALS: AtomicU64 = AtomicU64::new(0);

    extern "C" fn count(_: libc::c_int) {
        SIGNALS.fetch_add(1, Ordering::Relaxed);
    }

    /// Interrupts a thread repeatedly. Its calls fail with EINTR, since the handler has no SA_RESTART.
    fn interrupt<T>(thread: &JoinHandle<T>) {
        const SIGNAL: libc::c_int = libc::SIGUSR1;
        // SAFETY: all zeroes is an action without flags; the handler only increments a counter.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = count as *const () as usize;
            assert_eq!(libc::sigaction(SIGNAL, &raw const action, null_mut()), 0);
        }
        for _ in 0..100 {
            let before = SIGNALS.load(Ordering::Relaxed);
            // SAFETY: the thread has not been joined.
            unsafe { libc::pthread_kill(thread.as_pthread_t(), SIGNAL) };
            while SIGNALS.load(Ordering::Relaxed) == before && !thread.is_finished() {
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn a_signal_ends_no_connection_attempt() {
        let name = format!("wormhole-signal-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let listener = UnixListener::bind_addr(&address).unwrap();
        // SAFETY: the call takes integers only. The queue has room for one connection; the next one waits.
        assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 0) }, 0);
        let first = UnixStream::connect_addr(&address).unwrap();
        let waiting = std::thread::spawn(move || Address::Abstract(name).connect());
        interrupt(&waiting);
        drop(listener.accept().unwrap());
        waiting.join().unwrap().unwrap();
        drop(first);
    }
}
