//! Makes a function return success without doing anything, so that `cargo xtask mutants` finds the tests that notice.
//!
//! `WORMHOLE_MUTANT` names the function that does nothing. `WORMHOLE_CALLED` names a file of a byte for each
//! function, by its index in the table; the bytes of functions that are called become 1.

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU8, Ordering};

use wormhole_api::FUNCTIONS;

static MUTANT: LazyLock<Option<usize>> = LazyLock::new(|| {
    let name = std::env::var("WORMHOLE_MUTANT").ok()?;
    FUNCTIONS.iter().position(|function| function.name == name)
});

static CALLED: LazyLock<Option<&'static [AtomicU8]>> = LazyLock::new(|| {
    let path = std::env::var_os("WORMHOLE_CALLED")?;
    let file = OpenOptions::new().read(true).write(true).open(path).ok()?;
    if file.metadata().ok()?.len() < u64::try_from(FUNCTIONS.len()).ok()? {
        return None;
    }
    // SAFETY: a new mapping of a file of at least this length.
    let base = unsafe {
        libc::mmap(
            ptr::null_mut(),
            FUNCTIONS.len(),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    if base == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the mapping is that long, is never unmapped, and any byte is an `AtomicU8`.
    Some(unsafe { std::slice::from_raw_parts(base.cast(), FUNCTIONS.len()) })
});

/// Notes a call of the function with this index in the table; returns true if the function is to do nothing.
pub fn returns_at_once(index: usize) -> bool {
    if let Some(byte) = CALLED.and_then(|bytes| bytes.get(index)) {
        byte.store(1, Ordering::Relaxed);
    }
    *MUTANT == Some(index)
}
