//! Registered host memory: its device address, and copies from and to it.

mod support;

use std::ffi::c_void;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::ptr::{null_mut, with_exposed_provenance};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use cuda as _;
use support::{Backend, in_process, is_skipped};
use wormhole_api::constants::host_register_flags::DEVICEMAP;

unsafe extern "C" {
    fn cuInit(flags: u32) -> u32;
    fn cuDeviceGetAttribute(value: *mut i32, attribute: i32, device: i32) -> u32;
    fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: i32) -> u32;
    fn cuDevicePrimaryCtxReset_v2(device: i32) -> u32;
    fn cuCtxSynchronize() -> u32;
    fn cuCtxGetCurrent(context: *mut *mut c_void) -> u32;
    fn cuCtxSetCurrent(context: *mut c_void) -> u32;
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> u32;
    fn cuMemHostRegister_v2(pointer: *mut c_void, bytes: usize, flags: u32) -> u32;
    fn cuMemHostUnregister(pointer: *mut c_void) -> u32;
    fn cuMemHostGetDevicePointer_v2(device: *mut u64, pointer: *mut c_void, flags: u32) -> u32;
    fn cuMemHostGetFlags(flags: *mut u32, pointer: *mut c_void) -> u32;
    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: *mut c_void)
    -> u32;
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) -> u32;
    fn cuPointerGetAttribute(data: *mut c_void, attribute: u32, address: u64) -> u32;
}

const BYTES: usize = 64 << 10;
const STACK_BYTES: usize = 256 << 10;

/// Starts a process with a context, some device memory, and some host memory.
fn ready(backend: Backend) -> (Backend, u64, Vec<u8>) {
    let (mut context, mut device) = (null_mut(), 0);
    // SAFETY: every place is writable.
    unsafe {
        assert_eq!(cuInit(0), 0);
        assert_eq!(cuDevicePrimaryCtxRetain(&raw mut context, 0), 0);
        assert_eq!(cuCtxSetCurrent(context), 0);
        // Too large for a slab: the answer comes after what was sent before.
        assert_eq!(cuMemAlloc_v2(&raw mut device, 2 << 20), 0);
    }
    backend.shared.take();
    (backend, device, vec![7; BYTES + 4096])
}

fn is_supported() -> bool {
    let mut value = 7;
    // SAFETY: the place is writable.
    assert_eq!(unsafe { cuDeviceGetAttribute(&raw mut value, 99, 0) }, 0);
    value == 1
}

#[test]
fn copies_from_it_go_without_staging() {
    in_process(|| {
        let (backend, device, mut memory) = ready(Backend::start());
        if is_skipped(is_supported()) {
            return;
        }
        let place: *mut c_void = memory.as_mut_ptr().cast();
        let (mut alias, mut flags, mut pointer) = (0, 0, 0_u64);
        // SAFETY: the memory is there, and every place is writable.
        unsafe {
            assert_eq!(cuMemHostRegister_v2(place, BYTES, DEVICEMAP), 0);
            assert_eq!(cuMemHostRegister_v2(place.byte_add(BYTES - 1), 1, 0), 712);
            assert_eq!(cuMemHostUnregister(place.byte_add(4096)), 1);
            assert_eq!(cuMemHostUnregister(null_mut()), 1);
            assert_eq!(cuMemHostGetDevicePointer_v2(&raw mut alias, place, 0), 0);
            assert_eq!(cuMemHostGetFlags(&raw mut flags, place), 0);
            assert_ne!(flags & DEVICEMAP, 0);
            assert_eq!(
                cuPointerGetAttribute((&raw mut pointer).cast(), 4, alias + 5),
                0
            );
            assert_eq!(pointer, place.addr() as u64 + 5);
            memory[3] = 99;
            let alias_pointer =
                with_exposed_provenance::<u8>(usize::try_from(alias).expect("64 bits"));
            assert_eq!(alias_pointer.add(3).read_volatile(), 99, "the same page");
            assert_eq!(cuMemcpyHtoDAsync_v2(device, place, BYTES, null_mut()), 0);
            assert_eq!(cuCtxSynchronize(), 0);
            assert_eq!(backend.shared.take(), ["MemCopy", "FenceWrite"]);
            assert_eq!(
                cuMemcpyHtoDAsync_v2(device, place, BYTES + 1, null_mut()),
                1
            );
            assert_eq!(cuMemHostUnregister(place), 0);
            assert_eq!(cuMemHostUnregister(place), 713);
            assert_eq!(cuMemHostGetDevicePointer_v2(&raw mut alias, place, 0), 1);
            assert_eq!(
                cuPointerGetAttribute((&raw mut pointer).cast(), 4, alias + 5),
                1
            );
            memory[3] = 98;
            assert_eq!(alias_pointer.add(3).read_volatile(), 99, "no more");
        }
    });
}

