//! Files shared between a guest's processes, which the device reaches in place.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixDatagram;

use vmm_sys_util::sock_ctrl_msg::ScmSocket;
use wormhole_api::{DevicePtr, FileMap, FileUnmap, Handle, MemAlloc, MemAllocReply, MemCopy};
use wormhole_backend_tests::backend::Backend;
use wormhole_backend_tests::guest::Guest;
use wormhole_link::memory::{Mapping, anonymous_file};
use wormhole_ring::layout::FILES;

const INVALID_VALUE: u32 = wormhole_api::CuResult::INVALID_VALUE.0;
const NOT_SUPPORTED: u32 = wormhole_api::CuResult::NOT_SUPPORTED.0;
const PAGE: u64 = 4096;
const BYTES: u64 = 4 * PAGE;
const WORDS: usize = 4 * 1024;

/// Creates shared memory: returns its file and this test's mapping.
fn shared_memory() -> (File, Mapping) {
    let file: File = anonymous_file(c"shared").unwrap().into();
    file.set_len(BYTES).unwrap();
    let mapping = Mapping::new(&file, 0, 4 * WORDS).unwrap();
    (file, mapping)
}

fn word(mapping: &Mapping, index: usize) -> *mut u32 {
    assert!(index < WORDS);
    // SAFETY: inside the mapping.
    unsafe { mapping.base().cast::<u32>().add(index) }
}

fn read(mapping: &Mapping, index: usize) -> u32 {
    // SAFETY: a word of a mapping that lives.
    unsafe { word(mapping, index).read_volatile() }
}

fn send(socket: &UnixDatagram, address: u64, file: &impl AsRawFd) {
    let sent = socket.send_with_fd(&address.to_ne_bytes()[..], file.as_raw_fd());
    assert_eq!(sent.unwrap(), 8);
}

fn map(guest: &mut Guest, address: u64, offset: u64, bytes: u64) -> u32 {
    let address = DevicePtr(address);
    let message = FileMap {
        address,
        offset,
        bytes,
    };
    guest.call(&message).status
}

fn unmap(guest: &mut Guest, address: u64) -> u32 {
    let address = DevicePtr(address);
    guest.call(&FileUnmap { address }).status
}

fn allocate(guest: &mut Guest) -> DevicePtr {
    let answer = guest.call(&MemAlloc { bytes: BYTES });
    answer.reply::<MemAllocReply>().address
}

fn copy(guest: &mut Guest, destination: DevicePtr, source: DevicePtr, bytes: u64) {
    guest.record(&MemCopy {
        destination,
        source,
        bytes,
        stream: Handle::LEGACY,
    });
}

#[test]
fn devices_of_two_processes_and_the_system_have_one_memory() {
    let mut backend = Backend::with_window(64);
    let (mut first, first_socket) = backend.connect().open_with_files();
    let (mut second, second_socket) = backend.connect().open_with_files();
    let (file, mapping) = shared_memory();
    // The second session maps all but the first page, at another address.
    let (here, there) = (FILES.0, FILES.0 + (1 << 30));
    send(&first_socket, here, &file);
    assert_eq!(map(&mut first, here, 0, BYTES), 0);
    send(&second_socket, there, &file);
    assert_eq!(map(&mut second, there, PAGE, BYTES - PAGE), 0);

    first.fill(DevicePtr(here), WORDS as u64, 0x11);
    first.finish();
    assert_eq!((read(&mapping, 0), read(&mapping, WORDS - 1)), (0x11, 0x11));
    second.fill(DevicePtr(there + 8), 1, 0x22);
    second.finish();
    assert_eq!(read(&mapping, 1024 + 2), 0x22);
    // SAFETY: a word of a mapping that lives.
    unsafe { word(&mapping, 1024 + 3).write_volatile(0x33) };
    let device = allocate(&mut first);
    copy(&mut first, device, DevicePtr(here + PAGE + 8), 8);
    copy(&mut first, DevicePtr(here), device, 8);
    first.finish();
    assert_eq!([read(&mapping, 0), read(&mapping, 1)], [0x22, 0x33]);

    assert_eq!(unmap(&mut first, here), 0);
    second.fill(DevicePtr(there), 1, 0x55);
    second.finish();
    assert_eq!(read(&mapping, 1024), 0x55, "the second still reaches it");
    // An unmapped range can be mapped again, at the same address.
    send(&first_socket, here, &file);
    assert_eq!(map(&mut first, here, 0, PAGE), 0);
    first.fill(DevicePtr(here), 1, 0x66);
    first.finish();
    assert_eq!(read(&mapping, 0), 0x66);
    assert_eq!(unmap(&mut first, here), 0);
    first.fill(DevicePtr(here), 1, 0x44);
    assert_eq!(first.wait_for_status().result, INVALID_VALUE);
    assert_eq!(read(&mapping, 0), 0x66, "the first reaches it no more");
}

