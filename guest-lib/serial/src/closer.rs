//! Sockets of processes, which a thread of its own closes.
//!
//! A process can send descriptors over its socket. The kernel closes those that nobody takes, in the thread that reads or closes the
//! socket, and the close of some lasts for as long as the process likes: that of a TCP socket with `SO_LINGER`. So nobody reads
//! further where descriptors have come.

use std::io::{self, ErrorKind, IoSliceMut};
use std::ops::Deref;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Builder;

use rustix::net::{RecvAncillaryBuffer, RecvFlags, ReturnFlags, recv, recvmsg};
use wormhole_lock::Mutex;

/// Closes underway with which no other process is accepted.
const MOST: usize = 128;

static UNDERWAY: AtomicUsize = AtomicUsize::new(0);

/// Things that stay open because there was no thread to be had. Each one counts as a close underway.
static LEFT: Mutex<Vec<Thing>> = Mutex::new(Vec::new());

/// Something to be dropped.
type Thing = Box<dyn Send>;

/// Returns whether so many closes are underway that no other process is accepted. Closes what was left first.
pub fn is_busy() -> bool {
    close_left(&LEFT, start);
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

/// Drops something on a thread of its own. If there is no thread to be had, it stays open until [`is_busy`] finds one.
fn close(thing: impl Send + 'static) {
    LEFT.lock().push(Box::new((thing, Close::begin())));
    close_left(&LEFT, start);
}

/// Closes what was left, each on a thread that `start` starts, as long as there are threads.
fn close_left(left: &Mutex<Vec<Thing>>, start: impl Fn(Thread) -> io::Result<()>) {
    loop {
        // Not in the loop's condition, which would hold the lock.
        let thing = left.lock().pop();
        let Some(thing) = thing else {
            return;
        };
        // A thread that is not started drops its body, and nothing else.
        let place = Arc::new(Mutex::new(Some(thing)));
        let theirs = Arc::clone(&place);
        let started = start(Box::new(move || {
            let thing = theirs.lock().take();
            drop(thing);
        }));
        if started.is_err()
            && let Some(thing) = place.lock().take()
        {
            left.lock().push(thing);
            return;
        }
    }
}

/// Body of a thread.
type Thread = Box<dyn FnOnce() + Send>;

fn start(body: Thread) -> io::Result<()> {
    let thread = Builder::new().name("close".to_owned());
    thread.spawn(body).map(drop)
}

/// Socket on whose other end is a process.
#[derive(Debug)]
pub struct ProcessSocket(Option<UnixStream>);

impl ProcessSocket {
    pub fn new(socket: UnixStream) -> Self {
        Self(Some(socket))
    }

    /// Reads bytes. Descriptors that came with them stay where they are, and are closed with the socket.
    ///
    /// # Errors
    /// As recvmsg(2). `InvalidData` if the process has sent descriptors.
    pub fn receive(&self, bytes: &mut [u8]) -> io::Result<usize> {
        // The kernel says where there is no room for descriptors.
        let mut control = RecvAncillaryBuffer::new(&mut []);
        let mut parts = [IoSliceMut::new(bytes)];
        let message = recvmsg(&**self, &mut parts, &mut control, RecvFlags::PEEK)?;
        if message.flags.contains(ReturnFlags::CTRUNC) {
            return Err(ErrorKind::InvalidData.into());
        }
        let (count, _) = recv(&**self, &mut bytes[..message.bytes], RecvFlags::empty())?;
        Ok(count)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_found_no_thread_is_closed_later() {
        static CLOSED: AtomicUsize = AtomicUsize::new(0);
        struct Counted;
        impl Drop for Counted {
            fn drop(&mut self) {
                CLOSED.fetch_add(1, Ordering::Relaxed);
            }
        }
        let left: Mutex<Vec<Thing>> = Mutex::new(vec![Box::new(Counted), Box::new(Counted)]);
        close_left(&left, |_| Err(ErrorKind::WouldBlock.into()));
        assert_eq!((left.lock().len(), CLOSED.load(Ordering::Relaxed)), (2, 0));
        close_left(&left, |body| {
            body();
            Ok(())
        });
        assert_eq!((left.lock().len(), CLOSED.load(Ordering::Relaxed)), (0, 2));
    }
}
