//! Signals for the program: the launcher receives them and passes them on.
//!
//! All threads block the signals, and one thread waits for them. While no program runs they have their default effect on
//! the launcher.

use std::io;
use std::mem;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::{SendFlags, send as send_to};
use rustix::process::Pid;
use wormhole_images::RESIZE;
use wormhole_link::tasks;
use wormhole_lock::Mutex;
use wormhole_privileges::drop_capabilities;

use crate::run::terminal;
use crate::say;

/// Status of a killed program, as shells report it.
pub const KILLED: u8 = 128 + 9;

/// Number of a signal.
pub type Signal = libc::c_int;

/// Signals that are passed to the program.
pub const PASSED: [Signal; 6] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGUSR1,
    libc::SIGUSR2,
];

/// A repetition within this time counts as the same request: timeout(1) signals its child, and then
/// the child's group.
const REPETITION: Duration = Duration::from_millis(500);

/// Returns the name of a passed signal.
pub fn name(signal: Signal) -> &'static str {
    match signal {
        libc::SIGHUP => "SIGHUP",
        libc::SIGINT => "SIGINT",
        libc::SIGQUIT => "SIGQUIT",
        libc::SIGTERM => "SIGTERM",
        libc::SIGUSR1 => "SIGUSR1",
        libc::SIGUSR2 => "SIGUSR2",
        _ => "a signal",
    }
}

/// A set of signals.
#[derive(Clone, Copy)]
pub struct Set(libc::sigset_t);

impl Set {
    pub fn of(signals: &[Signal]) -> Self {
        // SAFETY: all zeros are a valid set; the functions write nothing else and refuse numbers
        // that are no signals.
        unsafe {
            let mut set: libc::sigset_t = mem::zeroed();
            libc::sigemptyset(&raw mut set);
            for &signal in signals {
                libc::sigaddset(&raw mut set, signal);
            }
            Self(set)
        }
    }

    /// Blocks the set in this thread, in threads that it starts, and across an exec.
    pub fn block(&self) {
        // SAFETY: reads the set, and writes no old one.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const self.0, ptr::null_mut()) };
    }

    /// Unblocks the set in this thread.
    pub fn unblock(&self) {
        // SAFETY: as above.
        unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const self.0, ptr::null_mut()) };
    }

    /// Has the process that `command` starts receive the set, which this thread may block.
    pub fn unblock_in(self, command: &mut Command) {
        // SAFETY: between fork and exec this makes one system call and allocates nothing.
        unsafe {
            command.pre_exec(move || {
                self.unblock();
                Ok(())
            });
        }
    }

    /// Waits for a signal of the set, up to `limit`.
    pub fn wait(&self, limit: Option<Duration>) -> Option<Signal> {
        let time = limit.map(|limit| libc::timespec {
            tv_sec: limit.as_secs().try_into().unwrap_or(libc::time_t::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        });
        let limit = time.as_ref().map_or(ptr::null(), ptr::from_ref);
        // SAFETY: set and time outlive the call, which writes no further information on the signal.
        let signal = unsafe { libc::sigtimedwait(&raw const self.0, ptr::null_mut(), limit) };
        (signal > 0).then_some(signal)
    }
}

/// Returns whether the process ignores a signal, as a command under nohup(1) ignores SIGHUP.
pub fn is_ignored(signal: Signal) -> bool {
    // SAFETY: all zeros are a valid sigaction, which the call overwrites; no new action is passed.
    unsafe {
        let mut action: libc::sigaction = mem::zeroed();
        libc::sigaction(signal, ptr::null(), &raw mut action) == 0
            && action.sa_sigaction == libc::SIG_IGN
    }
}

/// Sends a signal to a process. Returns whether the process exists and may be signalled.
pub fn send(process: Pid, signal: Signal) -> bool {
    // SAFETY: kill takes no pointers. rustix has no safe call for real-time signals, which the reaper is sent.
    unsafe { libc::kill(process.as_raw_nonzero().get(), signal) == 0 }
}

/// Ends this process by a signal's default action.
fn end_by(signal: Signal) {
    // SAFETY: the call takes no pointers.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
    Set::of(&[signal]).unblock();
    // SAFETY: the call takes no pointers.
    unsafe { libc::raise(signal) };
}

