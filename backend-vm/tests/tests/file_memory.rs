//! Memory of the file system in which processes of a guest VM share memory: their workers map parts of it.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use rustix::fs::{SealFlags, fcntl_add_seals};
use wormhole_api::{DevicePtr, FileMemoryMap, FilePart, FileUnmap, Items, PROTOCOL_HASH};
use wormhole_backend_tests::backend::Backend;
use wormhole_backend_tests::guest::Guest;
use wormhole_link::memory::anonymous_file;
use wormhole_ring::bootstrap;
use wormhole_ring::control::{FEATURE_FILE_MEMORY, FileMemory, Message};
use wormhole_ring::layout::FILES;

const INVALID_VALUE: u32 = wormhole_api::CuResult::INVALID_VALUE.0;
const NOT_SUPPORTED: u32 = wormhole_api::CuResult::NOT_SUPPORTED.0;
const PAGE: u64 = 4096;
const BYTES: u64 = 16 * PAGE;

fn memory(seals: SealFlags) -> File {
    let file: File = anonymous_file(c"files").unwrap().into();
    file.set_len(BYTES).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    file
}

fn give(backend: &mut Backend, file: &File, bytes: u64) {
    let file: OwnedFd = file.try_clone().unwrap().into();
    backend.send(&Message::FileMemory(FileMemory { bytes }), vec![file]);
}

/// Opens a session of a guest VM, whose launcher maps its memory.
fn open(backend: &mut Backend) -> Guest {
    let mut control = backend.connect_remote();
    control
        .send(&Message::Hello {
            bootstrap_version: bootstrap::VERSION,
            protocol_hash: PROTOCOL_HASH,
            features: FEATURE_FILE_MEMORY,
            environment: "",
        })
        .unwrap();
    let file = backend.show_run();
    backend.show_run();
    control.map_shown(file)
}

fn map(guest: &mut Guest, address: u64, parts: &[(u64, u64)]) -> u32 {
    let part = |&(offset, bytes): &(u64, u64)| FilePart { offset, bytes };
    let parts: Vec<FilePart> = parts.iter().map(part).collect();
    let message = FileMemoryMap {
        address: DevicePtr(address),
        parts: Items::new(&parts),
    };
    guest.call(&message).status
}

fn fill(guest: &mut Guest, destination: u64, words: u64, value: u32) {
    guest.fill(DevicePtr(destination), words, value);
    guest.finish();
}

fn word(file: &File, page: u64) -> u32 {
    let mut word = [0; 4];
    file.read_exact_at(&mut word, page * PAGE).unwrap();
    u32::from_ne_bytes(word)
}

#[test]
fn workers_of_one_guest_map_parts_of_its_memory_at_one_range() {
    let mut backend = Backend::with_window(64);
    let file = memory(SealFlags::GROW | SealFlags::SHRINK);
    give(&mut backend, &file, BYTES);
    let (mut first, mut second) = (open(&mut backend), open(&mut backend));
    let base = FILES.0;
    let parts = [(8 * PAGE, 2 * PAGE), (3 * PAGE, PAGE)];
    assert_eq!(map(&mut first, base, &parts), 0);
    assert_eq!(map(&mut second, base + PAGE, &[(3 * PAGE, PAGE)]), 0);
    fill(&mut first, base, 3 * PAGE / 4, 7);
    let pages: Vec<u64> = (0..16).filter(|page| word(&file, *page) == 7).collect();
    assert_eq!(pages, [3, 8, 9]);
    fill(&mut second, base + PAGE, 1, 9);
    assert_eq!(word(&file, 3), 9);

    for wrong in [
        &[(BYTES, PAGE)][..],
        &[(0, BYTES + PAGE)],
        &[(0, PAGE), (u64::MAX - PAGE + 1, PAGE)],
        &[(1, PAGE)],
        &[(0, 1)],
        &[(0, 0)],
        &[],
    ] {
        assert_eq!(map(&mut first, base + (1 << 30), wrong), INVALID_VALUE);
    }
    assert_eq!(map(&mut first, base, &[(0, PAGE)]), INVALID_VALUE, "taken");
    let unmap = FileUnmap {
        address: DevicePtr(base),
    };
    assert_eq!(first.call(&unmap).status, 0);
    assert_eq!(map(&mut first, base, &[(0, PAGE)]), 0);
    fill(&mut first, base, 1, 5);
    assert_eq!((word(&file, 0), word(&file, 8)), (5, 7));
}

#[test]
fn a_guest_without_such_memory_maps_none() {
    let mut backend = Backend::with_window(64);
    let mut guest = open(&mut backend);
    assert_eq!(map(&mut guest, FILES.0, &[(0, PAGE)]), NOT_SUPPORTED);
}

#[test]
fn a_launcher_that_gives_memory_that_may_shrink_is_cut_off() {
    for (seals, bytes) in [
        (SealFlags::GROW, BYTES),
        (SealFlags::GROW | SealFlags::SHRINK, 2 * BYTES),
    ] {
        let mut backend = Backend::with_window(64);
        give(&mut backend, &memory(seals), bytes);
        assert!(!backend.hears("Stream"), "{bytes}");
    }
}
