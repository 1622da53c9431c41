//! The control stream: hello and grant, more arena, the doorbell, and the end of the backend.

use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use vmm_sys_util::sock_ctrl_msg::ScmSocket;
use wormhole_connect::{ConnectError, uninterrupted};
use wormhole_lock::Mutex;
use wormhole_ring::control::{
    ArenaRequest, ArenaRun, ArenaWithin, ControlError, FEATURE_FILE_MEMORY, FEATURE_FILES,
    FEATURE_PROCESS, FEATURE_WITHIN, Grant, HEADER_BYTES, Header, MAX_FRAME, Message,
};
use wormhole_ring::layout::SEGMENT_BYTES;

/// Greatest number of descriptors with one message.
const DESCRIPTORS: usize = 2;
/// Interval at which a waiter for an answer checks whether the session is over.
const LOOK: Duration = Duration::from_millis(20);

/// Failure of the control stream.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("the control stream failed: {0}")]
    Stream(#[from] io::Error),
    #[error("the backend does not speak this protocol: {0}")]
    Protocol(#[from] ControlError),
    #[error("the backend answered {found} where {wanted} was due")]
    Unexpected {
        found: &'static str,
        wanted: &'static str,
    },
    #[error("the backend refused the session: {reason} (refusal {code})")]
    Refused { code: u32, reason: String },
    #[error(
        "the window has no room for {} MiB more of host memory that the device reaches (refusal {code}): {} MiB of it can be used",
        u64::from(*segments) * (SEGMENT_BYTES as u64 >> 20),
        limit >> 20
    )]
    ArenaDenied {
        segments: u32,
        code: u32,
        limit: u64,
    },
    #[error("the session ended before {segments} segments of arena were granted")]
    Over { segments: u32 },
}

/// The control stream of this process.
#[derive(Debug)]
pub struct Control {
    stream: UnixStream,
    /// Held while a message is written.
    writing: Mutex<()>,
    /// Lock held during a request and its answer. Its value is the last request's number.
    asking: Mutex<u32>,
}

impl Control {
    /// Connects to the backend that the environment names.
    pub fn connect() -> Result<Self, ChannelError> {
        Ok(Self::new(wormhole_connect::connect()?))
    }

