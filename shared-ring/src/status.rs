//! Status word of a session and the other words of its header page.
//!
//! The status word is 0 while the session lives and is set once: by the worker when its context is dead, or by the
//! supervisor when the worker is. Every wait and every forwarded call of the guest reads it.

use crate::{
    layout::session,
    memory::SessionMemory,
    sync::{Ordering, SyncPoint},
};

/// Facts about the executor, for threads that wait for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Executor {
    /// The processor that it runs on, as its own system numbers them.
    pub processor: Option<u32>,
    /// Whether the device computes without the system's processors, so that a thread that spins takes none from it.
    pub device_is_apart: bool,
}

/// Causes for the end of a session. The numbers are part of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum EndCause {
    /// The device's context is dead after a fault. The result is the device's own error.
    ContextDead = 1,
    /// The worker died or was killed.
    WorkerLost = 2,
    /// The supervisor is gone.
    SupervisorLost = 3,
    /// The guest wrote an entry to its ring that no correct frontend writes.
    Violation = 4,
    /// The session was revoked, by quota or by an administrator.
    Revoked = 5,
    /// The backend's operating system refused a resource, most often a thread.
    SystemLimit = 6,
}

impl EndCause {
    /// Returns the cause with this number.
    #[must_use]
    pub const fn from_code(code: u32) -> Option<Self> {
        Some(match code {
            1 => Self::ContextDead,
            2 => Self::WorkerLost,
            3 => Self::SupervisorLost,
            4 => Self::Violation,
            5 => Self::Revoked,
            6 => Self::SystemLimit,
            _ => return None,
        })
    }

    /// Returns the cause for a device's error that ends its session.
    #[must_use]
    pub const fn of_device(result: u32) -> Self {
        /// `CUDA_ERROR_OPERATING_SYSTEM`.
        const OPERATING_SYSTEM: u32 = 304;
        match result {
            OPERATING_SYSTEM => Self::SystemLimit,
            _ => Self::ContextDead,
        }
    }

    /// Returns a short sentence for a log.
    #[must_use]
    pub const fn describe(self) -> &'static str {
        match self {
            Self::ContextDead => "the device's context is dead after a fault",
            Self::WorkerLost => "the backend's worker died",
            Self::SupervisorLost => "the backend's supervisor is gone",
            Self::Violation => "the session's ring was corrupted by the guest",
            Self::Revoked => "the backend revoked the session",
            Self::SystemLimit => {
                "the backend's system refuses threads: the limit of processes and threads is reached \
                 (RLIMIT_NPROC, pids.max of a cgroup, or kernel.threads-max)"
            }
        }
    }
}

/// Content of a status word that is not 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cause {
    /// The `CUresult` that every further call returns.
    pub result: u32,
    /// Number of the cause; see [`EndCause::from_code`].
    pub cause: u32,
}

/// The status word of a session, for both sides.
///
/// ```
/// use wormhole_ring::{memory::OwnedMemory, status::{Cause, EndCause, Status}};
/// let region = OwnedMemory::segments(1);
/// // SAFETY: the region outlives the status word.
/// let status = Status::new(unsafe { region.session(0) }.unwrap());
/// assert_eq!(status.load(), None);
/// assert!(status.set_once(719, EndCause::ContextDead));
/// assert!(!status.set_once(999, EndCause::WorkerLost));
/// assert_eq!(status.load(), Some(Cause { result: 719, cause: EndCause::ContextDead as u32 }));
/// ```
#[derive(Clone, Debug)]
pub struct Status {
    memory: SessionMemory,
}

impl Status {
    /// Creates the view of the status word in `memory`.
    #[must_use]
    pub fn new(memory: SessionMemory) -> Self {
        Self { memory }
    }

    /// Loads the cause for the session's end, or `None` while it lives.
    #[inline]
    #[must_use]
    pub fn load(&self) -> Option<Cause> {
        // SYNC POINT: status.
        let word = self
            .memory
            .word(session::STATUS)
            .load(SyncPoint::Status.acquire());
        #[expect(clippy::cast_possible_truncation, reason = "two halves of one word")]
        (word != 0).then_some(Cause {
            result: word as u32,
            cause: (word >> 32) as u32,
        })
    }

    /// Ends the session with `result` unless it has ended already, and wakes its waiting threads. Returns whether this
    /// call ended it.
    pub fn set_once(&self, result: u32, cause: EndCause) -> bool {
        let word = u64::from(cause as u32) << 32 | u64::from(result);
        // SYNC POINT: status.
        let first = self
            .memory
            .word(session::STATUS)
            .compare_exchange(0, word, SyncPoint::Status.release(), Ordering::Relaxed)
            .is_ok();
        #[cfg(all(feature = "std", not(loom)))]
        if first {
            let waits = crate::waits::Waits::new(self.memory.clone());
            waits.fence_before_look();
            waits.wake();
        }
        first
    }

    /// Loads what the executor last wrote of itself: a hint that decides nothing but how to wait.
    #[inline]
    #[must_use]
    pub fn executor(&self) -> Executor {
        let word = self.memory.word(session::EXECUTOR).load(Ordering::Relaxed);
        Executor {
            processor: u32::try_from(word & 0xffff_ffff)
                .ok()
                .and_then(|number| number.checked_sub(1)),
            device_is_apart: word >> 32 & 1 != 0,
        }
    }

    /// Writes what the executor says of itself.
    pub fn set_executor(&self, executor: Executor) {
        let number = executor
            .processor
            .map_or(0, |number| number.saturating_add(1));
        let word = u64::from(executor.device_is_apart) << 32 | u64::from(number);
        self.memory
            .word(session::EXECUTOR)
            .store(word, Ordering::Relaxed);
    }

    /// Loads the generation that the supervisor wrote before it granted the session.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the generation is 32 bits wide"
    )]
    pub fn generation(&self) -> u32 {
        self.memory
            .word(session::GENERATION)
            .load(Ordering::Relaxed) as u32
    }

    /// Loads the number of calls that the guest claims to have answered by itself: a hint that decides nothing.
    #[must_use]
    pub fn local_calls(&self) -> u64 {
        self.memory
            .word(session::LOCAL_CALLS)
            .load(Ordering::Relaxed)
    }

    /// Writes the number of calls answered in the guest.
    #[inline]
    pub fn set_local_calls(&self, calls: u64) {
        self.memory
            .word(session::LOCAL_CALLS)
            .store(calls, Ordering::Relaxed);
    }
}
