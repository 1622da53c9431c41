//! Registers the pages in which the C library keeps the main thread's data, outside its stack. The test runner does
//! not run tests on the main thread, so this program has no test harness.

mod support;

use std::ffi::c_void;
use std::ptr::{null_mut, with_exposed_provenance_mut};

use cuda as _;
use support::{Backend, is_skipped};

unsafe extern "C" {
    fn cuInit(flags: u32) -> u32;
    fn cuDeviceGetAttribute(value: *mut i32, attribute: i32, device: i32) -> u32;
    fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: i32) -> u32;
    fn cuCtxSetCurrent(context: *mut c_void) -> u32;
    fn cuMemHostRegister_v2(pointer: *mut c_void, bytes: usize, flags: u32) -> u32;
    fn cuMemHostUnregister(pointer: *mut c_void) -> u32;
    fn cuMemHostGetDevicePointer_v2(device: *mut u64, pointer: *mut c_void, flags: u32) -> u32;
}

fn main() {
    let _backend = Backend::start();
    let (mut context, mut is_supported) = (null_mut(), 0);
    // SAFETY: every place is writable. The signal ends a deadlock.
    unsafe {
        libc::alarm(60);
        assert_eq!(cuInit(0), 0);
        assert_eq!(cuDevicePrimaryCtxRetain(&raw mut context, 0), 0);
        assert_eq!(cuCtxSetCurrent(context), 0);
        assert_eq!(cuDeviceGetAttribute(&raw mut is_supported, 99, 0), 0);
    }
    if is_skipped(is_supported == 1) {
        return;
    }
    // SAFETY: plain calls.
    let (thread, errno) = unsafe {
        (
            usize::try_from(libc::pthread_self()),
            libc::__errno_location(),
        )
    };
    for address in [thread.expect("64 bits"), errno.expose_provenance()] {
        let page = with_exposed_provenance_mut(address / 4096 * 4096);
        let mut device = 0;
        // SAFETY: the page is mapped, and registered for copies only, without access by the device.
        unsafe {
            assert_eq!(cuMemHostRegister_v2(page, 4096, 0), 0);
            assert_eq!(cuMemHostGetDevicePointer_v2(&raw mut device, page, 0), 1);
            assert_eq!(cuMemHostUnregister(page), 0);
        }
    }
}