    pub fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            writing: Mutex::new(()),
            asking: Mutex::new(0),
        }
    }

    /// Returns the descriptor, for the handler that closes it in a forked child.
    pub fn descriptor(&self) -> i32 {
        self.stream.as_raw_fd()
    }

    pub fn send(&self, message: &Message<'_>) -> Result<(), ChannelError> {
        let mut frame = [0; MAX_FRAME];
        let length = message.encode(&mut frame)?;
        let _writing = self.writing.lock();
        (&self.stream).write_all(&frame[..length])?;
        Ok(())
    }

    /// Waits for a message, and passes it to `read` with its descriptors.
    fn receive<R>(
        &self,
        read: impl FnOnce(Message<'_>, Vec<OwnedFd>) -> Result<R, ChannelError>,
    ) -> Result<R, ChannelError> {
        let mut header = [0; HEADER_BYTES];
        let mut numbers = [-1; DESCRIPTORS];
        let mut parts = [libc::iovec {
            iov_base: header.as_mut_ptr().cast(),
            iov_len: header.len(),
        }];
        let (count, came) = uninterrupted(|| {
            // SAFETY: the part is the header, which lives longer than the call.
            unsafe { self.stream.recv_with_fds(&mut parts, &mut numbers) }
                .map_err(|error| io::Error::from_raw_os_error(error.errno()))
        })?;
        let descriptors = numbers.into_iter().take(came);
        let descriptors = descriptors.map(|number| {
            // SAFETY: the kernel has made these descriptors for this call, and no other code has them. FD_CLOEXEC keeps
            // them from programs that this one executes.
            unsafe {
                libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC);
                OwnedFd::from_raw_fd(number)
            }
        });
        let descriptors = descriptors.collect();
        if count == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        (&self.stream).read_exact(&mut header[count..])?;
        let header = Header::decode(&header)?;
        let mut body = vec![0; header.body_len];
        (&self.stream).read_exact(&mut body)?;
        read(Message::decode(header.kind, &body)?, descriptors)
    }

    /// Sends the hello and waits for the grant. On a local stream the descriptors of the session's file and of the
    /// socket for files come with it.
    pub fn hello(
        &self,
        protocol_hash: u64,
        environment: &str,
    ) -> Result<(Grant, Vec<OwnedFd>), ChannelError> {
        self.send(&Message::Hello {
            bootstrap_version: wormhole_ring::bootstrap::VERSION,
            protocol_hash,
            features: FEATURE_PROCESS | FEATURE_FILES | FEATURE_WITHIN | FEATURE_FILE_MEMORY,
            environment,
        })?;
        self.receive(|message, descriptors| match message {
            Message::Grant(grant) => Ok((grant, descriptors)),
            Message::Refused { code, reason } => Err(ChannelError::Refused {
                code,
                reason: reason.to_owned(),
            }),
            other => Err(ChannelError::Unexpected {
                found: other.name(),
                wanted: "Grant",
            }),
        })
    }

    /// Requests a run of arena segments, in a `part` of the window or anywhere, and waits for it, until the session is
    /// `over`.
    pub fn request_arena(
        &self,
        segments: u32,
        part: Option<Range<u32>>,
        over: impl Fn() -> bool,
    ) -> Result<ArenaRun, ChannelError> {
        let mut last_id = self.asking.lock();
        *last_id = last_id.wrapping_add(1).max(1);
        let id = *last_id;
        self.send(&match part {
            None => Message::ArenaRequest(ArenaRequest { id, segments }),
            Some(Range { start, end }) => Message::ArenaWithin(ArenaWithin {
                id,
                segments,
                first: start,
                end,
            }),
        })?;
        while self.poll(libc::POLLIN, LOOK) == 0 {
            if over() {
                return Err(ChannelError::Over { segments });
            }
        }
        self.receive(|message, _| match message {
            Message::ArenaGrant(run) if run.id == id && run.count >= segments => Ok(run),
            Message::ArenaDenied(denied) if denied.id == id => Err(ChannelError::ArenaDenied {
                segments,
                code: denied.code,
                limit: denied.limit,
            }),
            other => Err(ChannelError::Unexpected {
                found: other.name(),
                wanted: "ArenaGrant",
            }),
        })
    }

    /// Sleeps at most this long; returns false as soon as the stream has ended.
    pub fn sleep(&self, duration: Duration) -> bool {
        let ended = libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR | libc::POLLNVAL;
        self.poll(libc::POLLRDHUP, duration) & ended == 0
    }

    /// Waits at most this long for one of `events`; returns the events and errors that came. A signal ends the wait.
    fn poll(&self, events: libc::c_short, duration: Duration) -> libc::c_short {
        let mut poll = libc::pollfd {
            fd: self.stream.as_raw_fd(),
            events,
            revents: 0,
        };
        let timeout = libc::timespec {
            tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(duration.subsec_nanos()),
        };
        // SAFETY: both structures outlive the call; no signal mask is passed.
        let ready = unsafe { libc::ppoll(&raw mut poll, 1, &raw const timeout, std::ptr::null()) };
        if ready > 0 { poll.revents } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::thread::JoinHandleExt;
    use std::ptr::null_mut;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::thread::JoinHandle;
    use std::time::Instant;

    use wormhole_ring::control::{ArenaDenied, Refusal};

    use super::*;

    fn pair() -> (Control, Control) {
        let (guest, supervisor) = UnixStream::pair().unwrap();
        (Control::new(guest), Control::new(supervisor))
    }

    #[test]
    fn a_refusal_comes_with_its_reason() {
        let (guest, supervisor) = pair();
        let text = "protocol 1 is not 2";
        supervisor
            .send(&Message::Refused {
                code: Refusal::Version as u32,
                reason: text,
            })
            .unwrap();
        let error = guest.hello(1, "").unwrap_err();
        assert!(matches!(error, ChannelError::Refused { code: 1, ref reason } if reason == text));
    }

    #[test]
    fn arena_is_granted_or_denied() {
        let (guest, supervisor) = pair();
        supervisor
            .send(&Message::ArenaGrant(ArenaRun {
                id: 1,
                first: 40,
                count: 3,
            }))
            .unwrap();
        supervisor
            .send(&Message::ArenaDenied(ArenaDenied {
                id: 2,
                code: 2,
                limit: 6 << 20,
            }))
            .unwrap();
        assert_eq!(guest.request_arena(3, None, || false).unwrap().first, 40);
        assert!(matches!(
            guest.request_arena(9, None, || false),
            Err(ChannelError::ArenaDenied { segments: 9, .. })
        ));
    }

    static SIGNALS: AtomicU64 = AtomicU64::new(0);

    extern "C" fn count(_: libc::c_int) {
        SIGNALS.fetch_add(1, Ordering::Relaxed);
    }

    /// Interrupts a thread repeatedly by a signal that does not restart its system calls.
    fn interrupt<T>(thread: &JoinHandle<T>) {
        const SIGNAL: libc::c_int = libc::SIGUSR1;
        // SAFETY: all zeroes is an action without flags; the handler only counts.
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
    fn a_signal_ends_no_wait_for_a_message() {
        let (guest, supervisor) = pair();
        let waiting = std::thread::spawn(move || {
            let refused = guest.hello(1, "").unwrap_err();
            (refused, guest.request_arena(1, None, || false))
        });
        let asked = |message: Message<'_>, _| Ok(message.name());
        assert_eq!(supervisor.receive(asked).unwrap(), "Hello");
        interrupt(&waiting);
        let refusal = Message::Refused {
            code: 1,
            reason: "",
        };
        supervisor.send(&refusal).unwrap();
        assert_eq!(supervisor.receive(asked).unwrap(), "ArenaRequest");
        interrupt(&waiting);
        let denied = ArenaDenied {
            id: 1,
            code: 2,
            limit: 6 << 20,
        };
        supervisor.send(&Message::ArenaDenied(denied)).unwrap();
        let (refused, denied) = waiting.join().unwrap();
        assert!(matches!(refused, ChannelError::Refused { .. }), "{refused}");
        assert!(matches!(denied, Err(ChannelError::ArenaDenied { .. })));
    }

    #[test]
    fn a_request_for_arena_ends_with_the_session() {
        let (guest, supervisor) = pair();
        assert!(matches!(
            guest.request_arena(2, None, || true),
            Err(ChannelError::Over { segments: 2 })
        ));
        drop(supervisor);
        assert!(matches!(
            guest.request_arena(2, None, || false),
            Err(ChannelError::Stream(_))
        ));
    }

    #[test]
    fn a_sleeper_notices_that_the_other_end_is_gone() {
        let (guest, supervisor) = pair();
        assert!(guest.sleep(Duration::from_micros(10)));
        drop(supervisor);
        let start = Instant::now();
        assert!(!guest.sleep(Duration::from_secs(60)));
        assert!(start.elapsed() < Duration::from_secs(30));
    }
}
