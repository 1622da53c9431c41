//! Workers that crash of themselves, as a faulty driver does: in the executor, in a job thread, and
//! after overwriting all memory that the worker can write.
//!
//! A signal from another process does not crash a worker: it is the init process of its PID
//! namespace, so the kernel discards the signal. The test executable plays the workers, so it
//! parses its arguments itself.

#[path = "../../worker/tests/support/mod.rs"]
mod support;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use support::recorder::Recorder;
use wormhole_api::{
    ContextGetLimit, Event, EventQuery, EventRecord, Fence, FenceWrite, Handle, MemAlloc,
    MemAllocReply, MemFree, PROTOCOL_HASH, ShareEvent, ShareEventReply, SharedEventCreate,
    StreamCreate, StreamWaitEvent, Synchronize,
};
use wormhole_backend_tests::backend::{Backend, PATIENCE, Workers, is_running, wait_until};
use wormhole_backend_tests::guest::{Guest, Reply};
use wormhole_backend_tests::random::Random;
use wormhole_backend_tests::stub::{self, Stub};
use wormhole_link::memory::Mapping;
use wormhole_ring::bootstrap;
use wormhole_ring::control::{Attach, Message, Observe, Refusal};
use wormhole_worker::Tuning;
use wormhole_worker::lanes::Plan;

const SEGMENTS: u64 = 33;
const NOT_READY: u32 = wormhole_api::CuResult::NOT_READY.0;
/// Environment variable in which a guest passes an event's token to its worker.
const TOKEN: &str = "CUDA_MODULE_LOADING";
/// Contents of a guest's arena.
const KEPT: [u8; 16] = *b"what guests keep";
/// Numbers of the copies of this executable, installed alone or beside the real worker.
const CRASHING: u64 = 0;
const SCRIBBLING: u64 = 1;
/// Status word that guests read after their worker is lost: `CUDA_ERROR_CONTEXT_IS_DESTROYED`, and
/// the cause.
const LOST: (u32, u32) = (709, 2);

/// Ways to crash: the number that makes the device crash, a description, and the possible signals.
const WAYS: [(u32, &str, &[i32]); 5] = [
    (1001, "a write to address 0", &[libc::SIGSEGV]),
    (1002, "an instruction that there is not", &[libc::SIGILL]),
    (1003, "a division by zero", &[libc::SIGFPE]),
    // The kernel discards a signal that the init process of a namespace sends itself, so abort goes
    // on to execute an invalid instruction.
    (1004, "abort", &[libc::SIGABRT, libc::SIGSEGV, libc::SIGILL]),
    (
        1005,
        "a stack that is used up",
        &[libc::SIGABRT, libc::SIGSEGV, libc::SIGILL],
    ),
];

fn main() {
    stub::main(
        &[
            (
                "a_crash_ends_its_session_with_an_error_and_no_other",
                a_crash_ends_its_session_with_an_error_and_no_other,
            ),
            (
                "a_worker_that_overwrites_all_it_can_and_crashes_harms_its_own_session_alone",
                a_worker_that_overwrites_all_it_can_and_crashes_harms_its_own_session_alone,
            ),
        ],
        worker,
    );
}

fn worker(stub: Stub) {
    if stub.protocol == stub::protocol(CRASHING) {
        serve_until_crash(stub);
    } else {
        scribble(stub);
    }
}

/// Serves as a real worker does, on a device that crashes on a guest's request and never completes
/// a synchronization.
fn serve_until_crash(stub: Stub) {
    wormhole_worker::reserve_bands().unwrap();
    let mut device = Recorder::new();
    device.crash = Some(crash);
    device.hold("synchronize");
    device.withholds_fences.store(true, Ordering::Relaxed);
    let socket = Arc::new(stub.into_socket());
    let (linger, lanes) = (Duration::ZERO, Plan::none());
    let status = wormhole_worker::run_on(
        vec![Arc::new(device)],
        Tuning {
            linger,
            lanes,
            ..Tuning::default()
        },
        socket,
    );
    std::process::exit(status.unwrap_or(1));
}

fn crash(number: u32) {
    match number {
        // SAFETY: none; the access is to crash the process.
        1001 => unsafe { std::ptr::null_mut::<u32>().write_volatile(1) },
        // SAFETY: as above.
        1002 => unsafe { std::arch::asm!("ud2") },
        // SAFETY: as above.
        1003 => unsafe {
            std::arch::asm!("xor {0:e}, {0:e}", "div {0:e}", out(reg) _, out("eax") _, out("edx") _);
        },
        1004 => std::process::abort(),
        1005 => {
            let _ = use_up(number);
        }
        _ => {}
    }
}

