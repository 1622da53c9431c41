//! Managed memory that changes sides: messages to the device, and what the program finds.

mod support;

use std::ffi::{c_char, c_void};
use std::os::fd::AsRawFd;
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use cuda as _;
use support::calls::launch;
use support::{Backend, FREE_BYTES, TOTAL_BYTES, in_process, is_skipped};
use wormhole_api::constants::device_ordinal::CPU;
use wormhole_api::constants::memory_advice::{
    SET_PREFERRED_LOCATION, SET_READ_MOSTLY, UNSET_READ_MOSTLY,
};
use wormhole_ring::layout::MANAGED;

unsafe extern "C" {
    fn cuInit(flags: u32) -> u32;
    fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: i32) -> u32;
    fn cuCtxSetCurrent(context: *mut c_void) -> u32;
    fn cuCtxSynchronize() -> u32;
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> u32;
    fn cuMemAllocManaged(address: *mut u64, bytes: usize, flags: u32) -> u32;
    fn cuMemAdvise(address: u64, bytes: usize, advice: u32, device: i32) -> u32;
    fn cuMemPrefetchAsync(address: u64, bytes: usize, device: i32, stream: *mut c_void) -> u32;
    fn cuMemFree_v2(address: u64) -> u32;
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> u32;
    fn cuGraphCreate(graph: *mut *mut c_void, flags: u32) -> u32;
    fn cuGraphInstantiateWithFlags(
        executable: *mut *mut c_void,
        graph: *mut c_void,
        flags: u64,
    ) -> u32;
    fn cuModuleLoadData(module: *mut *mut c_void, image: *const c_void) -> u32;
    fn cuModuleGetFunction(
        function: *mut *mut c_void,
        module: *mut c_void,
        name: *const c_char,
    ) -> u32;
    fn cuMemsetD8Async(address: u64, byte: u8, count: usize, stream: *mut c_void) -> u32;
}

const PART: usize = 2 << 20;
const BYTES: usize = 3 * PART - 5;

struct Ready {
    backend: Backend,
    managed: u64,
}

/// Starts a process with managed memory; nothing if its accesses cannot be blocked.
fn ready() -> Option<Ready> {
    let backend = Backend::start();
    let (mut context, mut managed) = (null_mut(), 0);
    // SAFETY: every place is writable.
    unsafe {
        assert_eq!(cuInit(0), 0);
        assert_eq!(cuDevicePrimaryCtxRetain(&raw mut context, 0), 0);
        assert_eq!(cuCtxSetCurrent(context), 0);
        assert_eq!(cuMemAllocManaged(&raw mut managed, BYTES, 1), 0);
    }
    let changes_sides = (MANAGED.0..MANAGED.0 + MANAGED.1).contains(&managed);
    if is_skipped(changes_sides) {
        return None;
    }
    backend.shared.take();
    Some(Ready { backend, managed })
}

fn allocate(bytes: usize) -> u64 {
    let mut address = 0;
    // SAFETY: the place is writable.
    assert_eq!(unsafe { cuMemAllocManaged(&raw mut address, bytes, 1) }, 0);
    address
}

fn start_fill(address: u64, byte: u8, count: usize) {
    // SAFETY: the library checks the address.
    let result = unsafe { cuMemsetD8Async(address, byte, count, null_mut()) };
    assert_eq!(result, 0);
}

fn synchronize() -> u32 {
    // SAFETY: a plain call.
    unsafe { cuCtxSynchronize() }
}

fn prefetch(address: u64) {
    // SAFETY: the library checks the address.
    let result = unsafe { cuMemPrefetchAsync(address, BYTES, 0, null_mut()) };
    assert_eq!(result, 0);
}

fn advise(address: u64, bytes: usize, advice: u32, device: i32) {
    // SAFETY: the library checks the address.
    let result = unsafe { cuMemAdvise(address, bytes, advice, device) };
    assert_eq!(result, 0);
}

impl Ready {
    /// Checks that bytes come to the device although the program makes no call, and that what the device does comes back.
    fn exchanges(&self) {
        let mut pushed = Vec::new();
        while !pushed.contains(&"ManagedPush?".to_owned()) {
            pushed.extend(self.log());
            std::thread::yield_now();
        }
        self.fill(PART + 1, 2);
        while self.read(PART + 1) != 2 {
            std::thread::yield_now();
        }
    }