/// Thread that unregisters its own stack, which the test has mapped.
struct OnRegisteredStack {
    context: *mut c_void,
    stack: *mut c_void,
    registered: Barrier,
    result: AtomicU32,
}

extern "C" fn unregister_own_stack(thread: *mut c_void) -> *mut c_void {
    // SAFETY: the test joins this thread before the value is dropped.
    let thread = unsafe { &*thread.cast::<OnRegisteredStack>() };
    thread.registered.wait();
    // SAFETY: the context is live.
    let result = unsafe {
        assert_eq!(cuCtxSetCurrent(thread.context), 0);
        cuMemHostUnregister(thread.stack)
    };
    thread.result.store(result, Ordering::Relaxed);
    null_mut()
}

/// Maps new memory, at an address or wherever the kernel chooses.
fn map(place: *mut c_void) -> *mut c_void {
    let (access, fixed) = (
        libc::PROT_READ | libc::PROT_WRITE,
        if place.is_null() { 0 } else { libc::MAP_FIXED },
    );
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | fixed;
    // SAFETY: only the test uses the memory at `place`.
    let mapped = unsafe { libc::mmap(place, STACK_BYTES, access, flags, -1, 0) };
    assert_ne!(mapped, libc::MAP_FAILED);
    mapped
}

#[test]
fn a_thread_can_end_the_registration_of_its_own_stack() {
    in_process(|| {
        let (_backend, ..) = ready(Backend::start());
        if is_skipped(is_supported()) {
            return;
        }
        let mut thread = OnRegisteredStack {
            context: null_mut(),
            stack: map(null_mut()),
            registered: Barrier::new(2),
            result: AtomicU32::new(u32::MAX),
        };
        // SAFETY: the memory and every place outlive the thread. The signal ends a deadlock.
        unsafe {
            libc::alarm(60);
            assert_eq!(cuCtxGetCurrent(&raw mut thread.context), 0);
            let (mut started, mut attributes) = (0, std::mem::zeroed());
            assert_eq!(libc::pthread_attr_init(&raw mut attributes), 0);
            let set = libc::pthread_attr_setstack(&raw mut attributes, thread.stack, STACK_BYTES);
            assert_eq!(set, 0);
            let created = libc::pthread_create(
                &raw mut started,
                &raw const attributes,
                unregister_own_stack,
                (&raw const thread).cast_mut().cast(),
            );
            assert_eq!(created, 0);
            assert_eq!(
                cuMemHostRegister_v2(thread.stack, STACK_BYTES, DEVICEMAP),
                0
            );
            thread.registered.wait();
            assert_eq!(libc::pthread_join(started, null_mut()), 0);
        }
        assert_eq!(thread.result.into_inner(), 0);
        // SAFETY: the memory was mapped above, and nothing is registered at first. `words` and `alias` are the memory's first
        // word.
        unsafe {
            assert_eq!(cuMemHostUnregister(thread.stack), 713);
            // The stack still has the pages that the device used. New memory in its place has others.
            map(thread.stack);
            let alias = registered(thread.stack, STACK_BYTES);
            let (words, alias) = (
                thread.stack.cast::<u64>(),
                with_exposed_provenance::<u64>(alias),
            );
            words.write_volatile(99);
            assert_eq!(alias.read_volatile(), 99, "the same page");
            assert_eq!(cuMemHostUnregister(thread.stack), 0);
        }
    });
}

