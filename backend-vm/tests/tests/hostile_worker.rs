//! A hostile worker reaches its own session and no other, not even one of its tenant.
//!
//! The test executable plays the hostile worker, so it parses its arguments itself.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

use vmm_sys_util::sock_ctrl_msg::ScmSocket;
use wormhole_api::{DevicePtr, Handle, MemAlloc, MemAllocReply, MemCopy, Synchronize};
use wormhole_backend_tests::backend::{Backend, PATIENCE, Workers};
use wormhole_backend_tests::guest::{Guest, Reply};
use wormhole_backend_tests::stub::{self, Stub};
use wormhole_link::memory::Mapping;
use wormhole_ring::control::{Attach, Message};

const SEGMENTS: u64 = 24;
/// Contents of the guests' arenas.
const SECRET: [u8; 16] = *b"what guests keep";
const PAGE: usize = 4096;
/// Number of a copy that breaks the protocol as soon as it has a session.
const BREAKS: u64 = 7;

fn main() {
    stub::main(
        &[
            (
                "a_hostile_worker_finds_and_spoils_no_other_session",
                a_hostile_worker_finds_and_spoils_no_other_session,
            ),
            (
                "arena_that_a_worker_keeps_is_another_sessions_without_it",
                arena_that_a_worker_keeps_is_another_sessions_without_it,
            ),
            (
                "a_hostile_worker_hands_its_guest_no_descriptor",
                a_hostile_worker_hands_its_guest_no_descriptor,
            ),
            (
                "workers_that_break_the_protocol_do_not_fill_the_log",
                workers_that_break_the_protocol_do_not_fill_the_log,
            ),
        ],
        worker,
    );
}

/// Sweeps all memory that it was given in a loop, counts pages with a guest's contents and
/// overwrites the others. It acknowledges the return of arena but keeps it mapped. Tries to send a
/// descriptor to a guest that has a socket for files.
fn worker(mut stub: Stub) {
    if stub.protocol == stub::protocol(BREAKS) {
        break_the_protocol(&mut stub);
    }
    let file = File::from(stub.take_session().window);
    if let Some(files) = stub.take_files() {
        let sent = files.send_with_fd(&b"yours"[..], file.as_raw_fd());
        stub.say(&format!("hands a descriptor over: {sent:?}"));
    }
    let bytes = usize::try_from(rustix::fs::fstat(&file).unwrap().st_size).unwrap();
    let mapping = Mapping::new(&file, 0, bytes).unwrap();
    loop {
        let mut found = 0;
        for page in (0..bytes).step_by(PAGE) {
            // SAFETY: inside the mapping of the whole file; concurrent writes of the guest give
            // either value.
            unsafe {
                let page = mapping.base().add(page);
                if page.cast::<[u8; 16]>().read_volatile() == SECRET {
                    found += 1;
                } else {
                    page.write_bytes(0xEE, PAGE);
                }
            }
        }
        stub.say(&format!("swept {} pages, found {found}", bytes / PAGE));
        if let Some(run) = stub.take_removal() {
            stub.send(&Message::ArenaRemoved(run), Vec::new());
            stub.say("it says that it has let go");
        }
    }
}

fn break_the_protocol(stub: &mut Stub) -> ! {
    let ready = Message::Ready {
        protocol_hash: stub.protocol,
        device: "stub",
    };
    stub.send(&ready, Vec::new());
    stub.wait_for(|message| matches!(message, Message::Assign(_)).then_some(()));
    // Guests send this message, workers do not.
    stub.send(&Message::Mapped, Vec::new());
    stub::idle()
}

/// Starts a supervisor with a real worker for one guest and the hostile one for another.
fn backend() -> (Backend, Guest, Guest) {
    let real = Path::new(env!("CARGO_BIN_EXE_worker"));
    let hostile = std::env::current_exe().unwrap();
    let mut backend = Backend::start(Workers::of(&[real, &hostile]), &[]);
    backend.attach(SEGMENTS, Attach::default()).unwrap();
    let neighbour = backend.connect().open();
    let victim = backend.connect().open_with(stub::protocol(1));
    (backend, neighbour, victim)
}

fn pages_of(guest: &Guest, arena: usize) -> usize {
    usize::try_from(guest.arena[arena].bytes()).unwrap() / PAGE
}

fn fill(guest: &Guest, arena: usize) {
    for page in 0..pages_of(guest, arena) {
        guest.arena[arena].write(page * PAGE, &SECRET);
    }
}

