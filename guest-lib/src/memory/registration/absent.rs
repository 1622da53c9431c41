//! Replaces pages of a DAX device by private memory: absent pages take their place, and are filled.
//!
//! The thread that makes pages absent waits until the event of that has been read (`UFFD_FEATURE_EVENT_REMAP`). A thread of
//! its own reads events and does nothing else. It must not wait for an absent page, and any memory of the program may be
//! absent: from its start on the thread uses its stack and static variables only.

use std::io;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::faults::Faults;
use crate::log;
use crate::signals::spawn_quiet;

/// Stack bytes of the thread. The program's libraries' thread-local storage is added to them.
const STACK: usize = 64 << 10;

static FAULTS: LazyLock<io::Result<Faults>> = LazyLock::new(Faults::open);
/// Whether the thread has been started.
static IS_STARTED: AtomicBool = AtomicBool::new(false);
/// Whether the thread reads events.
static READS: AtomicBool = AtomicBool::new(false);

/// Starts the thread, unless it runs. Callers take turns.
pub fn prepare() -> io::Result<()> {
    faults()?;
    if !IS_STARTED.load(Ordering::Relaxed) {
        spawn_quiet("wormhole-pages", STACK, read)?;
        IS_STARTED.store(true, Ordering::Relaxed);
    }
    while !READS.load(Ordering::Acquire) {
        std::thread::yield_now();
    }
    Ok(())
}

/// Returns the descriptor whose events the thread reads, once [`prepare`] has succeeded.
pub fn faults() -> io::Result<&'static Faults> {
    let copy = |error: &io::Error| io::Error::new(error.kind(), error.to_string());
    FAULTS.as_ref().map_err(copy)
}

fn read() {
    let Ok(faults) = &*FAULTS else {
        return;
    };
    READS.store(true, Ordering::Release);
    loop {
        match faults.next() {
            // The thread that has made a page absent fills it, if the program has not moved the page.
            Ok(Some(access)) => faults.end_stray(access.address),
            Ok(None) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                log::error!("registered memory cannot be given back: {error}");
                std::process::abort();
            }
        }
    }
}
