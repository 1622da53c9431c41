//! Reserved addresses and mappings: calls that the library answers by itself, and calls that it refuses at once.

mod support;

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;

use cuda as _;
use support::{Backend, GRANULE, in_process};
use wormhole_api::CuResult;
use wormhole_api::constants::memory_allocation_type::PINNED;
use wormhole_api::constants::memory_location::DEVICE;
use wormhole_api::ctypes::{CUmemAccessDesc, CUmemAllocationProp, CUmemLocation};

type Pointer = *mut c_void;

unsafe extern "C" {
    fn cuInit(flags: u32) -> u32;
    fn cuDevicePrimaryCtxRetain(context: *mut Pointer, device: i32) -> u32;
    fn cuCtxSetCurrent(context: Pointer) -> u32;
    fn cuMemAddressReserve(
        address: *mut u64,
        bytes: usize,
        alignment: usize,
        hint: u64,
        flags: u64,
    ) -> u32;
    fn cuMemAddressFree(address: u64, bytes: usize) -> u32;
    fn cuMemCreate(
        memory: *mut u64,
        bytes: usize,
        properties: *const CUmemAllocationProp,
        flags: u64,
    ) -> u32;
    fn cuMemRelease(memory: u64) -> u32;
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> u32;
    fn cuMemMap(address: u64, bytes: usize, offset: usize, memory: u64, flags: u64) -> u32;
    fn cuMemUnmap(address: u64, bytes: usize) -> u32;
    fn cuMemSetAccess(
        address: u64,
        bytes: usize,
        access: *const CUmemAccessDesc,
        count: usize,
    ) -> u32;
}

const INVALID_VALUE: u32 = CuResult::INVALID_VALUE.0;
const NOT_SUPPORTED: u32 = CuResult::NOT_SUPPORTED.0;
const LAUNCH_FAILED: u32 = CuResult::LAUNCH_FAILED.0;
const UNIT: usize = 2 << 20;
const _: () = assert!(UNIT as u64 == GRANULE);

const HERE: CUmemLocation = CUmemLocation {
    r#type: DEVICE,
    id: 0,
};

fn backend() -> Backend {
    let backend = Backend::start();
    let mut context = null_mut();
    // SAFETY: every place is writable, the handle is the library's.
    unsafe {
        assert_eq!(cuInit(0), 0);
        assert_eq!(cuDevicePrimaryCtxRetain(&raw mut context, 0), 0);
        assert_eq!(cuCtxSetCurrent(context), 0);
    }
    backend.messages();
    backend
}

fn reserve_at(bytes: usize, alignment: usize, hint: u64) -> Result<u64, u32> {
    let mut address = 0;
    // SAFETY: the place is writable.
    match unsafe { cuMemAddressReserve(&raw mut address, bytes, alignment, hint, 0) } {
        0 => Ok(address),
        error => Err(error),
    }
}

fn reserve(bytes: usize) -> u64 {
    reserve_at(bytes, 0, 0).unwrap()
}

fn free(address: u64, bytes: usize) -> u32 {
    // SAFETY: plain call.
    unsafe { cuMemAddressFree(address, bytes) }
}

fn create(bytes: usize) -> u64 {
    let properties = CUmemAllocationProp {
        r#type: PINNED,
        requestedHandleTypes: 0,
        location: HERE,
        win32HandleMetaData: null_mut(),
        compressionType: 0,
        gpuDirectRDMACapable: 0,
        usage: 0,
        reserved: [0; 4],
    };
    let mut memory = 0;
    // SAFETY: both places are good.
    let created = unsafe { cuMemCreate(&raw mut memory, bytes, &raw const properties, 0) };
    assert_eq!(created, 0);
    memory
}

fn map(address: u64, bytes: usize, memory: u64) -> u32 {
    // SAFETY: plain call.
    unsafe { cuMemMap(address, bytes, 0, memory, 0) }
}

#[test]
fn freed_ranges_are_reserved_again_without_the_backend() {
    in_process(|| {
        let backend = backend();
        let (first, second) = (reserve(UNIT), reserve(2 * UNIT));
        let sent = ["MemGranularity?", "AddressReserve?", "AddressReserve?"];
        assert_eq!(backend.messages(), sent);
        assert!(first + GRANULE <= second || second + 2 * GRANULE <= first);
        for _ in 0..3 {
            assert_eq!([free(first, UNIT), free(second, 2 * UNIT)], [0; 2]);
            assert_eq!([reserve(UNIT), reserve(2 * UNIT)], [first, second]);
        }
        assert_eq!(free(first, UNIT), 0);
        // A hint at a freed range is taken.
        assert_eq!(reserve_at(UNIT, 0, first), Ok(first));
        assert_eq!(backend.messages(), [""; 0]);
    });
}