/// Registers memory. Returns its device address.
///
/// # Safety
/// Only the test uses the memory.
unsafe fn registered(place: *mut c_void, bytes: usize) -> usize {
    let mut alias = 0;
    // SAFETY: the caller's promise, and a place for the address.
    unsafe {
        assert_eq!(cuMemHostRegister_v2(place, bytes, DEVICEMAP), 0);
        assert_eq!(cuMemHostGetDevicePointer_v2(&raw mut alias, place, 0), 0);
    }
    usize::try_from(alias).expect("64 bits")
}

/// Registers memory and ends that, and compares all its words with those at the device's address. Another thread writes to
/// every 512th word, so at most once to a page, until the end.
fn check_all_words(offset: usize, bytes: usize) {
    const PAGE: usize = 4096;
    // The pages around the registered memory lie in the vector.
    let memory: Vec<AtomicU64> = (0..(offset + bytes + 3 * PAGE) as u64 / 8)
        .map(AtomicU64::new)
        .collect();
    let shift = memory.as_ptr().addr().next_multiple_of(PAGE) - memory.as_ptr().addr();
    let is_intact = |step: u64| {
        let mut words = (0_u64..).zip(&memory).filter(|(n, _)| n % 512 != 0);
        words.all(|(n, word)| word.load(Ordering::Relaxed) == n ^ step << 32)
    };
    let check = || {
        let place = memory.as_ptr().wrapping_byte_add(shift + offset);
        let place = place.cast_mut().cast();
        // The first word that lies in the registered memory, and its place there.
        let (first, within) = (
            (shift + offset).div_ceil(8),
            offset.next_multiple_of(8) - offset,
        );
        let mut context = null_mut();
        // SAFETY: every place is writable, and only this test uses the memory. The words at the device's address are written to
        // as atomically as those of the vector.
        unsafe {
            assert_eq!(cuDevicePrimaryCtxRetain(&raw mut context, 0), 0);
            assert_eq!(cuCtxSetCurrent(context), 0);
            let alias = with_exposed_provenance::<AtomicU64>(registered(place, bytes) + within);
            let seen = std::slice::from_raw_parts(alias, (bytes - within) / 8);
            assert!(is_intact(0), "{bytes} bytes from {offset}");
            let mut words = (first as u64..).zip(seen).filter(|(n, _)| n % 512 != 0);
            assert!(words.all(|(n, word)| word.load(Ordering::Relaxed) == n));
            for (n, word) in (0_u64..).zip(&memory).filter(|(n, _)| n % 512 != 0) {
                word.store(n ^ 1 << 32, Ordering::Relaxed);
            }
            assert_eq!(cuMemHostUnregister(place), 0);
            assert!(is_intact(1), "{bytes} bytes from {offset}");
        }
    };
    std::thread::scope(|scope| {
        let checker = scope.spawn(check);
        let mut rounds = 0;
        while !checker.is_finished() {
            for word in memory.iter().step_by(512) {
                word.store(word.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
            }
            rounds += 1;
        }
        for (n, word) in (0_u64..).zip(&memory).step_by(512) {
            assert_eq!(word.load(Ordering::Relaxed), n + rounds);
        }
    });
}

#[test]
fn all_words_stay_while_several_threads_register_memory_and_others_write() {
    /// From here on several threads copy, if there are enough processors.
    const LARGE: usize = 4 << 20;
    in_process(|| {
        let (_backend, ..) = ready(Backend::start());
        if is_skipped(is_supported()) {
            return;
        }
        std::thread::scope(|scope| {
            for thread in 0..3 {
                scope.spawn(move || {
                    let sizes = [
                        4097,
                        LARGE - 4097,
                        LARGE - 1,
                        LARGE,
                        LARGE + 1,
                        2 * LARGE + 77,
                    ];
                    for round in 0..sizes.len() {
                        let bytes = sizes[(round + 2 * thread) % sizes.len()];
                        check_all_words([0, 1, 4095][round % 3], bytes);
                    }
                });
            }
        });
    });
}

#[test]
fn memory_that_takes_the_place_of_registered_memory_is_not_taken_for_it() {
    in_process(|| {
        let (_backend, device, mut read) = ready(Backend::start());
        if is_skipped(is_supported()) {
            return;
        }
        let first = map(null_mut());
        let most = STACK_BYTES - 2048;
        let second = first.wrapping_byte_add(most);
        let mut alias = 0;
        // SAFETY: the memory was mapped above, and every place is writable.
        unsafe {
            registered(first, most);
            // The second range lies in the last page of the first, which is already mapped for the device.
            registered(second, 2048);
            assert_eq!(cuMemHostUnregister(second), 0);
            map(first);
            assert_eq!(cuMemHostRegister_v2(second, 2048, DEVICEMAP), 801);
            assert_eq!(cuMemHostRegister_v2(second, 2048, 0), 0);
            assert_eq!(cuMemHostGetDevicePointer_v2(&raw mut alias, second, 0), 1);
            second.cast::<u64>().write(99);
            assert_eq!(cuMemcpyHtoDAsync_v2(device, second, 2048, null_mut()), 0);
            let into = read.as_mut_ptr().cast();
            assert_eq!(cuMemcpyDtoH_v2(into, device, 2048), 0);
            assert_eq!(into.cast::<u64>().read_unaligned(), 99);
            assert_eq!(cuMemHostUnregister(second), 0);
            assert_eq!(cuMemHostUnregister(first), 0);
            // The old memory no longer prevents the registration.
            let alias = with_exposed_provenance::<u64>(registered(second, 2048));
            assert_eq!(alias.read(), 99);

            // Arena that the program has moved goes to no other memory, though its registration ends.
            let moved = map(null_mut());
            let (page, flags) = (
                second.wrapping_byte_sub(2048),
                libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED,
            );
            assert_eq!(libc::mremap(page, 4096, 4096, flags, moved), moved);
            assert_eq!(cuMemHostUnregister(second), 0);
            map(first);
            assert_ne!(registered(second, 2048), alias.addr());
            second.cast::<u64>().write(100);
            assert_eq!(moved.wrapping_byte_add(2048).cast::<u64>().read(), 99);
            assert_eq!(cuMemHostUnregister(second), 0);
        }
    });
}

#[test]
fn a_shared_file_is_registered_for_copies_only_where_the_worker_cannot_have_it() {
    in_process(|| {
        let (backend, device, _) = ready(Backend::start());
        // SAFETY: the name is a string; the file is as long as the mapping, and every place is writable.
        unsafe {
            let file = libc::memfd_create(c"shared".as_ptr(), libc::MFD_CLOEXEC);
            assert_eq!(libc::ftruncate(file, 8192), 0);
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let place = libc::mmap(null_mut(), 8192, access, libc::MAP_SHARED, file, 0);
            assert_ne!(place, libc::MAP_FAILED);
            assert_eq!(cuMemHostRegister_v2(place, 8192, DEVICEMAP), 801);
            assert_eq!(cuMemHostRegister_v2(place, 8192, 0), 0);
            let mut alias = 0;
            assert_eq!(cuMemHostGetDevicePointer_v2(&raw mut alias, place, 0), 1);
            place.cast::<u8>().add(8191).write(42);
            assert_eq!(cuMemcpyHtoDAsync_v2(device, place, 8192, null_mut()), 0);
            assert!(backend.shared.take().iter().all(|name| name != "FileMap"));
            let mut read = vec![0_u8; 8192];
            assert_eq!(cuMemcpyDtoH_v2(read.as_mut_ptr().cast(), device, 8192), 0);
            assert_eq!(read[8191], 42);
            assert_eq!(cuMemHostUnregister(place), 0);
        }
    });
}

/// Returns the byte that a forked child reads, or `None` if a signal ends the child.
///
/// # Safety
/// The byte is readable in this process.
unsafe fn seen_by_child(place: *const u8) -> Option<i32> {
    // SAFETY: the child reads a byte and ends.
    unsafe {
        let child = libc::fork();
        assert!(child >= 0);
        if child == 0 {
            libc::_exit(i32::from(place.read_volatile()));
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status))
    }
}

