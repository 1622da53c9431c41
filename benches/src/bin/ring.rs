//! Measures the exitless path: a payload in a VM is the producer of a ring, a host thread its consumer.
//!
//! - round trip of a request, compared with a ping-pong on two words between the same processors;
//! - cost of a record to its caller while the consumer reads and the ring is not empty;
//! - the same round trip by a doorbell, and by a socket, with the exits of each;
//! - VM exits per call over a long run, minus those of a control run of the same duration that spins on
//!   private memory.

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use clap::Parser;
use wormhole_benches::failure;
use wormhole_benches::payload::{BenchError, Beside, Window, guest_address, run};
use wormhole_benches::samples::{nanoseconds, timestamp_period};
use wormhole_benches::transports;
use wormhole_figures::{Report, Unit};
use wormhole_ring::layout::SEGMENT_BYTES;
use wormhole_ring::ring::RecordBuf;

const BURST: u64 = 100;
/// Number of records that the consumer leaves in the ring.
const BACKLOG: u64 = 1_000;

/// Segment of the session. Segment 0 holds the bootstrap structure; samples begin at segment 2.
const SESSION: usize = 1;
const SAMPLES: usize = 2 * SEGMENT_BYTES;
const SEGMENTS: usize = 4;

#[derive(Debug, Parser)]
struct Options {
    /// Write the figures as JSON to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// The folder of the built payloads.
    #[arg(long)]
    payloads: PathBuf,
    /// Number of calls of the exit measurement; the others are in proportion. Only the default measures.
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(1_000..=1_000_000))]
    calls: u64,
}

impl Options {
    /// Returns the number of round trips, timed one by one.
    fn rounds(&self) -> u64 {
        self.calls / 5
    }

    /// Returns the number of calls before exits are counted. By then each page of the ring has been accessed once;
    /// first accesses are page faults.
    fn warm(&self) -> u64 {
        self.calls / 25
    }

    /// Returns the number of round trips with exits.
    fn rings(&self) -> u64 {
        self.calls / 20
    }

    fn bursts(&self) -> u64 {
        self.calls / 100
    }
}

/// Exits of a run, and of one that spins for as long.
#[derive(Debug)]
struct Exits {
    calls: u64,
    length: Duration,
    run: u64,
    control: u64,
}

fn main() -> ExitCode {
    match measure(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure("ring", &*error),
    }
}

fn measure(options: &Options) -> Result<(), Box<dyn Error>> {
    let mut report = Report::new(
        "ring",
        &["ring", "doorbell", "socket", "control"],
        &["control"],
        1,
    );
    let period = timestamp_period();
    let ping_pong = ping_pong(options, period)?;
    let round_trip = round_trip(options, period)?;
    let doorbell = transports::doorbell(&options.payloads, options.rings())?;
    let socket = transports::socket(&options.payloads, options.rings())?;
    report.add_once(
        "round trip of a request",
        "control: ping-pong on two words",
        Unit::Nanoseconds,
        vec![
            round_trip,
            doorbell.round_trip,
            socket.round_trip,
            ping_pong,
        ],
    );
    let (records, empty) = records(options, period)?;
    report.add_once(
        "record, to its caller",
        &format!(
            "bursts of {BURST}, {empty} of {} on an empty ring",
            options.bursts()
        ),
        Unit::Nanoseconds,
        vec![records],
    );
    let exits = exits(options)?;
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    let per_call = |count: u64| vec![count as f64 / exits.calls as f64];
    report.add_once(
        "exits per call",
        &format!(
            "{} and {} in {} calls and {:.2} s; control: as long on private memory",
            exits.run,
            exits.control,
            exits.calls,
            exits.length.as_secs_f64()
        ),
        Unit::Exits,
        vec![
            per_call(exits.run),
            vec![doorbell.exits_per_call],
            vec![socket.exits_per_call],
            per_call(exits.control),
        ],
    );
    Ok(report.finish(options.json.as_deref())?)
}

fn ping_pong(options: &Options, period: f64) -> Result<Vec<f64>, BenchError> {
    let window = Window::new(SEGMENTS)?;
    // Places the words in separate cache lines, as a record and its answer slot.
    let (ping, pong) = (SEGMENT_BYTES, SEGMENT_BYTES + 4096);
    let rounds = options.rounds();
    let parameters = vec![
        guest_address(ping),
        guest_address(pong),
        rounds,
        guest_address(SAMPLES),
    ];
    run(
        &options.payloads,
        "pingpong",
        parameters,
        &window,
        |beside| {
            let (ping, pong) = (window.word(ping), window.word(pong));
            for round in 1..=rounds {
                // SYNC POINT: ping, with the payload's store.
                while ping.load(Ordering::Acquire) != round {
                    beside.goes_on()?;
                    std::hint::spin_loop();
                }
                // SYNC POINT: pong, with the payload's load.
                pong.store(round, Ordering::Release);
            }
            Ok(())
        },
    )?;
    Ok(nanoseconds(&window.words(SAMPLES, rounds), period, 1.0))
}