    fn place(&self, offset: usize) -> *mut u8 {
        let address = usize::try_from(self.managed).expect("64 bits") + offset;
        with_exposed_provenance_mut(address)
    }

    fn write(&self, offset: usize, byte: u8) {
        // SAFETY: in managed memory.
        unsafe { self.place(offset).write_volatile(byte) };
    }

    fn read(&self, offset: usize) -> u8 {
        // SAFETY: in managed memory.
        unsafe { self.place(offset).read_volatile() }
    }

    /// Has the device fill a byte, and waits.
    fn fill(&self, offset: usize, byte: u8) {
        self.fill_bytes(offset, byte, 1);
    }

    fn fill_bytes(&self, offset: usize, byte: u8, count: usize) {
        start_fill(self.managed + offset as u64, byte, count);
        assert_eq!(synchronize(), 0);
    }

    /// Returns the messages since the last call, without fences and questions whether the device is idle.
    fn log(&self) -> Vec<String> {
        let mut log = self.backend.shared.take();
        log.retain(|message| message != "FenceWrite" && message != "ManagedIdle?");
        log
    }

    /// Gives advice for the first bytes.
    fn advise(&self, bytes: usize, advice: u32) {
        advise(self.managed, bytes, advice, 0);
    }

    /// Brings the memory to the device.
    fn place_on_device(&self) {
        self.fill(0, 1);
        assert_eq!(self.log(), ["MemSet", "ManagedPlace?"]);
    }
}

#[test]
fn it_comes_to_the_device_after_work_and_back_in_parts_at_accesses() {
    in_process(|| {
        let Some(ready) = ready() else { return };
        ready.write(5, 7);
        ready.place_on_device();
        ready.fill(PART + 1, 9);
        assert_eq!(ready.read(PART + 1), 9, "the device's byte");
        ready.write(PART + 2, 8);
        assert_eq!(ready.log(), ["MemSet", "ManagedFetch?"], "one part, once");
        ready.fill(PART + 3, 6);
        assert_eq!(
            ready.log(),
            ["ManagedPush?", "MemSet"],
            "the part goes back first"
        );
        let found = [5, 0, PART + 1, PART + 2, PART + 3].map(|offset| ready.read(offset));
        assert_eq!(found, [7, 1, 9, 8, 6]);
        // SAFETY: frees the memory.
        assert_eq!(unsafe { cuMemFree_v2(ready.managed) }, 0);
        let log = ready.log();
        assert!(log.contains(&"ManagedClose?".to_owned()), "{log:?}");
        let again = allocate(BYTES);
        assert_eq!(again, ready.managed, "its address is used again");
        assert_eq!(ready.read(5), 7, "and its home");
    });
}

#[test]
fn an_access_during_work_leaves_it_at_home_for_good() {
    in_process(|| {
        let Some(ready) = ready() else { return };
        ready.backend.shared.is_busy.store(true, Ordering::Release);
        ready.fill(3, 4);
        ready.write(2, 5);
        ready.fill(2, 6);
        assert_eq!(ready.read(2), 6, "both sides reach one memory");
        ready.log();
        ready.backend.shared.is_busy.store(false, Ordering::Release);
        for byte in 0..3 {
            ready.fill(1, byte);
            assert_eq!(ready.read(1), byte);
        }
        let log = ready.log();
        assert!(!log.contains(&"ManagedPlace?".to_owned()), "{log:?}");
    });
}

#[test]
fn an_access_does_not_wait_for_work_that_may_wait_for_it() {
    in_process(|| {
        let Some(ready) = ready() else { return };
        ready.place_on_device();
        ready.backend.shared.is_busy.store(true, Ordering::Release);
        ready.write(PART, 3);
        ready.exchanges();
        assert_eq!(ready.read(PART), 3);
    });
}

