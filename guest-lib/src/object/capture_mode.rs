//! Calls that stream captures forbid.
//!
//! "Potentially unsafe" calls (CUDA driver API, `cuThreadExchangeStreamCaptureMode`) fail while a capture forbids them,
//! and invalidate it. Whether it does depends on its mode, on the calling thread's mode, and on the thread that began
//! it. The graph layer holds the captures themselves.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use wormhole_lock::{Mutex, MutexGuard};

use wormhole_api::constants::capture_mode::{GLOBAL, RELAXED};

use crate::error::{CuError, Result};
use crate::types::CUstreamCaptureMode;

/// Captures under way, and their number.
static UNDER_WAY: Mutex<Vec<Arc<Facts>>> = Mutex::new(Vec::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Capture mode of the thread, initially global.
    static MODE: Cell<CUstreamCaptureMode> = const { Cell::new(GLOBAL) };
    /// Thread identity: its address differs between threads.
    static MARK: u8 = const { 0 };
}

fn this_thread() -> usize {
    MARK.with(|mark| std::ptr::from_ref(mark).addr())
}

fn under_way() -> MutexGuard<'static, Vec<Arc<Facts>>> {
    UNDER_WAY.lock()
}

#[derive(Debug)]
struct Facts {
    thread: usize,
    mode: CUstreamCaptureMode,
    valid: AtomicBool,
}

/// Capture under way. It forbids calls until it is dropped.
#[derive(Debug)]
pub struct UnderWay(Arc<Facts>);

impl UnderWay {
    /// Begins a capture on the calling thread.
    pub fn begin(mode: CUstreamCaptureMode) -> Self {
        let facts = Arc::new(Facts {
            thread: this_thread(),
            mode,
            valid: AtomicBool::new(true),
        });
        under_way().push(Arc::clone(&facts));
        COUNT.fetch_add(1, Ordering::Release);
        Self(facts)
    }

    pub fn is_valid(&self) -> bool {
        self.0.valid.load(Ordering::Acquire)
    }

    pub fn invalidate(&self) {
        self.0.valid.store(false, Ordering::Release);
    }

    /// Returns whether this thread may end the capture.
    pub fn may_end_here(&self) -> bool {
        self.0.mode == RELAXED || self.0.thread == this_thread()
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        under_way().retain(|facts| !Arc::ptr_eq(facts, &self.0));
        COUNT.fetch_sub(1, Ordering::Release);
    }
}

/// Exchanges the thread's mode (`cuThreadExchangeStreamCaptureMode`). Native CUDA takes and returns any number.
pub fn exchange_mode(mode: CUstreamCaptureMode) -> CUstreamCaptureMode {
    MODE.replace(mode)
}

/// Fails a potentially unsafe call while a capture forbids it, and invalidates that capture.
#[inline]
pub fn check_call() -> Result {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return Ok(());
    }
    check_call_with_captures()
}

#[cold]
fn check_call_with_captures() -> Result {
    let (mode, thread) = (MODE.get(), this_thread());
    if mode == RELAXED {
        return Ok(());
    }
    invalidate_where(|capture| {
        if capture.thread == thread {
            capture.mode != RELAXED
        } else {
            mode == GLOBAL && capture.mode == GLOBAL
        }
    })
}

/// Fails a call that concerns all streams while any capture is under way, and invalidates all captures.
#[inline]
pub fn check_context() -> Result {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return Ok(());
    }
    invalidate_where(|_| true)
}

fn invalidate_where(forbids: impl Fn(&Facts) -> bool) -> Result {
    let mut answer = Ok(());
    for capture in under_way().iter().filter(|capture| forbids(capture)) {
        capture.valid.store(false, Ordering::Release);
        answer = Err(CuError::STREAM_CAPTURE_UNSUPPORTED);
    }
    answer
}
