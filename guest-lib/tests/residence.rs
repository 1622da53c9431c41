//! Managed memory that changes sides: messages to the device, and what the program finds.

mod support;

use std::ffi::c_void;
use std::os::fd::AsRawFd;
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use cuda as _;
use support::{Backend, in_process, is_skipped};
use wormhole_ring::layout::MANAGED;

unsafe extern "C" {
    fn cuInit(flags: u32) -> u32;
    fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: i32) -> u32;
    fn cuCtxSetCurrent(context: *mut c_void) -> u32;
    fn cuCtxSynchronize() -> u32;
    fn cuMemAllocManaged(address: *mut u64, bytes: usize, flags: u32) -> u32;
    fn cuMemAdvise(address: u64, bytes: usize, advice: u32, device: i32) -> u32;
    fn cuMemPrefetchAsync(address: u64, bytes: usize, device: i32, stream: *mut c_void) -> u32;
    fn cuMemFree_v2(address: u64) -> u32;
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

impl Ready {
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
        let address = self.managed + offset as u64;
        // SAFETY: the library checks the address.
        unsafe {
            assert_eq!(cuMemsetD8Async(address, byte, 1, null_mut()), 0);
            assert_eq!(cuCtxSynchronize(), 0);
        }
    }

    /// Returns the messages since the last call, without fences.
    fn log(&self) -> Vec<String> {
        let mut log = self.backend.shared.take();
        log.retain(|message| message != "FenceWrite");
        log
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
        let mut again = 0;
        // SAFETY: the place is writable.
        assert_eq!(unsafe { cuMemAllocManaged(&raw mut again, BYTES, 1) }, 0);
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
        // The byte comes to the device although the program makes no call, and what the device does comes back.
        let mut pushed = Vec::new();
        while !pushed.contains(&"ManagedPush?".to_owned()) {
            pushed.extend(ready.log());
            std::thread::yield_now();
        }
        ready.fill(PART + 1, 2);
        while ready.read(PART + 1) != 2 {
            std::thread::yield_now();
        }
        assert_eq!(ready.read(PART), 3);
    });
}

#[test]
fn system_calls_reach_it() {
    in_process(|| {
        let Some(ready) = ready() else { return };
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
    });
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
        // SAFETY: a plain call.
        assert_ne!(unsafe { cuCtxSynchronize() }, 0);
    });
}

#[test]
fn a_prefetch_brings_it_to_the_device_and_advice_keeps_it_at_home() {
    in_process(|| {
        let Some(ready) = ready() else { return };
        ready.write(PART, 3);
        // SAFETY: the library checks the address.
        unsafe {
            assert_eq!(cuMemPrefetchAsync(ready.managed, BYTES, 0, null_mut()), 0);
            assert_eq!(ready.log(), ["ManagedPlace?"]);
            assert_eq!(ready.read(PART), 3);
            let mut other = 0;
            assert_eq!(cuMemAllocManaged(&raw mut other, BYTES, 1), 0);
            // Preferred location: the host.
            assert_eq!(cuMemAdvise(other, BYTES, 3, -1), 0);
            assert_eq!(cuMemPrefetchAsync(other, BYTES, 0, null_mut()), 0);
        }
        let log = ready.log();
        assert!(!log.contains(&"ManagedPlace?".to_owned()), "{log:?}");
    });
}

#[test]
fn a_small_allocation_stays_in_the_arena() {
    in_process(|| {
        let Some(ready) = ready() else { return };
        let mut small = 0;
        // SAFETY: the place is writable.
        assert_eq!(unsafe { cuMemAllocManaged(&raw mut small, 4096, 1) }, 0);
        assert!(small < MANAGED.0);
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
            // SAFETY: the library checks the address.
            let result = unsafe { cuMemPrefetchAsync(ready.managed, BYTES, 0, null_mut()) };
            assert_eq!(result, 0);
        }
        let log = ready.backend.shared.take();
        assert!(
            log.iter().all(|message| message.starts_with("Managed")),
            "{log:?}"
        );
    });
}