fn system_calls_reach(is_mostly_read: bool) {
    in_process(|| {
        let Some(ready) = ready() else { return };
        if is_mostly_read {
            ready.advise(BYTES, SET_READ_MOSTLY);
        }
        ready.place_on_device();
        ready.fill(PART, 8);
        let (mut byte, (from, to)) = ([0_u8], std::io::pipe().expect("a pipe"));
        // SAFETY: both are bytes that exist.
        unsafe {
            let place = ready.place(PART).cast::<c_void>();
            assert_eq!(libc::write(to.as_raw_fd(), place, 1), 1);
            assert_eq!(libc::read(from.as_raw_fd(), byte.as_mut_ptr().cast(), 1), 1);
            assert_eq!(byte, [8]);
            ready.fill(PART, 7);
            assert_eq!(libc::write(to.as_raw_fd(), byte.as_ptr().cast(), 1), 1);
            assert_eq!(libc::read(from.as_raw_fd(), place, 1), 1);
        }
        assert_eq!(ready.read(PART), 8);
        ready.fill(PART + 1, 9);
        let found = [0, 1].map(|offset| ready.read(PART + offset));
        assert_eq!(
            found,
            [8, 9],
            "what the system wrote has come to the device"
        );
    });
}

#[test]
fn system_calls_reach_it() {
    system_calls_reach(false);
}

#[test]
fn system_calls_write_to_memory_that_is_mostly_read() {
    system_calls_reach(true);
}

#[test]
fn a_program_goes_on_when_the_backend_is_gone() {
    in_process(|| {
        let Some(ready) = ready() else { return };
        ready.write(PART, 3);
        ready.place_on_device();
        ready.backend.disappear();
        ready.write(PART + 1, 4);
        assert_eq!([0, 1].map(|offset| ready.read(PART + offset)), [3, 4]);
        // A thread of the library's own notices the end.
        while synchronize() == 0 {
            std::thread::yield_now();
        }
    });
}

#[test]
fn a_prefetch_brings_it_to_the_device_and_advice_keeps_it_at_home() {
    in_process(|| {
        let Some(ready) = ready() else { return };
        ready.write(PART, 3);
        prefetch(ready.managed);
        assert_eq!(ready.log(), ["ManagedPlace?"]);
        assert_eq!(ready.read(PART), 3);
        let other = allocate(BYTES);
        advise(other, BYTES, SET_PREFERRED_LOCATION, CPU);
        prefetch(other);
        let log = ready.log();
        assert!(!log.contains(&"ManagedPlace?".to_owned()), "{log:?}");
    });
}

/// Starts a process with memory on the device that is mostly read, and reads all parts.
fn mostly_read() -> Option<Ready> {
    let ready = ready()?;
    ready.advise(BYTES, SET_READ_MOSTLY);
    ready.place_on_device();
    for part in 0..3 {
        assert_eq!(ready.read(part * PART), u8::from(part == 0));
    }
    let log = ready.log();
    assert_eq!(log[0], "ManagedMirror?");
    assert!(log[1..].iter().all(|message| message == "ManagedFetch?"));
    Some(ready)
}

#[test]
fn what_is_mostly_read_stays_on_both_sides() {
    in_process(|| {
        let Some(ready) = mostly_read() else { return };
        for turn in 0..5 {
            let other = 5 + turn;
            // Work that changes nothing here.
            ready.fill(2 * PART, 0);
            assert_eq!(ready.log(), ["MemSet"], "nothing goes to the device");
            let found = [0, PART, 2 * PART, other].map(|offset| ready.read(offset));
            assert_eq!(found, [1, 0, 0, 0]);
            assert_eq!(ready.log(), ["ManagedRefresh?"], "once for all parts");
        }
    });
}

#[test]
fn what_the_device_changes_in_memory_that_is_mostly_read_is_what_the_program_reads() {
    in_process(|| {
        let Some(ready) = mostly_read() else { return };
        for byte in 2..9 {
            let place = usize::from(byte) % 3 * PART + usize::from(byte);
            ready.fill(place, byte);
            assert_eq!(ready.read(place), byte);
            assert_eq!(ready.log(), ["MemSet", "ManagedRefresh?"]);
        }
    });
}

