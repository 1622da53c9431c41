//! Sessions whose memory lies in one file, which the guest has mapped as a whole.

use std::fs::File;
use std::os::unix::fs::FileExt;

use wormhole_backend_tests::backend::{Backend, Workers, kill, wait_until};
use wormhole_backend_tests::guest::{Guest, Reply};
use wormhole_ring::layout::SEGMENT_BYTES;
use wormhole_ring::status::EndCause;

const SEGMENTS: u64 = 16;

fn start() -> (Backend, File) {
    let mut backend = Backend::start(Workers::built(), &[]);
    let window = backend.attach_static(SEGMENTS);
    (backend, window)
}

fn open(backend: &mut Backend, window: &File) -> Guest {
    let mapped = window.try_clone().unwrap();
    backend.connect_remote().open_in_window(mapped.into())
}

/// Returns the window's bytes from the start of a segment on.
fn bytes_at(window: &File, segment: u32, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    let at = u64::from(segment) * SEGMENT_BYTES as u64;
    window.read_exact_at(&mut bytes, at).unwrap();
    bytes
}

/// Returns whether a process has shared memory mapped at an address.
fn maps(pid: i32, address: u64) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    maps.lines().any(|line| {
        let (range, rest) = line.split_once(' ').unwrap();
        let (start, end) = range.split_once('-').unwrap();
        let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16).unwrap());
        rest.starts_with("rw-s") && (start..end).contains(&address)
    })
}

fn wait_until_zero(window: &File, segment: u32) {
    wait_until(
        || bytes_at(window, segment, SEGMENT_BYTES) == vec![0; SEGMENT_BYTES],
        || format!("segment {segment} to be scrubbed"),
    );
}

#[test]
fn sessions_of_a_static_window_work_side_by_side_in_its_file() {
    let (mut backend, window) = start();
    let mut guests = [open(&mut backend, &window), open(&mut backend, &window)];
    for (guest, byte) in guests.iter_mut().zip([0x5a, 0xa5]) {
        guest.round_trip(&[byte; 5000]);
    }
    for (guest, byte) in guests.iter_mut().zip([0x5a, 0xa5]) {
        assert_eq!(
            bytes_at(&window, guest.grant.arena_first, 10_000),
            [byte; 10_000]
        );
        assert!(matches!(guest.request_arena(1, 2), Reply::ArenaGrant(_)));
    }
}

#[test]
fn segments_of_a_session_that_has_ended_are_zero_before_another_gets_them() {
    let (mut backend, window) = start();
    let mut neighbour = open(&mut backend, &window);
    neighbour.round_trip(&[7; 5000]);
    for _ in 0..20 {
        let mut guest = open(&mut backend, &window);
        let (own, arena) = (guest.grant.session_segment, guest.grant.arena_first);
        assert_eq!(guest.status.load(), None);
        assert_eq!(
            guest.arena[0].read(0, SEGMENT_BYTES),
            vec![0; SEGMENT_BYTES]
        );
        guest.round_trip(&[9; 5000]);
        drop(guest);
        backend.report();
        wait_until_zero(&window, arena);
        wait_until_zero(&window, own);
    }
    neighbour.round_trip(&[8; 5000]);
}

#[test]
fn the_end_of_a_worker_leaves_the_neighbours_memory_alone() {
    let (mut backend, window) = start();
    let (mut neighbour, guest) = (open(&mut backend, &window), open(&mut backend, &window));
    neighbour.round_trip(&[7; 5000]);
    let workers = backend.workers();
    let victim = workers
        .into_iter()
        .find(|&pid| maps(pid, guest.arena[0].address));
    kill(victim.expect("the worker"), libc::SIGKILL);
    let cause = guest.wait_for_status().cause;
    assert_eq!(cause, EndCause::WorkerLost as u32);
    drop(guest);
    backend.report();
    let arena = neighbour.grant.arena_first;
    assert_eq!(bytes_at(&window, arena, 10_000), [7; 10_000]);
    neighbour.round_trip(&[8; 5000]);
}
