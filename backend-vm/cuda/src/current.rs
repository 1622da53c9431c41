//! Current context of a thread.
//!
//! The driver has one current context for each thread, and most of its functions use it. Any thread uses
//! [`CudaDevice`] for any of several devices, so the device makes its own context current before it calls the driver,
//! unless the thread's last call was for the same context.
//!
//! [`CudaDevice`]: crate::CudaDevice

use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use wormhole_api::ctypes::CUcontext;

use crate::driver::Driver;

thread_local! {
    /// Identity of the context that this thread made current last; 0 for none.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

/// Allows the calling thread to change the current context through the driver: the next use of a device makes the
/// device's own context current again.
pub fn forget() {
    CURRENT.set(0);
}

/// Identity of a context. After a reset the driver may reuse the handle of the previous context.
#[derive(Debug)]
pub struct Identity(AtomicU64);

impl Identity {
    /// Identity of a context that the calling thread has just made current through the driver.
    pub fn of_current() -> Self {
        let identity = Self(AtomicU64::new(0));
        identity.renew();
        identity
    }

    /// Renews the identity for a context that replaces this one: every other thread makes the new one current.
    pub fn renew(&self) {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let fresh = NEXT.fetch_add(1, Ordering::Relaxed);
        self.0.store(fresh, Ordering::Release);
        CURRENT.set(fresh);
    }

    /// Makes the context current in the calling thread, if it is not. If that fails, no context is current, and the
    /// driver's next function returns `CUDA_ERROR_INVALID_CONTEXT`.
    #[inline]
    pub fn enter(&self, driver: &Driver, context: impl FnOnce() -> CUcontext) {
        let wanted = self.0.load(Ordering::Acquire);
        if CURRENT.get() == wanted {
            return;
        }
        CURRENT.set(0);
        // SAFETY: the caller retains the context.
        match unsafe { driver.cuCtxSetCurrent(context()) } {
            Ok(()) => CURRENT.set(wanted),
            Err(error) => {
                tracing::debug!("a context cannot be made current: {error}");
                // SAFETY: no context is one to the driver.
                let _ = unsafe { driver.cuCtxSetCurrent(ptr::null_mut()) };
            }
        }
    }
}