#[test]
fn only_shared_memory_that_was_sent_is_mapped_and_only_in_its_band() {
    let mut backend = Backend::with_window(64);
    let (mut guest, socket) = backend.connect().open_with_files();
    let (file, mapping) = shared_memory();
    let base = FILES.0;
    assert_eq!(map(&mut guest, base, 0, BYTES), INVALID_VALUE, "none sent");
    send(&socket, base + BYTES, &file);
    assert_eq!(map(&mut guest, base, 0, BYTES), INVALID_VALUE, "another's");
    let null = File::open("/dev/null").unwrap();
    let (pipe, _writer) = std::io::pipe().unwrap();
    let program = File::open("/proc/self/exe").unwrap();
    for other in [null.as_raw_fd(), pipe.as_raw_fd(), program.as_raw_fd()] {
        send(&socket, base, &other);
        assert_eq!(map(&mut guest, base, 0, PAGE), NOT_SUPPORTED);
    }
    send(&socket, base, &file);
    assert_eq!(
        map(&mut guest, base, PAGE, BYTES),
        NOT_SUPPORTED,
        "too short"
    );
    let huge = u64::MAX - PAGE + 1;
    send(&socket, base, &file);
    assert_eq!(map(&mut guest, base, huge, PAGE), NOT_SUPPORTED, "no end");
    for (address, offset, bytes) in [
        (base - PAGE, 0, PAGE),
        (base + 1, 0, PAGE),
        (base, 1, PAGE),
        (base, 0, PAGE + 1),
        (base, 0, 0),
        (base, 0, FILES.1 + PAGE),
        (base + FILES.1 - PAGE, 0, 2 * PAGE),
        (u64::MAX - PAGE + 1, 0, PAGE),
    ] {
        send(&socket, address, &file);
        assert_eq!(map(&mut guest, address, offset, bytes), INVALID_VALUE);
    }
    assert_eq!(unmap(&mut guest, base), INVALID_VALUE, "nothing is mapped");

    // After the refusals, valid requests still succeed.
    send(&socket, base, &file);
    assert_eq!(map(&mut guest, base, 0, BYTES), 0);
    for overlapping in [base, base + PAGE] {
        send(&socket, overlapping, &file);
        assert_eq!(map(&mut guest, overlapping, 0, PAGE), INVALID_VALUE);
    }
    assert_eq!(unmap(&mut guest, base + PAGE), INVALID_VALUE, "not a start");
    guest.fill(DevicePtr(base), WORDS as u64, 7);
    guest.finish();
    assert_eq!(unmap(&mut guest, base), 0);
    assert_eq!(unmap(&mut guest, base), INVALID_VALUE, "twice");
    send(&socket, base, &file);
    assert_eq!(map(&mut guest, base, 0, BYTES), 0);
    guest.fill(DevicePtr(base + BYTES - 4), 2, 8);
    assert_eq!(guest.wait_for_status().result, INVALID_VALUE);
    assert_eq!(read(&mapping, WORDS - 1), 7, "none goes over the end");
}

#[test]
fn a_guest_without_a_socket_has_no_files() {
    let mut backend = Backend::with_window(64);
    let mut guest = backend.connect().open();
    assert_eq!(map(&mut guest, FILES.0, 0, PAGE), NOT_SUPPORTED);
}

#[test]
fn a_file_that_is_cut_off_ends_its_own_session_at_most() {
    let mut backend = Backend::with_window(64);
    let (mut guest, socket) = backend.connect().open_with_files();
    let (mut neighbour, other_socket) = backend.connect().open_with_files();
    let (file, _) = shared_memory();
    let (kept, mapping) = shared_memory();
    send(&socket, FILES.0, &file);
    assert_eq!(map(&mut guest, FILES.0, 0, BYTES), 0);
    send(&other_socket, FILES.0, &kept);
    assert_eq!(map(&mut neighbour, FILES.0, 0, BYTES), 0);
    file.set_len(0).unwrap();
    guest.fill(DevicePtr(FILES.0), 1, 1);
    guest.wait_for_status();
    neighbour.fill(DevicePtr(FILES.0), 1, 9);
    neighbour.finish();
    assert_eq!(read(&mapping, 0), 9);
}
