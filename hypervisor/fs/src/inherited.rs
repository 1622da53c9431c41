//! Descriptors that the process has from its starter.

use rustix::process::{Resource, getrlimit};

/// First descriptor that is no standard one.
const FIRST: u32 = 3;
/// Most descriptors to close one by one.
const MOST: u64 = 1 << 20;

/// Closes all descriptors but the standard ones: a starter may have left others open. The program calls this first,
/// while it has opened nothing itself.
pub fn close() {
    let open = getrlimit(Resource::Nofile).current.unwrap_or(MOST);
    // SAFETY: system calls on integers. Nothing in this process owns one of the descriptors.
    unsafe {
        // Kernels before 5.9 lack the call.
        if libc::syscall(libc::SYS_close_range, FIRST, u32::MAX, 0) != 0 {
            for number in (FIRST..).take_while(|number| u64::from(*number) < open.min(MOST)) {
                libc::close(number.cast_signed());
            }
        }
    }
}