/// Recurses until the stack overflows.
#[expect(unconditional_recursion, reason = "it is to crash")]
fn use_up(depth: u32) -> u32 {
    let frame = std::hint::black_box([depth; 1024]);
    use_up(frame[0] + 1) + frame[1]
}

/// Takes a session and the words of its neighbour's event, overwrites these, the session's memory
/// and its counters with random bytes for some rounds, and crashes.
fn scribble(mut stub: Stub) {
    let token = std::env::var(TOKEN).unwrap();
    let event = stub_event(&mut stub, &token);
    let random = Random::new(u64::from(std::process::id()));
    let maps = event.map(|file| {
        let file = File::from(file);
        let bytes = usize::try_from(rustix::fs::fstat(&file).unwrap().st_size).unwrap();
        (Mapping::new(&file, 0, bytes).unwrap(), bytes)
    });
    for round in 0..4 {
        for (map, bytes) in &maps {
            for word in (0..*bytes).step_by(8) {
                let value = match round {
                    0 => u64::MAX,
                    _ => random.next(),
                };
                // SAFETY: inside the mapping; concurrent readers see either value.
                unsafe { map.base().add(word).cast::<u64>().write_volatile(value) };
            }
        }
        stub.say(&format!("round {round} of scribbling"));
    }
    // Wait until the guest returns arena, which it does after the test's checks.
    while stub.take_removal().is_none() {
        std::thread::yield_now();
    }
    crash(1001);
}

/// Returns the files of the session's memory, its counters and the words of an event.
fn stub_event(stub: &mut Stub, token: &str) -> [OwnedFd; 3] {
    let given = stub.take_session();
    let token = u128::from_str_radix(token, 16).unwrap();
    [given.window, given.counters, stub.fetch_event(token)]
}

/// Creates and shares an event, and returns it with its token.
fn share_event(guest: &mut Guest) -> (Handle<Event>, u128) {
    let event = guest.mint();
    assert_eq!(guest.call(&SharedEventCreate { new: event }).status, 0);
    let answer = guest.call(&ShareEvent { event });
    assert_eq!(answer.status, 0);
    let token = answer.reply::<ShareEventReply>().token;
    (event, u128::from_le_bytes(token))
}

/// Records an event, makes a stream wait for it, and queries it. The wait may never end, but it
/// neither ends the worker nor holds up the other streams.
fn uses_event(guest: &mut Guest, event: Handle<Event>) {
    let stream = guest.mint();
    guest.record(&StreamCreate {
        new: stream,
        // Non-blocking, so that the legacy stream does not wait for it.
        flags: 1,
        priority: 0,
    });
    for _ in 0..100 {
        guest.record(&EventRecord {
            event,
            stream,
            flags: 0,
            fence: None,
            value: 0,
        });
        guest.record(&StreamWaitEvent {
            stream,
            event,
            flags: 0,
        });
        let status = guest.call(&EventQuery { event }).status;
        assert!([0, NOT_READY].contains(&status), "{status}");
    }
}

/// Starts a supervisor with these workers, and a guest of the first.
fn backend(workers: &[&Path]) -> (Backend, Guest) {
    let mut backend = Backend::start(Workers::of(workers), &[]);
    backend.attach(SEGMENTS, Attach::default()).unwrap();
    let neighbour = backend.connect().open();
    (backend, neighbour)
}

/// Checks that the device copies a guest's bytes there and back.
fn works(guest: &mut Guest) {
    let bytes: Vec<u8> = (0..=250).cycle().take(10_000).collect();
    guest.round_trip(&bytes);
}

/// Waits until the guest is granted a third of the window, and returns it. If ended sessions lost
/// segments, this would soon fail.
fn wait_for_segments(guest: &mut Guest) {
    let beside = u32::try_from(SEGMENTS / 3).unwrap();
    let end = Instant::now() + PATIENCE;
    loop {
        match guest.request_arena(1, beside) {
            Reply::ArenaGrant(run) => {
                return guest.control.send(&Message::ArenaReturn(run)).unwrap();
            }
            Reply::ArenaDenied(..) => assert!(Instant::now() < end, "segments are lost"),
            other => panic!("{other:?}"),
        }
    }
}

fn leaves_no_core(worker: i32) -> bool {
    let limits = std::fs::read_to_string(format!("/proc/{worker}/limits")).unwrap_or_default();
    let core = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max core file size"));
    // With 0 the kernel would still start the system's program for core dumps.
    core.is_some_and(|core| core.split_whitespace().take(2).eq(["1", "1"]))
}

/// Checks that the guest's calls are answered and its memory is unchanged.
fn lives(guest: &mut Guest) {
    let address = guest.call(&MemAlloc { bytes: 64 });
    let address = address.reply::<MemAllocReply>().address;
    assert_eq!(guest.call(&MemFree { address }).status, 0);
    assert_eq!(guest.arena[0].read(0, KEPT.len()), KEPT);
}