/// Returns the size of this process's address space in bytes (`proc_pid_statm(5)`).
fn address_space() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").expect("proc is mounted");
    let pages: u64 = text.split(' ').next().unwrap().parse().unwrap();
    pages * 4096
}

#[test]
fn what_a_forked_child_cannot_have_is_said() {
    in_process(|| {
        let (_backend, ..) = ready(Backend::start());
        if is_skipped(is_supported()) {
            return;
        }
        let place = map(null_mut());
        let (mut said, writer) = std::io::pipe().expect("descriptors");
        // SAFETY: the memory was mapped above.
        unsafe {
            place.cast::<u8>().write(7);
            registered(place, STACK_BYTES);
            assert_eq!(seen_by_child(place.cast()), Some(7));
            // Leaves room for allocations of other threads, but not for a copy of the memory.
            let little = libc::rlimit {
                rlim_cur: address_space() + STACK_BYTES as u64 - 4096,
                rlim_max: libc::RLIM_INFINITY,
            };
            let errors = libc::dup(2);
            assert_eq!(libc::dup2(writer.as_raw_fd(), 2), 2);
            drop(writer);
            assert_eq!(libc::setrlimit(libc::RLIMIT_AS, &raw const little), 0);
            let seen = seen_by_child(place.cast());
            // Any other allocation would end the process.
            let much = libc::rlimit {
                rlim_cur: libc::RLIM_INFINITY,
                rlim_max: libc::RLIM_INFINITY,
            };
            assert_eq!(libc::setrlimit(libc::RLIMIT_AS, &raw const much), 0);
            assert_eq!(libc::dup2(errors, 2), 2);
            assert_eq!(seen, None, "there is nothing to look at");
        }
        let mut text = [0; 256];
        let bytes = said.read(&mut text).expect("a pipe");
        let text = String::from_utf8_lossy(&text[..bytes]);
        assert!(text.contains("a forked child lacks memory"), "{text}");
    });
}