/// Receives the signals for a program. Returns the time at which it must be called again, without a
/// signal.
pub type Receiver = Box<dyn FnMut(Option<Signal>) -> Option<Instant> + Send>;

/// Signals of the launcher.
#[derive(Clone, Default)]
pub struct Signals(Arc<Mutex<Option<Receiver>>>);

impl Signals {
    /// Receives the signals that are passed, and `others`, from now on. Call it while the process has one thread.
    ///
    /// # Errors
    /// No thread can be created for them.
    pub fn take(others: &[Signal]) -> io::Result<Self> {
        let passed: Vec<Signal> = PASSED
            .into_iter()
            .filter(|signal| !is_ignored(*signal))
            .chain(others.iter().copied())
            .collect();
        let set = Set::of(&passed);
        set.block();
        let signals = Self::default();
        let receiver = signals.clone();
        tasks::spawn("signals", move || {
            // The thread needs no capabilities, and the later confinement of this process changes
            // those of its own thread only. Dropping them fails only if there are none.
            let _ = drop_capabilities();
            let mut wake = None::<Instant>;
            loop {
                let limit = wake.map(|wake| wake.saturating_duration_since(Instant::now()));
                let received = set.wait(limit);
                let due = wake.is_some_and(|wake| wake <= Instant::now());
                if received.is_none() && !due {
                    continue;
                }
                wake = receiver.receive(received);
            }
        })?;
        Ok(signals)
    }

    /// Passes a signal to the receiver. Without a receiver the signal ends this process.
    fn receive(&self, signal: Option<Signal>) -> Option<Instant> {
        let mut receiver = self.0.lock();
        match (receiver.as_mut(), signal) {
            (Some(receive), signal) => receive(signal),
            // The size is asked for when a program starts.
            (None, Some(libc::SIGWINCH)) => None,
            (None, Some(signal)) => {
                end_by(signal);
                None
            }
            (None, None) => None,
        }
    }

    /// Sends the signals to `receiver`, until the guard is dropped.
    pub fn to(&self, receiver: Receiver) -> Passing {
        self.set(Some(receiver));
        Passing(self.clone())
    }

    /// Starts a program and sends the signals to its receiver, until the guard is dropped. A signal
    /// that arrives meanwhile waits: if the start succeeds, it is for the program. The program may be
    /// stopped together with the launcher as soon as it runs.
    ///
    /// # Errors
    /// The error of `start`.
    pub fn to_started<T, E>(
        &self,
        start: impl FnOnce() -> Result<(T, Receiver), E>,
    ) -> Result<(T, Passing), E> {
        let mut receiver = self.0.lock();
        let (started, passed) = start()?;
        *receiver = Some(passed);
        drop(receiver);
        Ok((started, Passing(self.clone())))
    }

    fn set(&self, receiver: Option<Receiver>) {
        *self.0.lock() = receiver;
    }
}

/// Guard: signals are passed on while it lives.
#[must_use]
pub struct Passing(Signals);

impl Drop for Passing {
    /// Keeps ignoring single signals: one that ended the program may arrive here after the
    /// program's end, and the exit status must still be the program's. A second request ends the
    /// launcher, in case it hangs.
    fn drop(&mut self) {
        let mut grace = Grace::new(Duration::MAX);
        self.0.set(Some(Box::new(move |signal| {
            if let Some(signal) = signal
                && signal != libc::SIGWINCH
                && grace.count(signal, Instant::now()).is_some()
            {
                end_by(signal);
            }
            None
        })));
    }
}

/// Reason why a program is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Patience {
    #[error("a second signal came: the program is killed")]
    Repeated,
    #[error("the program has not ended within {} s of {}: it is killed", .0.as_secs(), name(*.1))]
    Exhausted(Duration, Signal),
}