/// Returns the number of pages with a guest's contents that the hostile worker found in the first
/// sweep that starts after this call.
fn found(backend: &Backend) -> usize {
    let counts = |log: &str| -> Vec<usize> {
        log.lines()
            .filter_map(|line| line.split_once("pages, found ")?.1.trim().parse().ok())
            .collect()
    };
    let seen = counts(&backend.log()).len();
    let end = Instant::now() + PATIENCE;
    loop {
        let log = backend.log();
        // The running sweep started before the call.
        if let Some(&last) = counts(&log).get(seen + 1) {
            return last;
        }
        assert!(Instant::now() < end, "the worker does not sweep:\n{log}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Checks that the device copies the neighbour's arena unchanged.
fn is_unspoilt(guest: &mut Guest, arena: usize) {
    let bytes = guest.arena[arena].bytes();
    let device = guest
        .call(&MemAlloc { bytes })
        .reply::<MemAllocReply>()
        .address;
    let source = DevicePtr(guest.arena[arena].address);
    for (destination, source) in [(device, source), (source, device)] {
        guest.record(&MemCopy {
            destination,
            source,
            bytes,
            stream: Handle::LEGACY,
        });
    }
    assert_eq!(guest.call(&Synchronize { stream: None }).status, 0);
    for page in 0..pages_of(guest, arena) {
        assert_eq!(guest.arena[arena].read(page * PAGE, SECRET.len()), SECRET);
        let rest = guest.arena[arena].read(page * PAGE + SECRET.len(), 64);
        assert!(rest.iter().all(|byte| *byte == 0), "page {page} is spoilt");
    }
}

fn a_hostile_worker_finds_and_spoils_no_other_session() {
    let (mut backend, mut neighbour, victim) = backend();
    fill(&neighbour, 0);
    assert_eq!(found(&backend), 0, "the neighbour's pages");
    // The worker does find its own session's pages; the guest writes those again that a sweep
    // overwrote.
    let end = Instant::now() + PATIENCE;
    while found(&backend) != pages_of(&victim, 0) {
        assert!(
            Instant::now() < end,
            "the worker does not see its own session"
        );
        fill(&victim, 0);
    }
    is_unspoilt(&mut neighbour, 0);
    drop(victim);
    assert_eq!(backend.report().end, "the guest process ended");
    is_unspoilt(&mut neighbour, 0);
}

fn arena_that_a_worker_keeps_is_another_sessions_without_it() {
    let (mut backend, mut neighbour, mut victim) = backend();
    let returned = victim.arena.remove(0).run;
    victim
        .control
        .send(&Message::ArenaReturn(returned))
        .unwrap();
    backend.wait_for_log("it says that it has let go");
    // The first free segments are the returned ones, once they are scrubbed.
    let mut again = false;
    let mut id = 1;
    let end = Instant::now() + PATIENCE;
    while !again {
        assert!(
            Instant::now() < end,
            "the returned arena is not granted again"
        );
        match neighbour.request_arena(id, 1) {
            Reply::ArenaGrant(run) => {
                again = (returned.first..returned.first + returned.count).contains(&run.first);
                if again {
                    neighbour.map_arena(run);
                } else {
                    let back = Message::ArenaReturn(run);
                    neighbour.control.send(&back).unwrap();
                }
            }
            // The run is being scrubbed.
            Reply::ArenaDenied(..) => {}
            other => panic!("{other:?}"),
        }
        id += 1;
    }
    let last = neighbour.arena.len() - 1;
    fill(&neighbour, last);
    assert_eq!(found(&backend), 0, "the neighbour's pages");
    is_unspoilt(&mut neighbour, last);
    assert!(backend.is_alive());
}

fn a_hostile_worker_hands_its_guest_no_descriptor() {
    let (mut backend, _neighbour, _victim) = backend();
    let (_guest, files) = backend.connect().open_with_files_of(stub::protocol(1));
    backend.wait_for_log("hands a descriptor over");
    files.set_nonblocking(true).unwrap();
    let came = files.recv_with_fd(&mut [0; 64]);
    assert!(came.is_err(), "{came:?}");
}

fn workers_that_break_the_protocol_do_not_fill_the_log() {
    const SESSIONS: usize = 150;
    let start = Instant::now();
    let me = std::env::current_exe().unwrap();
    let mut backend = Backend::start(Workers::numbered(&[(BREAKS, &me)]), &[]);
    backend.attach(SEGMENTS, Attach::default()).unwrap();
    for _ in 0..SESSIONS {
        let mut control = backend.connect();
        control.hello(stub::protocol(BREAKS), "");
        let reply = control.receive();
        assert!(matches!(reply, Reply::Refused(..)), "{reply:?}");
    }
    let told = backend.log().matches("it broke the protocol").count();
    // A tenant's budget is 64 lines at once and one each second.
    let seconds = usize::try_from(start.elapsed().as_secs()).unwrap();
    assert!((30..=65 + seconds).contains(&told), "{told} lines");
}