#[test]
fn a_reset_ends_registrations() {
    in_process(|| {
        let (_backend, _, mut memory) = ready(Backend::start());
        let place: *mut c_void = memory.as_mut_ptr().cast();
        // SAFETY: the memory is there.
        unsafe {
            assert_eq!(cuMemHostRegister_v2(place, BYTES, 0), 0);
            assert_eq!(cuDevicePrimaryCtxReset_v2(0), 0);
            let mut context = null_mut();
            assert_eq!(cuDevicePrimaryCtxRetain(&raw mut context, 0), 0);
            assert_eq!(cuMemHostUnregister(place), 713);
            assert_eq!(cuMemHostRegister_v2(place, BYTES, 0), 0);
            assert_eq!(cuMemHostUnregister(place), 0);
        }
        assert!(memory.iter().all(|byte| *byte == 7));
    });
}

#[test]
fn in_a_vm_it_is_copied_and_cannot_be_mapped() {
    in_process(|| {
        let (_backend, device, mut memory) = ready(Backend::start_in_vm());
        assert!(!is_supported());
        let place: *mut c_void = memory.as_mut_ptr().cast();
        let mut alias = 0;
        // SAFETY: the memory is there, and every place is writable.
        unsafe {
            assert_eq!(cuMemHostRegister_v2(place, BYTES, DEVICEMAP), 801);
            assert_eq!(
                cuMemHostUnregister(place),
                713,
                "what is refused is not registered"
            );
            assert_eq!(cuMemHostRegister_v2(place, BYTES, 0), 0);
            assert_eq!(cuMemHostGetDevicePointer_v2(&raw mut alias, place, 0), 1);
            memory[BYTES - 1] = 42;
            assert_eq!(cuMemcpyHtoDAsync_v2(device, place, BYTES, null_mut()), 0);
            memory.fill(0);
            assert_eq!(cuMemcpyDtoH_v2(place, device, BYTES), 0);
            assert_eq!((memory[0], memory[BYTES - 1]), (7, 42));
            assert_eq!(cuMemHostUnregister(place), 0);
        }
    });
}