fn a_crash_ends_its_session_with_an_error_and_no_other() {
    let (mut backend, mut neighbour) = backend(&[&std::env::current_exe().unwrap()]);
    neighbour.arena[0].write(0, &KEPT);
    for (number, way, signals) in WAYS {
        for in_job in [false, true] {
            let mut victim = backend.connect().open();
            let memory = victim.memory();
            // A starting worker gets its limits a little later.
            wait_until(
                || backend.workers().into_iter().all(leaves_no_core),
                || "workers without core files".into(),
            );
            // Requests and fences of every kind are pending.
            let synchronize = Synchronize { stream: None };
            let waiting: Vec<(u16, u64)> = (1..5)
                .map(|slot| (slot, victim.start(slot, &synchronize)))
                .collect();
            victim.record(&FenceWrite {
                stream: Handle::LEGACY,
                fence: Fence::new(1).unwrap(),
                value: 1,
            });
            assert_eq!(victim.call(&MemAlloc { bytes: 64 }).status, 0);
            if in_job {
                let limit = number - 1000;
                victim.start(6, &ContextGetLimit { limit });
            } else {
                let new = victim.mint();
                victim.record(&StreamCreate {
                    new,
                    flags: number,
                    priority: 0,
                });
            }
            let cause = victim.wait_for_status();
            assert_eq!((cause.result, cause.cause), LOST, "{way}");
            for (slot, sequence) in waiting {
                let cause = victim.wait(slot, sequence).expect_err("nobody answers");
                assert_eq!((cause.result, cause.cause), LOST, "{way}");
            }
            let later = victim.start(7, &MemAlloc { bytes: 64 });
            assert!(victim.wait(7, later).is_err(), "{way}");
            let denied = Reply::ArenaDenied(1, Refusal::NoDevice as u32);
            assert_eq!(victim.request_arena(1, 1), denied, "{way}");
            lives(&mut neighbour);
            drop(victim);
            let report = backend.report();
            let ends = signals
                .iter()
                .map(|signal| format!("worker {} was ended by signal {signal}", report.worker));
            assert!(
                ends.into_iter().any(|end| end == report.end),
                "{way}: {}",
                report.end
            );
            assert!(report.requests > 0, "what it had counted is not lost");
            backend.wait_for_log(&report.end);
            wait_until(|| !is_running(report.worker), || "the worker's end".into());
            memory.wait_until_scrubbed();
            wait_for_segments(&mut neighbour);
        }
    }
    lives(&mut neighbour);
    assert!(backend.is_alive());
}

fn a_worker_that_overwrites_all_it_can_and_crashes_harms_its_own_session_alone() {
    let real = Path::new(env!("CARGO_BIN_EXE_worker"));
    let own = std::env::current_exe().unwrap();
    let (mut backend, mut neighbour) = backend(&[real, &own]);
    for round in 1..4 {
        let (event, token) = share_event(&mut neighbour);
        let environment = format!("{TOKEN}={token:032x}\n");
        let mut victim = backend
            .connect()
            .open_in(stub::protocol(SCRIBBLING), &environment);
        wait_until(
            || backend.log().matches("round 3 of scribbling").count() >= round,
            || "the worker to scribble".into(),
        );
        works(&mut neighbour);
        uses_event(&mut neighbour, event);
        works(&mut neighbour);
        // The supervisor adds up the memory that workers report.
        let mut observer = backend.connect();
        let question = Observe {
            bootstrap_version: bootstrap::VERSION,
            device: 0,
        };
        observer.send(&Message::Observe(question)).unwrap();
        assert!(matches!(observer.receive(), Reply::Observation(0, 1, ..)));
        // The value is arbitrary, but not 0: the session is over.
        assert!(victim.status.load().is_some());
        let run = victim.arena.remove(0).run;
        victim.control.send(&Message::ArenaReturn(run)).unwrap();
        wait_until(
            || {
                let log = backend.log();
                let crash = |line: &&str| line.contains("WARN") && line.contains("by signal");
                log.lines().filter(crash).count() >= round
            },
            || "the worker to crash".into(),
        );
        drop(victim);
        let report = backend.report();
        assert_eq!(
            report.end,
            format!(
                "worker {} was ended by signal {}",
                report.worker,
                libc::SIGSEGV
            )
        );
        wait_for_segments(&mut neighbour);
        uses_event(&mut neighbour, event);
        works(&mut neighbour);
    }
    // Streams that wait for an event that never completes do not delay the end.
    drop(neighbour);
    assert_eq!(backend.report().end, "the guest process ended");
    let mut fresh = backend.connect().open_with(PROTOCOL_HASH);
    assert_eq!(fresh.call(&MemAlloc { bytes: 64 }).status, 0);
    assert!(backend.is_alive());
}