#[test]
fn what_is_mostly_read_is_taken_away_before_work_although_other_memory_comes_to_the_device() {
    in_process(|| {
        let Some(ready) = mostly_read() else { return };
        start_fill(allocate(BYTES), 1, 1);
        assert_eq!(ready.read(PART), 0);
        assert_eq!(synchronize(), 0);
        assert!(ready.log().contains(&"ManagedPlace?".to_owned()));
        ready.fill(PART, 2);
        assert_eq!(ready.read(PART), 2);
    });
}

#[test]
fn what_the_program_writes_to_memory_that_is_mostly_read_is_what_the_device_finds() {
    in_process(|| {
        let Some(ready) = mostly_read() else { return };
        for byte in 2..9 {
            let (part, at) = (usize::from(byte) % 3 * PART, usize::from(byte));
            // While it is shown, while it is used, and while it is away.
            for offset in [part + at, part + 100 + at] {
                ready.write(offset, byte);
                assert_eq!(ready.read(offset), byte);
            }
            ready.log();
            ready.fill(part, byte);
            assert_eq!(ready.log(), ["ManagedPush?", "MemSet"], "one part");
            ready.write(part + 200 + at, byte);
            assert_eq!(ready.log(), ["ManagedRefresh?"]);
            ready.fill(part + 300, byte);
            assert_eq!(ready.log(), ["ManagedPush?", "MemSet"], "again");
            let found = [
                part,
                part + at,
                part + 100 + at,
                part + 200 + at,
                part + 300,
            ];
            assert_eq!(found.map(|offset| ready.read(offset)), [byte; 5]);
            ready.log();
        }
    });
}

#[test]
fn an_access_to_memory_that_is_mostly_read_does_not_wait_for_work_that_may_wait_for_it() {
    in_process(|| {
        let Some(ready) = mostly_read() else { return };
        ready.fill(PART, 0);
        ready.backend.shared.is_busy.store(true, Ordering::Release);
        ready.write(PART, 3);
        ready.exchanges();
        ready.log();
        ready.backend.shared.is_busy.store(false, Ordering::Release);
        ready.fill(PART + 2, 4);
        let found = [0, 1, 2, PART].map(|offset| ready.read(PART + offset));
        assert_eq!(found, [3, 2, 4, 0]);
        // The last moment at which both sides of the part were equal is not known.
        let log = ready.log();
        assert!(log.contains(&"ManagedFetch?".to_owned()), "{log:?}");
    });
}

#[test]
fn memory_that_is_not_mostly_read_any_more_has_no_mirror() {
    in_process(|| {
        let Some(ready) = mostly_read() else { return };
        ready.advise(BYTES, UNSET_READ_MOSTLY);
        assert_eq!(ready.log(), ["ManagedMirror?"]);
        ready.write(PART, 3);
        ready.fill(PART + 1, 4);
        let log = ready.log();
        assert_eq!(log, ["ManagedPush?", "MemSet"], "no write was noticed");
        assert_eq!([0, 1].map(|offset| ready.read(PART + offset)), [3, 4]);
        assert_eq!(ready.log(), ["ManagedFetch?"]);
        // Advised again, it has another, which knows nothing.
        ready.fill(PART, 5);
        ready.advise(BYTES, SET_READ_MOSTLY);
        assert_eq!(ready.read(PART), 5);
        let log = ready.log();
        assert_eq!(
            log,
            ["ManagedPush?", "MemSet", "ManagedMirror?", "ManagedFetch?"]
        );
    });
}

#[test]
fn a_mirror_is_neither_made_nor_freed_while_work_may_wait_for_the_program() {
    in_process(|| {
        let Some(ready) = ready() else { return };
        let has_mirror = |log: Vec<String>| log.contains(&"ManagedMirror?".to_owned());
        let set_busy = |busy| ready.backend.shared.is_busy.store(busy, Ordering::Release);
        ready.place_on_device();
        ready.advise(BYTES, SET_READ_MOSTLY);
        set_busy(true);
        ready.write(PART, 3);
        assert!(!has_mirror(ready.log()));
        set_busy(false);
        ready.fill(PART, 4);
        assert_eq!(ready.read(PART), 4);
        assert!(has_mirror(ready.log()));
        ready.fill(PART, 5);
        set_busy(true);
        ready.advise(BYTES, UNSET_READ_MOSTLY);
        assert!(!has_mirror(ready.log()));
        set_busy(false);
        assert_eq!(ready.read(PART), 5);
        assert!(has_mirror(ready.log()));
        // Advised again before it was freed, it is as good as new.
        ready.advise(BYTES, SET_READ_MOSTLY);
        assert_eq!(ready.read(2 * PART), 0);
        assert!(has_mirror(ready.log()));
        ready.fill(2 * PART, 6);
        set_busy(true);
        ready.advise(BYTES, UNSET_READ_MOSTLY);
        ready.advise(BYTES, SET_READ_MOSTLY);
        set_busy(false);
        assert_eq!(ready.read(2 * PART), 6);
        ready.fill(2 * PART, 7);
        assert_eq!(ready.read(2 * PART), 7);
        let log = ready.log();
        assert!(log.contains(&"ManagedRefresh?".to_owned()), "{log:?}");
        assert!(!has_mirror(log));
    });
}

