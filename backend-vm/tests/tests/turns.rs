//! A stream with many messages gets no more of the supervisor's time than one with few.
//!
//! The test executable plays the worker, so it parses its arguments itself.

use std::path::Path;

use wormhole_backend_tests::backend::{Backend, Workers};
use wormhole_backend_tests::stub::{self, Stub};
use wormhole_ring::control::{ArenaRequest, Attach, Message};

/// Messages in one write, which one read receives.
const MANY: usize = 300;

fn main() {
    stub::main(
        &[(
            "a_guest_that_rings_without_end_rings_once_a_read",
            a_guest_that_rings_without_end_rings_once_a_read,
        )],
        worker,
    );
}

/// Counts doorbells until it is granted arena.
fn worker(mut stub: Stub) {
    stub.take_session();
    let mut rings = 0;
    stub.wait_for(|message| {
        rings += u32::from(*message == Message::Doorbell);
        matches!(message, Message::ArenaAdd(_)).then_some(())
    });
    stub.say(&format!("it was rung {rings} times"));
    stub::idle();
}

fn backend() -> Backend {
    let me = std::env::current_exe().unwrap();
    let mut backend = Backend::start(Workers::of(&[Path::new(&me)]), &[]);
    backend.attach(64, Attach::default()).unwrap();
    backend
}

/// Returns the number before or after some words of the log.
fn number(backend: &Backend, before: &str, after: &str) -> usize {
    backend.wait_for_log(after);
    let log = backend.log();
    let line = log.lines().find(|line| line.contains(after)).unwrap();
    let rest = line.split_once(before).unwrap().1;
    rest.split_whitespace().next().unwrap().parse().unwrap()
}

fn a_guest_that_rings_without_end_rings_once_a_read() {
    let mut backend = backend();
    let mut guest = backend.connect().open_with(stub::protocol(0));
    let mut frames = Message::Doorbell.to_vec().unwrap().repeat(MANY);
    let request = ArenaRequest { id: 1, segments: 1 };
    frames.extend(Message::ArenaRequest(request).to_vec().unwrap());
    guest.control.send_raw(&frames);
    let rings = number(&backend, "it was rung ", " times");
    assert_eq!(rings, 1);
}
