//! Round trips of a payload by other transports than the window alone, with the VM exits of each.
//!
//! By the *doorbell* the payload writes a request into the ring, rings by a port, and waits. The host's thread sleeps until
//! the doorbell rings, answers, and ends the wait. By the *socket* the payload writes a message for a device, rings and waits.
//! The device's thread passes the message to a Unix socket, whose server answers on another thread, passes the answer back
//! and ends the wait. A wait is an exit that lasts, where a kernel halts until an interrupt comes.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::Ordering;

use vmm_sys_util::eventfd::EventFd;
use wormhole_monitor::payload::Doorbell;
use wormhole_ring::layout::SEGMENT_BYTES;
use wormhole_ring::memory::SessionMemory;
use wormhole_ring::ring::{Consumer, RecordBuf};
use wormhole_ring::slot::AnswerSlots;
use wormhole_ring::stream::{pass_on, serve};

use crate::payload::{BenchError, Beside, Window, guest_address, run_rung};
use crate::samples::{nanoseconds, timestamp_period};

/// Segment of the session, or of the messages. Samples begin at segment 2.
const SESSION: usize = 1;
const SAMPLES: usize = 2 * SEGMENT_BYTES;
const SEGMENTS: usize = 4;

/// Round trips, and the VM's exits for each.
#[derive(Debug)]
pub struct Counted {
    /// Nanoseconds.
    pub round_trip: Vec<f64>,
    pub exits_per_call: f64,
}

/// Events of a doorbell, and the host's copies of them.
#[derive(Debug)]
pub struct Bell {
    rung: EventFd,
    done: EventFd,
}

impl Bell {
    /// Returns the host's end and the VM's.
    pub fn new() -> Result<(Self, Doorbell), BenchError> {
        let event = || EventFd::new(libc::EFD_CLOEXEC).map_err(BenchError::File);
        let (rung, done) = (event()?, event()?);
        let bell = Self {
            rung: rung.try_clone().map_err(BenchError::File)?,
            done: done.try_clone().map_err(BenchError::File)?,
        };
        Ok((bell, Doorbell { rung, done }))
    }

    /// Sleeps until the payload rings, or has ended.
    pub fn wait(&self, beside: &Beside) -> Result<(), BenchError> {
        self.rung.read().map_err(BenchError::File)?;
        beside.goes_on()
    }

    /// Ends the payload's wait.
    pub fn answer(&self) -> Result<(), BenchError> {
        self.done.write(1).map_err(BenchError::File)
    }
}

/// Returns the consumer of a session's ring, and its answer slots. The calling thread must be the only one that has them.
pub fn ends(session: SessionMemory) -> (Consumer, AnswerSlots) {
    // SAFETY: this process has no other consumer, and no other writer of answer slots.
    unsafe { (Consumer::new(session.clone()), AnswerSlots::new(session)) }
}

/// Measures requests by the doorbell.
pub fn doorbell(payloads: &Path, calls: u64) -> Result<Counted, BenchError> {
    let window = Window::new(SEGMENTS)?;
    let parameters = vec![
        guest_address(SESSION * SEGMENT_BYTES),
        calls,
        guest_address(SAMPLES),
        0,
        0,
        1,
    ];
    let (bell, doorbell) = Bell::new()?;
    let exits = run_rung(
        payloads,
        "requests",
        parameters,
        &window,
        Some(doorbell),
        |beside| {
            let session = window.session(SESSION)?;
            let (mut consumer, slots) = ends(session);
            let mut buffer = RecordBuf::new();
            exits(beside, calls, || {
                bell.wait(beside)?;
                let head = consumer.take(&mut buffer)?;
                let head = head.ok_or(BenchError::Missing("request behind the doorbell"))?;
                let slot = head.slot.ok_or(BenchError::Missing("answer slot"))?;
                slots.publish(slot, head.sequence, 0, &[&[0; 16]])?;
                bell.answer()
            })
        },
    )?;
    Ok(counted(&window, calls, exits))
}

/// Measures requests by the socket.
pub fn socket(payloads: &Path, calls: u64) -> Result<Counted, BenchError> {
    let window = Window::new(SEGMENTS)?;
    let buffer = SESSION * SEGMENT_BYTES;
    let parameters = vec![guest_address(buffer), calls, guest_address(SAMPLES)];
    let (bell, doorbell) = Bell::new()?;
    let exits = run_rung(
        payloads,
        "messages",
        parameters,
        &window,
        Some(doorbell),
        |beside| {
            let (near, far) = UnixStream::pair().map_err(BenchError::File)?;
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    serve(far, |_, data| {
                        data.clear();
                        data.resize(16, 0);
                        Ok(0)
                    })
                });
                let near = near;
                let mut data = Vec::new();
                exits(beside, calls, || {
                    bell.wait(beside)?;
                    carry(&window, buffer, &near, &mut data)?;
                    bell.answer()
                })
            })
        },
    )?;
    Ok(counted(&window, calls, exits))
}

/// Carries a message of a payload to a stream, and tells the payload that the answer is there.
pub fn carry(
    window: &Window,
    buffer: usize,
    stream: &UnixStream,
    data: &mut Vec<u8>,
) -> Result<(), BenchError> {
    let bytes = usize::try_from(window.word(buffer).load(Ordering::Acquire)).unwrap_or(0);
    let words = window.words(buffer + 8, bytes.div_ceil(8) as u64);
    let message: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let message = message.get(..bytes).ok_or(BenchError::Missing("message"))?;
    pass_on(stream, message, data)?;
    window.word(buffer).store(0, Ordering::Release);
    Ok(())
}

/// Calls `answer` for each call, and returns the exits for each. Counts from the second quarter on, when all pages have been accessed.
pub fn exits(
    beside: &Beside,
    calls: u64,
    mut answer: impl FnMut() -> Result<(), BenchError>,
) -> Result<f64, BenchError> {
    let warm = calls / 4;
    for _ in 0..warm {
        answer()?;
    }
    let before = beside.exits()?;
    for _ in warm..calls {
        answer()?;
    }
    let exits = beside.exits()? - before;
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    let exits_per_call = exits as f64 / (calls - warm) as f64;
    Ok(exits_per_call)
}

fn counted(window: &Window, calls: u64, exits_per_call: f64) -> Counted {
    Counted {
        round_trip: nanoseconds(&window.words(SAMPLES, calls), timestamp_period(), 1.0),
        exits_per_call,
    }
}