/// Seconds after which a thread that waits for the test's own is ended.
const STUCK: u32 = 120;

#[test]
fn a_thread_that_frees_managed_memory_holds_up_no_access_to_other() {
    in_process(|| {
        let Some(ready) = ready() else { return };
        ready.place_on_device();
        let other = allocate(BYTES);
        prefetch(other);
        ready.fill(1, 2);
        let shared = &ready.backend.shared;
        shared.is_busy.store(true, Ordering::Release);
        let freeing = std::thread::spawn(move || {
            let mut context = null_mut();
            // SAFETY: the place is writable, and nothing uses the memory.
            unsafe {
                assert_eq!(cuDevicePrimaryCtxRetain(&raw mut context, 0), 0);
                assert_eq!(cuCtxSetCurrent(context), 0);
                cuMemFree_v2(other)
            }
        });
        while !ready.log().contains(&"ManagedClose?".to_owned()) {
            std::thread::yield_now();
        }
        // SAFETY: a plain call.
        unsafe { libc::alarm(STUCK) };
        ready.write(2, 3);
        assert_eq!([1, 2].map(|offset| ready.read(offset)), [2, 3]);
        assert!(!freeing.is_finished(), "it waits for the device");
        shared.is_busy.store(false, Ordering::Release);
        assert_eq!(freeing.join().unwrap(), 0);
    });
}

#[test]
fn a_thread_that_waits_for_the_memory_of_mirrors_holds_up_no_other() {
    in_process(|| {
        let Some(ready) = mostly_read() else { return };
        ready.fill(PART, 2);
        let shared = &ready.backend.shared;
        shared.lacks_memory.store(true, Ordering::Release);
        shared.is_busy.store(true, Ordering::Release);
        let allocating = std::thread::spawn(|| {
            let (mut context, mut address) = (null_mut(), 0);
            // SAFETY: every place is writable.
            unsafe {
                assert_eq!(cuDevicePrimaryCtxRetain(&raw mut context, 0), 0);
                assert_eq!(cuCtxSetCurrent(context), 0);
                cuMemAlloc_v2(&raw mut address, 64 << 20)
            }
        });
        while !ready.log().contains(&"ManagedMirror?".to_owned()) {
            std::thread::yield_now();
        }
        // SAFETY: a plain call.
        unsafe { libc::alarm(STUCK) };
        ready.write(PART + 1, 3);
        assert_eq!([0, 1].map(|offset| ready.read(PART + offset)), [2, 3]);
        assert!(!allocating.is_finished(), "it waits for the device");
        shared.is_busy.store(false, Ordering::Release);
        assert_eq!(allocating.join().unwrap(), 2);
    });
}

#[test]
fn memory_of_which_work_changes_much_is_fetched_as_it_is_accessed() {
    /// More parts than a refresh copies.
    const PARTS: usize = 18;
    in_process(|| {
        let Some(mut ready) = ready() else { return };
        let bytes = PARTS * PART;
        ready.managed = allocate(bytes);
        ready.advise(bytes, SET_READ_MOSTLY);
        let all = |byte| (0..PARTS).all(|part| ready.read(part * PART + 5) == byte);
        ready.fill_bytes(0, 1, bytes);
        assert!(all(1));
        ready.log();
        for byte in 2..5 {
            ready.fill_bytes(0, byte, bytes);
            assert!(all(byte));
            let log = ready.log();
            let has = |name: &str| log.contains(&name.to_owned());
            assert!(has("ManagedFetch?"), "{log:?}");
            assert_eq!(has("ManagedRefresh?"), byte < 4, "{log:?}");
            assert_eq!(has("ManagedMirror?"), byte == 3, "{log:?}");
            assert_eq!(has("ManagedPush?"), byte == 4, "{log:?}");
        }
    });
}