#[test]
fn freed_ranges_are_in_the_way_of_no_hint() {
    in_process(|| {
        let backend = backend();
        let first = reserve(UNIT);
        assert_eq!(free(first, UNIT), 0);
        backend.messages();
        reserve_at(2 * UNIT, 0, first).unwrap();
        assert_eq!(backend.messages(), ["AddressFree", "AddressReserve?"]);
    });
}

#[test]
fn freed_ranges_are_reserved_again_for_their_alignment_alone() {
    in_process(|| {
        let backend = backend();
        backend.messages();
        let aligned = reserve_at(UNIT, 1 << 30, 0).unwrap();
        assert!(aligned.is_multiple_of(1 << 30));
        let next = reserve(UNIT);
        assert_eq!([free(aligned, UNIT), free(next, UNIT)], [0; 2]);
        backend.messages();
        assert_eq!(reserve_at(UNIT, 1 << 30, 0), Ok(aligned));
        assert_eq!(backend.messages(), [""; 0]);
        let other = reserve_at(UNIT, 1 << 30, 0).unwrap();
        assert!(other != next && other.is_multiple_of(1 << 30));
        assert_eq!(backend.messages(), ["AddressReserve?"]);
    });
}

#[test]
fn what_is_wrong_with_a_range_is_said_at_the_call() {
    in_process(|| {
        let backend = backend();
        let (small, large) = (reserve(4 * UNIT), reserve(64 * UNIT));
        assert_eq!(
            backend.messages(),
            ["MemGranularity?", "AddressReserve?", "AddressReserve?"]
        );
        for refused in [
            reserve_at(0, 0, 0),
            reserve_at(UNIT + 1, 0, 0),
            reserve_at(UNIT, 3, 0),
            reserve_at(UNIT, 0, 1),
        ] {
            assert_eq!(refused, Err(INVALID_VALUE));
        }
        for (address, bytes) in [
            (small, UNIT),
            (small, 5 * UNIT),
            (small + GRANULE, 3 * UNIT),
            (small + 4 * GRANULE, UNIT),
            (large, UNIT),
            (0, UNIT),
            (u64::MAX, UNIT),
        ] {
            assert_eq!(free(address, bytes), INVALID_VALUE, "{address:#x}");
        }
        assert_eq!(backend.messages(), [""; 0]);
        assert_eq!([free(small, 4 * UNIT), free(large, 64 * UNIT)], [0; 2]);
        let again = [free(small, 4 * UNIT), free(large, 64 * UNIT)];
        assert_eq!(again, [INVALID_VALUE; 2]);
        assert_eq!(backend.messages(), [""; 0]);
    });
}

#[test]
fn memory_is_mapped_without_waiting_and_refused_at_the_call() {
    in_process(|| {
        let backend = backend();
        let (base, memory, other) = (reserve(4 * UNIT), create(UNIT), create(2 * UNIT));
        backend.messages();
        let end = base + 4 * GRANULE;
        for (address, bytes, memory, code) in [
            (base, UNIT, memory + 64, INVALID_VALUE),
            (base, UNIT, 0, INVALID_VALUE),
            (base, 0, memory, INVALID_VALUE),
            (base, UNIT, other, NOT_SUPPORTED),
            (base + 4096, UNIT, memory, INVALID_VALUE),
            (base - GRANULE, UNIT, memory, INVALID_VALUE),
            (end, UNIT, memory, INVALID_VALUE),
            (end - GRANULE, 2 * UNIT, other, INVALID_VALUE),
            (u64::MAX - 1, UNIT, memory, INVALID_VALUE),
        ] {
            assert_eq!(map(address, bytes, memory), code, "{address:#x}");
        }
        assert_eq!(backend.messages(), [""; 0]);
        assert_eq!(map(base + GRANULE, UNIT, memory), 0);
        assert_eq!(backend.messages(), ["MemMap"]);
        for address in [base, base + GRANULE] {
            assert_eq!(map(address, 2 * UNIT, other), INVALID_VALUE);
        }
        assert_eq!(map(base + GRANULE, UNIT, memory), INVALID_VALUE);
        assert_eq!(free(base, 4 * UNIT), INVALID_VALUE);
        assert_eq!(backend.messages(), [""; 0]);
        let access = CUmemAccessDesc {
            location: HERE,
            flags: 3,
        };
        // SAFETY: the place is good.
        unsafe {
            let set = cuMemSetAccess(base + GRANULE, UNIT, &raw const access, 1);
            assert_eq!(set, 0);
            let set = cuMemSetAccess(base, 2 * UNIT, &raw const access, 1);
            assert_eq!(set, INVALID_VALUE);
            assert_eq!(cuMemUnmap(base, 2 * UNIT), INVALID_VALUE);
            assert_eq!(cuMemUnmap(base + GRANULE, UNIT), 0);
            assert_eq!(cuMemUnmap(base + GRANULE, UNIT), INVALID_VALUE);
            assert_eq!([cuMemRelease(memory), cuMemRelease(other)], [0; 2]);
        }
        assert_eq!(map(base, UNIT, memory), INVALID_VALUE);
        assert_eq!(free(base, 4 * UNIT), 0);
        assert_eq!(backend.shared.take(), ["MemSetAccess?", "MemUnmap?"]);
    });
}