/// Answers a system call with `EPERM` in the place of the kernel.
extern "C" fn refuse(_: i32, _: *const libc::siginfo_t, context: *mut libc::ucontext_t) {
    // SAFETY: the kernel passes the registers that it is going to restore.
    unsafe { (*context).uc_mcontext.gregs[libc::REG_RAX as usize] = -i64::from(libc::EPERM) };
}

/// Has the calling thread trap at a system call (`SECCOMP_RET_TRAP`), whose handler is [`refuse`].
fn trap(call: libc::c_long) {
    let step = |code, jf, k| libc::sock_filter {
        code: u16::try_from(code).unwrap(),
        jt: 0,
        jf,
        k,
    };
    let ends = libc::BPF_RET | libc::BPF_K;
    let mut steps = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        step(
            libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
            1,
            u32::try_from(call).unwrap(),
        ),
        step(ends, 0, libc::SECCOMP_RET_TRAP),
        step(ends, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog {
        len: 4,
        filter: steps.as_mut_ptr(),
    };
    // SAFETY: the kernel reads both structures during the calls. The handler has this form with `SA_SIGINFO`.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = refuse as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        let set = libc::sigaction(libc::SIGSYS, &raw const action, null_mut());
        assert_eq!(set, 0);
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        let confined = libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const filter);
        assert_eq!(confined, 0);
    }
}

#[test]
fn a_program_that_traps_a_call_of_the_system_has_its_handler_called() {
    in_process(|| {
        let (_backend, _, mut memory) = ready(Backend::start());
        if is_skipped(is_supported()) {
            return;
        }
        let place: *mut c_void = memory.as_mut_ptr().cast();
        trap(libc::SYS_mremap);
        // SAFETY: the memory is there.
        let registered = unsafe { cuMemHostRegister_v2(place, BYTES, DEVICEMAP) };
        assert_eq!(registered, 801, "its pages cannot be moved");
        memory[3] = 9;
        assert_eq!(memory[3], 9);
    });
}

#[test]
fn what_is_no_memory_of_the_programs_is_refused() {
    in_process(|| {
        let (_backend, device, mut memory) = ready(Backend::start());
        let place: *mut c_void = memory.as_mut_ptr().cast();
        let register = |pointer, bytes, flags| {
            // SAFETY: invalid memory is detected.
            unsafe { cuMemHostRegister_v2(pointer, bytes, flags) }
        };
        assert_eq!(register(null_mut(), 1, 0), 1);
        assert_eq!(register(place, 0, 0), 1);
        assert_eq!(register(place, usize::MAX, 0), 1);
        assert_eq!(register(place, 1, 16), 1);
        assert_eq!(register(place, 1, 4), 801, "memory of a device");
        assert_eq!(register(place, 1, 8), 801, "for reading only");
        assert_eq!(register(std::ptr::without_provenance_mut(0x10000), 1, 0), 1);
        let device = usize::try_from(device).expect("64 bits");
        assert_eq!(register(std::ptr::without_provenance_mut(device), 1, 0), 1);
        // SAFETY: nothing is registered.
        assert_eq!(unsafe { cuMemHostUnregister(place) }, 713);
    });
}