#[test]
fn memory_for_whose_mirror_the_device_has_no_room_changes_sides_as_any_other() {
    in_process(|| {
        let Some(ready) = ready() else { return };
        ready.advise(BYTES, SET_READ_MOSTLY);
        ready.place_on_device();
        ready
            .backend
            .shared
            .lacks_memory
            .store(true, Ordering::Release);
        for byte in 1..4 {
            ready.fill(PART, byte);
            assert_eq!(ready.read(PART), byte);
        }
        let mut log = ready.log();
        log.retain(|message| message == "ManagedMirror?");
        assert_eq!(log.len(), 1, "asked once");
    });
}

#[test]
fn an_allocation_that_finds_no_memory_gets_that_of_mirrors() {
    in_process(|| {
        let Some(ready) = mostly_read() else { return };
        ready.write(PART, 3);
        ready
            .backend
            .shared
            .lacks_memory
            .store(true, Ordering::Release);
        let mut address = 0;
        // SAFETY: the place is writable.
        let result = unsafe { cuMemAlloc_v2(&raw mut address, 64 << 20) };
        assert_eq!(result, 2, "the device has none in spite of that");
        assert_eq!(ready.log(), ["MemAlloc?", "ManagedMirror?", "MemAlloc?"]);
        // Parts that were shown are like any others.
        ready.write(0, 4);
        ready.fill(1, 5);
        let found = [0, 1, PART].map(|offset| ready.read(offset));
        assert_eq!(found, [4, 5, 3]);
        let log = ready.log();
        assert!(!log.contains(&"ManagedRefresh?".to_owned()), "{log:?}");
    });
}

#[test]
fn managed_memory_for_which_the_device_has_no_room_gets_that_of_mirrors() {
    in_process(|| {
        let Some(ready) = mostly_read() else { return };
        let lacks_memory = &ready.backend.shared.lacks_memory;
        lacks_memory.store(true, Ordering::Release);
        let other = allocate(BYTES);
        ready.log();
        prefetch(other);
        let log = ready.log();
        assert_eq!(log, ["ManagedPlace?", "ManagedMirror?", "ManagedPlace?"]);
        // Parts that were shown are like any others.
        ready.write(0, 4);
        ready.fill(1, 5);
        assert_eq!([0, 1, PART].map(|offset| ready.read(offset)), [4, 5, 0]);
    });
}

#[test]
fn memory_of_mirrors_is_free() {
    in_process(|| {
        let Some(ready) = mostly_read() else { return };
        let info = || {
            let (mut free, mut total) = (0, 0);
            // SAFETY: both places are writable.
            let result = unsafe { cuMemGetInfo_v2(&raw mut free, &raw mut total) };
            assert_eq!(result, 0);
            [free, total]
        };
        assert_eq!(info(), [FREE_BYTES + 3 * PART, TOTAL_BYTES]);
        ready.advise(BYTES, UNSET_READ_MOSTLY);
        assert_eq!(info(), [FREE_BYTES, TOTAL_BYTES]);
    });
}