fn round_trip(options: &Options, period: f64) -> Result<Vec<f64>, BenchError> {
    let window = Window::new(SEGMENTS)?;
    let rounds = options.rounds();
    let parameters = vec![
        guest_address(SESSION * SEGMENT_BYTES),
        rounds,
        guest_address(SAMPLES),
    ];
    run(
        &options.payloads,
        "requests",
        parameters,
        &window,
        |beside| answer(&window, (options.warm(), rounds), beside, |_| Ok(())),
    )?;
    Ok(nanoseconds(&window.words(SAMPLES, rounds), period, 1.0))
}

/// Answers `count` requests. Calls `at` after the first `warm` answers and after the last one.
fn answer(
    window: &Window,
    (warm, count): (u64, u64),
    beside: &Beside,
    mut at: impl FnMut(u64) -> Result<(), BenchError>,
) -> Result<(), BenchError> {
    let session = window.session(SESSION)?;
    let (mut consumer, slots) = transports::ends(session);
    let mut buffer = RecordBuf::new();
    let payload = [0; 16];
    let mut answered = 0;
    while answered < count {
        let Some(head) = consumer.take(&mut buffer)? else {
            beside.goes_on()?;
            std::hint::spin_loop();
            continue;
        };
        let slot = head.slot.ok_or(BenchError::Missing("answer slot"))?;
        slots.publish(slot, head.sequence, 0, &[&payload])?;
        answered += 1;
        if answered == warm || answered == count {
            at(answered)?;
        }
    }
    Ok(())
}

fn records(options: &Options, period: f64) -> Result<(Vec<f64>, u64), BenchError> {
    let window = Window::new(SEGMENTS)?;
    let parameters = vec![
        guest_address(SESSION * SEGMENT_BYTES),
        options.bursts(),
        BURST,
        guest_address(SAMPLES),
    ];
    let empty = run(
        &options.payloads,
        "records",
        parameters,
        &window,
        |beside| {
            let session = window.session(SESSION)?;
            let (mut consumer, _) = transports::ends(session);
            let mut buffer = RecordBuf::new();
            let mut taken = 0;
            let total = options.bursts() * BURST;
            while taken < total {
                if taken + BACKLOG < total {
                    beside.goes_on()?;
                }
                // Takes all records except the backlog, and the backlog too once the payload has written its last
                // record.
                let written = beside.parameters.load(4).unwrap_or(0);
                let left = if written == total { 0 } else { BACKLOG };
                while taken + left < written {
                    if consumer.take(&mut buffer)?.is_some() {
                        taken += 1;
                    }
                }
            }
            Ok(beside.parameters.load(5).unwrap_or(0))
        },
    )?;
    #[expect(clippy::cast_precision_loss, reason = "a small constant")]
    let parts = BURST as f64;
    Ok((
        nanoseconds(&window.words(SAMPLES, options.bursts()), period, parts),
        empty,
    ))
}

fn exits(options: &Options) -> Result<Exits, BenchError> {
    let window = Window::new(SEGMENTS)?;
    let parameters = vec![guest_address(SESSION * SEGMENT_BYTES), options.calls, 0];
    let (during, length) = run(
        &options.payloads,
        "requests",
        parameters,
        &window,
        |beside| {
            let mut moments = Vec::new();
            answer(&window, (options.warm(), options.calls), beside, |_| {
                moments.push((Instant::now(), beside.exits()?));
                Ok(())
            })?;
            match moments[..] {
                [(begin, before), (end, after)] => Ok((after - before, end - begin)),
                _ => Err(BenchError::Missing("measurement of exits")),
            }
        },
    )?;
    let control = run(&options.payloads, "spin", vec![0, 0], &window, |beside| {
        // Same duration as the measured part of the run. This thread spins as it does there.
        let exits_until = |end: Instant| {
            while Instant::now() < end {
                beside.goes_on()?;
                std::hint::spin_loop();
            }
            beside.exits()
        };
        let before = exits_until(Instant::now() + Duration::from_millis(50))?;
        let after = exits_until(Instant::now() + length)?;
        beside.parameters.store(1, 1);
        Ok(after - before)
    })?;
    Ok(Exits {
        calls: options.calls - options.warm(),
        length,
        run: during,
        control,
    })
}
