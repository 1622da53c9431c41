//! Measures how soon waiting threads are released after the worker has found their context dead.
//!
//! The worker publishes the error in the session's status word. The test polls that word from outside, in the session
//! file that the supervisor holds. The last poll that found 0 began before the error was published, so a time measured
//! from there is never too short.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use wormhole_ring::layout::{SEGMENT_BYTES, session};

use crate::harness::{PATIENCE, Underway, descendants, program, wormhole};

/// Segment of a window's first session: the first one behind the bootstrap's.
const SESSION_SEGMENT: u64 = 1;

/// Attempts to see the error. The memory of an ended session is cleared, which a busy machine may do before the next look.
const ATTEMPTS: usize = 5;

/// Promised limit.
const LIMIT: Duration = Duration::from_millis(100);

/// Asserts that eight threads that wait for one fault all return soon after its detection.
pub fn are_released_after_detection(device: &str) {
    let after = (0..ATTEMPTS).find_map(|_| released(device));
    let after = after.expect("a look at the error");
    assert_eq!(after.len(), 8, "{after:?}");
    assert!(after.iter().all(|after| *after <= LIMIT), "{after:?}");
}

/// Returns the time from the detection to each thread's return with the fault's error; none if no look saw the error.
fn released(device: &str) -> Option<Vec<Duration>> {
    let mut run = Underway::start(
        wormhole(&["run", "--placement", "process", "--device", device, "--"])
            .arg(program("static", "eight_waiters"))
            .stdin(Stdio::piped()),
    );
    assert_eq!(run.working(), "waiting\n");
    let memory = session_file(run.id());
    let (looking, looks) = channel();
    let ended = Arc::new(AtomicBool::new(false));
    let over = Arc::clone(&ended);
    let observer = std::thread::spawn(move || {
        last_look_before_the_error(&memory, &over, || {
            looking.send(()).expect("the test waits for it");
        })
    });
    looks.recv_timeout(PATIENCE).expect("the word is looked at");
    run.write_line("fault");
    let finished = run.finish();
    ended.store(true, Ordering::Release);
    let detected = observer.join().expect("the file can be read");
    assert!(
        finished.status.success(),
        "{}\n{}",
        finished.stdout,
        finished.stderr
    );
    let detected = detected?;
    let lines = finished.stdout.lines();
    let after = lines
        .filter_map(|line| {
            line.split_once(": cudaErrorIllegalAddress at ")?
                .1
                .strip_suffix(" ns")?
                .parse()
                .ok()
        })
        .map(|end| {
            Duration::from_nanos(end)
                .checked_sub(detected)
                .expect("a thread returned before the error was published")
        });
    Some(after.collect())
}

/// Opens the file of a run's only session, which its supervisor and its worker hold.
fn session_file(pid: u32) -> File {
    descendants(pid)
        .into_iter()
        .flat_map(|child| std::fs::read_dir(format!("/proc/{child}/fd")))
        .flat_map(|folder| folder.flatten())
        .map(|entry| entry.path())
        .find(|path| {
            std::fs::read_link(path)
                .is_ok_and(|target| target.to_string_lossy().contains("wormhole-session"))
        })
        .and_then(|path| File::open(path).ok())
        .expect("somebody has the session's file")
}

/// Polls the status word until it holds an error, or the run has ended. Returns the time before the last poll that found no
/// error.
fn last_look_before_the_error(
    memory: &File,
    ended: &AtomicBool,
    looked: impl Fn(),
) -> Option<Duration> {
    let word = SESSION_SEGMENT * SEGMENT_BYTES as u64 + session::STATUS as u64;
    let mut last = None;
    loop {
        let (before, is_over) = (now(), ended.load(Ordering::Acquire));
        let mut status = [0; 8];
        memory
            .read_exact_at(&mut status, word)
            .expect("the file can be read");
        if status != [0; 8] {
            return Some(last.expect("the error was there before the fault"));
        }
        if is_over {
            return None;
        }
        if last.replace(before).is_none() {
            looked();
        }
    }
}

/// Reads CLOCK_MONOTONIC, which the program reads as well.
fn now() -> Duration {
    Duration::try_from(clock_gettime(ClockId::Monotonic)).expect("it is not negative")
}