/// The driver needs memory for the code of a module and for the stacks of a kernel's threads.
#[test]
fn a_module_or_a_launch_for_which_the_device_has_no_memory_gets_that_of_mirrors() {
    in_process(|| {
        let Some(ready) = mostly_read() else { return };
        let lacks_memory = |lacks| {
            ready
                .backend
                .shared
                .lacks_memory
                .store(lacks, Ordering::Release)
        };
        let (mut module, mut function) = (null_mut(), null_mut());
        lacks_memory(true);
        // SAFETY: the places are writable, and the image is text that ends.
        unsafe {
            let text = c".version 8.0".as_ptr().cast();
            let result = cuModuleLoadData(&raw mut module, text);
            assert_eq!(result, 2, "the device has none in spite of that");
            let log = ready.log();
            assert_eq!(log, ["ModuleLoad?", "ManagedMirror?", "ModuleLoad?"]);
            lacks_memory(false);
            assert_eq!(cuModuleLoadData(&raw mut module, text), 0);
            let named = cuModuleGetFunction(&raw mut function, module, c"f".as_ptr());
            assert_eq!(named, 0);
        }
        ready.advise(BYTES, UNSET_READ_MOSTLY);
        ready.advise(BYTES, SET_READ_MOSTLY);
        ready.fill(0, 1);
        assert_eq!(ready.read(0), 1);
        lacks_memory(true);
        ready.log();
        launch(function, null_mut());
        let mut log = ready.log();
        log.retain(|message| message != "ManagedPush?");
        assert_eq!(log, ["LaunchKernel?", "ManagedMirror?", "LaunchKernel?"]);
    });
}

/// A record that fails ends the session.
#[test]
fn while_there_are_mirrors_a_graph_waits_for_the_device_and_gets_their_memory() {
    in_process(|| {
        let Some(ready) = mostly_read() else { return };
        let lacks_memory = &ready.backend.shared.lacks_memory;
        lacks_memory.store(true, Ordering::Release);
        let (mut graph, mut made) = (null_mut(), null_mut());
        // SAFETY: both places are writable.
        let result = unsafe {
            assert_eq!(cuGraphCreate(&raw mut graph, 0), 0);
            cuGraphInstantiateWithFlags(&raw mut made, graph, 0)
        };
        assert_eq!(result, 2, "the device has none in spite of that");
        let mut log = ready.log();
        log.retain(|message| ["GraphInstantiate?", "ManagedMirror?"].contains(&message.as_str()));
        assert_eq!(
            log,
            ["GraphInstantiate?", "ManagedMirror?", "GraphInstantiate?"]
        );
    });
}

#[test]
fn advice_for_a_part_of_an_allocation_makes_no_mirror() {
    in_process(|| {
        let Some(ready) = ready() else { return };
        ready.advise(PART, SET_READ_MOSTLY);
        ready.place_on_device();
        assert_eq!(ready.read(0), 1);
        assert_eq!(ready.log(), ["ManagedFetch?"]);
    });
}

#[test]
fn a_small_allocation_stays_in_the_arena() {
    in_process(|| {
        let Some(ready) = ready() else { return };
        assert!(allocate(4096) < MANAGED.0);
        assert_eq!(ready.log(), [""; 0]);
    });
}

/// Managed memory that [`handler`] reads, and the number of its reads.
static READ: AtomicU64 = AtomicU64::new(0);
static READS: AtomicUsize = AtomicUsize::new(0);

extern "C" fn handler(_: i32) {
    let address = usize::try_from(READ.load(Ordering::Relaxed)).expect("64 bits");
    // SAFETY: in managed memory.
    let _ = unsafe { with_exposed_provenance_mut::<u8>(address).read_volatile() };
    READS.fetch_add(1, Ordering::Relaxed);
}

/// Natively a handler may access managed memory whatever its thread does in the library. Here it may not while the thread
/// writes a record (docs/limits.md).
#[test]
fn a_signal_handler_reaches_it_while_its_thread_moves_it() {
    /// Seconds after which a thread that waits for itself is ended.
    const STUCK: u32 = 120;
    in_process(|| {
        let Some(ready) = ready() else { return };
        READ.store(ready.managed, Ordering::Relaxed);
        // SAFETY: the handler has this signature, and reads memory that stays allocated.
        let thread = unsafe {
            libc::signal(libc::SIGUSR1, handler as *const () as libc::sighandler_t);
            libc::alarm(STUCK);
            libc::pthread_self()
        };
        std::thread::spawn(move || {
            loop {
                // SAFETY: the thread lives as long as this process.
                unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        while READS.load(Ordering::Relaxed) < 200 {
            // All records of a prefetch are written while signals are blocked.
            prefetch(ready.managed);
        }
        let log = ready.backend.shared.take();
        assert!(
            log.iter().all(|message| message.starts_with("Managed")),
            "{log:?}"
        );
    });
}
