//! Carries control streams of guests between a backend VM and a launcher, byte by byte.
//!
//! Each stream has threads of its own. A launcher can send descriptors along with its bytes. The kernel closes them in the
//! thread that reads the bytes or closes the stream, and waits for each close, which may never end.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Weak};
use std::time::Duration;

use wormhole_link::tasks;
use wormhole_lock::Mutex;
use wormhole_monitor::devices::vsock::MAX_CONNECTIONS;

/// Most control streams of a guest at a time. Each of its processes has one for libcuda and one for NVML.
const MOST_STREAMS: usize = 128;
/// Connections of a VM that carry no control stream: its outputs, and one for each window.
const OTHERS: usize = 8;

/// Both ends of a control stream: that of the supervisor's side and the launcher's.
type Carried = (UnixStream, UnixStream);

/// Places for the control streams of one tenant, so that no tenant takes all connections, descriptors and threads.
#[derive(Debug)]
pub struct Places {
    /// Streams that are carried, and some that have ended.
    taken: Mutex<Vec<Weak<Carried>>>,
    most: usize,
}

impl Places {
    /// Returns the places of one among several tenants.
    pub fn of_one_among(tenants: usize) -> Self {
        let share = (MAX_CONNECTIONS - OTHERS) / tenants.max(1);
        Self {
            taken: Mutex::default(),
            most: share.saturating_sub(1).clamp(1, MOST_STREAMS),
        }
    }

    /// Carries a stream, if there is a place for it.
    pub fn carry(
        &self,
        stream: UnixStream,
        outside: impl FnOnce() -> io::Result<UnixStream>,
    ) -> io::Result<()> {
        let mut taken = self.taken.lock();
        taken.retain(|carried| carried.strong_count() > 0);
        if taken.len() >= self.most {
            let most = self.most;
            return Err(io::Error::other(format!("the guest has {most} already")));
        }
        let carried = Arc::new((stream, outside()?));
        taken.push(Arc::downgrade(&carried));
        drop(taken);
        carry(carried)
    }

    /// Ends all streams.
    pub fn end(&self) {
        for carried in &*self.taken.lock() {
            if let Some(ends) = carried.upgrade() {
                shut_down(&ends);
            }
        }
    }

    /// Ends all streams, and waits until each place is free: the next tenant has them.
    pub fn clear(&self) {
        self.end();
        let mut pause = SOON;
        while !self.are_free() {
            std::thread::sleep(pause);
            pause = LATE.min(2 * pause);
        }
    }

    /// Returns whether no stream is carried.
    pub fn are_free(&self) -> bool {
        let mut taken = self.taken.lock();
        taken.retain(|carried| carried.strong_count() > 0);
        taken.is_empty()
    }

    #[cfg(test)]
    pub fn most(&self) -> usize {
        self.most
    }
}

/// Times until streams that end are looked at again.
const SOON: Duration = Duration::from_millis(1);
const LATE: Duration = Duration::from_secs(1);

fn shut_down(ends: &Carried) {
    drop(ends.0.shutdown(Shutdown::Both));
    drop(ends.1.shutdown(Shutdown::Both));
}

/// Carries a control stream to the launcher until the supervisor ends it. The guest's end of its direction is passed on.
fn carry(ends: Arc<Carried>) -> io::Result<()> {
    let (inward, outward) = (Arc::clone(&ends), Arc::clone(&ends));
    let carrying = tasks::spawn("carry", move || {
        let (stream, outside) = &*inward;
        copy(outside, stream);
        drop(stream.shutdown(Shutdown::Write));
    });
    let carrying = carrying.and_then(|_| {
        tasks::spawn("carry", move || {
            let (stream, outside) = &*outward;
            copy(stream, outside);
            // A guest that stays would otherwise hold the other thread.
            drop(outside.shutdown(Shutdown::Both));
        })
    });
    if carrying.is_err() {
        shut_down(&ends);
    }
    carrying.map(drop)
}

/// Copies until the end of a stream. An error is an end as well.
fn copy(mut from: &UnixStream, mut to: &UnixStream) {
    let mut buffer = [0; 8 << 10];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return,
            Ok(bytes) => {
                if to.write_all(&buffer[..bytes]).is_err() {
                    return;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

#[cfg(test)]
pub mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    use rustix::net::sockopt::set_socket_linger;
    use wormhole_ring::control::{Message, Stream};

    use super::*;
    use crate::backend::send;

    /// A socket whose close takes longer than any test: its data is never acknowledged.
    pub fn lingering() -> (TcpStream, TcpListener) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        stream.set_nonblocking(true).unwrap();
        while (&stream).write(&[0; 1 << 16]).is_ok() {}
        set_socket_linger(&stream, Some(Duration::from_secs(1 << 12))).unwrap();
        stream.set_nonblocking(false).unwrap();
        (stream, listener)
    }

    #[test]
    fn a_descriptor_on_a_stream_is_closed_by_the_streams_own_thread() {
        let places = Places::of_one_among(1);
        let (mut device, stream) = UnixStream::pair().unwrap();
        let (launcher, ours) = UnixStream::pair().unwrap();
        let (foreign, listener) = lingering();
        let message = Message::Stream(Stream { local: 0 });
        send(&launcher, &message, &[foreign.as_raw_fd()]).unwrap();
        // The last descriptor lies in the stream from here on.
        drop(foreign);
        places.carry(stream, || Ok(ours)).unwrap();
        // The device reads, writes and sees the end meanwhile.
        device.write_all(b"there").unwrap();
        let mut said = [0; 5];
        (&launcher).read_exact(&mut said).unwrap();
        assert_eq!(&said, b"there");
        drop(launcher);
        places.end();
        let mut rest = Vec::new();
        device.read_to_end(&mut rest).unwrap();
        assert!(!places.are_free(), "its thread waits for the close");
        // Resets the connection, and so ends the close.
        drop(listener);
        places.clear();
    }

    #[test]
    fn all_tenants_have_streams_at_once() {
        for tenants in [1, 8, 64] {
            let most = Places::of_one_among(tenants).most();
            assert!(most > 0 && tenants * (most + 1) + OTHERS <= MAX_CONNECTIONS);
        }
    }
}
