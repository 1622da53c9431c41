//! Sockets of processes, which a thread of its own closes.
//!
//! A process can send descriptors over its socket. The kernel closes those that nobody takes, in the thread that reads or closes the
//! socket, and the close of some lasts for as long as the process likes: that of a TCP socket with `SO_LINGER`.

use std::io::{self, ErrorKind, IoSliceMut};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Builder;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

/// Closes underway with which no other process is accepted.
const MOST: usize = 128;
/// Most descriptors of a message (`SCM_MAX_FD`).
const DESCRIPTORS: usize = 253;

static UNDERWAY: AtomicUsize = AtomicUsize::new(0);

/// Returns whether so many closes are underway that no other process is accepted.
pub fn is_busy() -> bool {
    UNDERWAY.load(Ordering::Relaxed) >= MOST
}

/// Counts a close until it is done.
struct Close;

impl Close {
    fn begin() -> Self {
        UNDERWAY.fetch_add(1, Ordering::Relaxed);
        Self
    }
}

impl Drop for Close {
    fn drop(&mut self) {
        UNDERWAY.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Drops something on a thread of its own. If there is no thread to be had, it stays open, and counts as a close underway.
fn close(thing: impl Send + 'static) {
    let both = ManuallyDrop::new((thing, Close::begin()));
    let body = move || drop(ManuallyDrop::into_inner(both));
    let _ = Builder::new().name("close".to_owned()).spawn(body);
}

/// Socket on whose other end is a process.
#[derive(Debug)]
pub struct ProcessSocket(Option<UnixStream>);

impl ProcessSocket {
    pub fn new(socket: UnixStream) -> Self {
        Self(Some(socket))
    }

    /// Reads bytes.
    ///
    /// # Errors
    /// As recvmsg(2). `InvalidData` if the process has sent descriptors.
    pub fn receive(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(bytes)];
        let message = recvmsg(&**self, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)?;
        let rights = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(rights) => Some(rights),
            _ => None,
        });
        let sent: Vec<OwnedFd> = rights.flatten().collect();
        if sent.is_empty() {
            return Ok(message.bytes);
        }
        close(sent);
        Err(ErrorKind::InvalidData.into())
    }
}

impl Deref for ProcessSocket {
    type Target = UnixStream;

    fn deref(&self) -> &UnixStream {
        self.0.as_ref().expect("a socket until the drop")
    }
}

impl Drop for ProcessSocket {
    fn drop(&mut self) {
        if let Some(socket) = self.0.take() {
            close(socket);
        }
    }
}