/// Returns a receiver that passes signals to a machine's first process, which sends them to its
/// program, and the sizes of this terminal, if the program has one. It calls `end` when the program must be killed.
pub fn to_machine(
    stream: UnixStream,
    has_terminal: bool,
    grace: Duration,
    mut end: impl FnMut() + Send + 'static,
) -> Receiver {
    let mut grace = Grace::new(grace);
    let write = move |bytes: &[u8]| {
        // A machine that reads nothing must not block the launcher, and one that is gone has no
        // program.
        let _ = send_to(&stream, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    };
    let resize = || [&[RESIZE][..], &terminal::size().to_bytes()].concat();
    if has_terminal {
        // It may have another size than when the machine was started.
        write(&resize());
    }
    Box::new(move |signal| {
        let now = Instant::now();
        let patience = match signal {
            Some(libc::SIGWINCH) => {
                write(&resize());
                None
            }
            Some(signal) => {
                write(&[u8::try_from(signal).unwrap_or_default()]);
                grace.count(signal, now)
            }
            None => grace.exhausted(now),
        };
        if let Some(patience) = patience {
            say::line(format_args!("{patience}"));
            end();
            return None;
        }
        grace.end()
    })
}

/// Time that a program has to end after the first request, unless another follows.
#[derive(Clone, Copy, Debug)]
pub struct Grace {
    time: Duration,
    asked: Option<(Instant, Signal)>,
}

impl Grace {
    pub fn new(time: Duration) -> Self {
        Self { time, asked: None }
    }

    /// Counts a signal. Returns a reason to kill the program if it is a second request to end.
    pub fn count(&mut self, signal: Signal, now: Instant) -> Option<Patience> {
        if matches!(signal, libc::SIGUSR1 | libc::SIGUSR2) {
            return None;
        }
        match self.asked {
            Some((first, _)) => {
                (now.duration_since(first) >= REPETITION).then_some(Patience::Repeated)
            }
            None => {
                self.asked = Some((now, signal));
                None
            }
        }
    }

    /// Returns the time at which the program must be killed. None without a request, or if the time
    /// is out of range.
    pub fn end(&self) -> Option<Instant> {
        self.asked
            .and_then(|(first, _)| first.checked_add(self.time))
    }

    /// Returns the reason to kill the program, once that time has come.
    pub fn exhausted(&self, now: Instant) -> Option<Patience> {
        let (_, signal) = self.asked?;
        self.end()
            .is_some_and(|end| end <= now)
            .then_some(Patience::Exhausted(self.time, signal))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_signal_that_comes_while_a_program_starts_is_the_programs() {
        let signals = Signals::default();
        let (sender, received) = mpsc::channel();
        let start = || {
            let (begun, begins) = mpsc::channel();
            let own = signals.clone();
            let comes = std::thread::spawn(move || {
                begun.send(()).expect("it is awaited");
                own.receive(Some(libc::SIGUSR1))
            });
            begins.recv().expect("the thread runs");
            assert!(signals.0.try_lock().is_none(), "the signal must wait");
            let receiver: Receiver = Box::new(move |signal| {
                sender.send(signal).expect("it is awaited");
                None
            });
            Ok::<_, ()>((comes, receiver))
        };
        let (comes, passing) = signals.to_started(start).expect("it starts");
        comes.join().expect("it was received");
        assert_eq!(received.recv(), Ok(Some(libc::SIGUSR1)));
        drop(passing);
    }

    #[test]
    fn a_second_request_or_the_end_of_the_time_ends_the_program() {
        let start = Instant::now();
        let after = |millis| start + Duration::from_millis(millis);
        let mut grace = Grace::new(Duration::from_secs(5));
        assert_eq!(grace.count(libc::SIGUSR1, start), None);
        assert_eq!(grace.end(), None);
        assert_eq!(grace.count(libc::SIGTERM, start), None);
        assert_eq!(grace.end(), Some(after(5_000)));
        // The same request again, as timeout(1) sends it.
        assert_eq!(grace.count(libc::SIGTERM, after(20)), None);
        assert_eq!(grace.count(libc::SIGUSR2, after(3_000)), None);
        assert_eq!(grace.exhausted(after(4_999)), None);
        assert_eq!(
            grace.count(libc::SIGINT, after(600)),
            Some(Patience::Repeated)
        );
        let end = grace.exhausted(after(5_000)).expect("the time is over");
        assert_eq!(
            end.to_string(),
            "the program has not ended within 5 s of SIGTERM: it is killed"
        );
    }
}