fn release(memory: u64) -> u32 {
    // SAFETY: plain call.
    unsafe { cuMemRelease(memory) }
}

#[test]
fn released_memory_is_created_again_by_another_handle_and_without_waiting() {
    in_process(|| {
        let backend = backend();
        let mut made = [create(UNIT), create(2 * UNIT)];
        assert_eq!(backend.messages()[1..], ["MemCreate?"; 2]);
        for _ in 0..200 {
            assert_eq!(made.map(release), [0; 2]);
            assert_eq!(made.map(release), [INVALID_VALUE; 2]);
            assert_eq!(map(reserve(UNIT), UNIT, made[0]), INVALID_VALUE);
            let again = [create(UNIT), create(2 * UNIT)];
            assert!(again[0] != made[0] && again[1] != made[1]);
            made = again;
        }
        // An answer comes after all messages before it.
        create(4 * UNIT);
        let mut sent = backend.shared.take();
        assert_eq!(sent.pop().as_deref(), Some("MemCreate?"));
        assert!(!sent.iter().any(|message| message == "MemCreate?"));
        assert_eq!(sent.iter().filter(|sent| *sent == "MemRename").count(), 400);
    });
}

#[test]
fn as_much_is_kept_as_is_said_and_given_back_when_the_program_asks() {
    const LARGE: usize = 16 * UNIT;
    in_process(|| {
        let backend = backend();
        let [first, second, too_large] = [create(LARGE), create(UNIT), create(2 * LARGE)];
        backend.messages();
        assert_eq!([first, too_large].map(release), [0; 2]);
        assert_eq!(backend.shared.take(), ["MemRelease?"]);
        // The first has to make room.
        assert_eq!(release(second), 0);
        assert_eq!(backend.shared.take(), ["MemRelease?"]);
        let (mut free, mut total) = (0, 0);
        // SAFETY: both places are writable.
        assert_eq!(unsafe { cuMemGetInfo_v2(&raw mut free, &raw mut total) }, 0);
        assert_eq!(backend.shared.take(), ["MemRelease?", "MemGetInfo?"]);
    });
}

#[test]
fn a_thread_that_finds_no_memory_waits_for_another_that_gives_some_back() {
    in_process(|| {
        let backend = backend();
        let shared = &backend.shared;
        assert_eq!(release(create(UNIT)), 0);
        shared.lacks_memory.store(true, Ordering::Release);
        shared.holds_releases.store(true, Ordering::Release);
        let wait_until = |is_so: &dyn Fn() -> bool| {
            while !is_so() {
                std::thread::yield_now();
            }
        };
        let mut sent = Vec::new();
        std::thread::scope(|scope| {
            let first = scope.spawn(|| create(2 * UNIT));
            let mut gives_back = || {
                sent.extend(shared.take());
                sent.iter().any(|message| message == "MemRelease?")
            };
            while !gives_back() {
                std::thread::yield_now();
            }
            let second = scope.spawn(|| create(2 * UNIT));
            wait_until(&|| shared.refused.load(Ordering::Acquire) == 2);
            shared.lacks_memory.store(false, Ordering::Release);
            shared.holds_releases.store(false, Ordering::Release);
            assert_ne!(first.join().unwrap(), second.join().unwrap());
        });
    });
}

#[test]
fn beyond_some_mappings_the_backend_is_asked_whether_there_is_room() {
    const MAPPINGS: usize = 1 << 14;
    in_process(|| {
        let backend = backend();
        let (base, memory) = (reserve((MAPPINGS + 2) * UNIT), create(UNIT));
        backend.messages();
        for number in 0..MAPPINGS as u64 + 2 {
            assert_eq!(map(base + number * GRANULE, UNIT, memory), 0);
        }
        let sent = backend.messages();
        assert_eq!(sent[..MAPPINGS], ["MemMap"].repeat(MAPPINGS));
        assert_eq!(sent[MAPPINGS..], ["MemMap?"; 2]);
    });
}

#[test]
fn after_a_fault_no_range_is_reserved_mapped_or_freed() {
    in_process(|| {
        let backend = backend();
        let (base, memory) = (reserve(UNIT), create(UNIT));
        backend.messages();
        backend.fail(CuResult::LAUNCH_FAILED);
        assert_eq!(reserve_at(UNIT, 0, 0), Err(LAUNCH_FAILED));
        assert_eq!(map(base, UNIT, memory), LAUNCH_FAILED);
        assert_eq!(free(base, UNIT), LAUNCH_FAILED);
        assert_eq!(release(memory), LAUNCH_FAILED);
        assert_eq!(backend.shared.take(), [""; 0]);
    });
}
