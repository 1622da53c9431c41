//! Manages the library's state in this process: the initialization count, the stream to the backend, and the latest
//! view
//! of each device.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, Ordering};
use std::time::Duration;

use nvml_wrapper_sys::bindings::nvmlDevice_t;
use wormhole_connect::{Observer, ObserverError, log};
use wormhole_lock::{Mutex, MutexGuard};

use crate::error::{NvmlError, Result};
use crate::view::View;

/// Maximum age of a view for values that change by themselves.
const RECENT: Duration = Duration::from_millis(20);
/// Maximum number of devices.
const DEVICES: usize = 64;

/// Bytes whose addresses are the devices' handles.
static HANDLES: [u8; DEVICES] = [0; DEVICES];

/// Maximum age of a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Age {
    /// Any view, for values that never change.
    Any,
    /// A view that is at most `RECENT` old, for values that change by themselves.
    Recent,
    /// A new view, for values that the program changes and then verifies.
    Now,
}

/// State of one process.
#[derive(Debug)]
pub struct Library {
    /// Process that created the state. A forked child creates its own.
    pid: u32,
    /// Number of `nvmlInit` calls minus `nvmlShutdown` calls.
    initialized: AtomicU32,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    connection: Option<Observer>,
    devices: u32,
    views: Vec<Option<Arc<View>>>,
    /// Error of the last failed initialization, so that it is logged only once.
    said: String,
}

static CURRENT: AtomicPtr<Library> = AtomicPtr::new(std::ptr::null_mut());

/// Returns the state of this process. A forked child copies only the initialization count of its parent's state, which
/// may be inconsistent: another thread of the parent may have been changing it during the fork.
pub fn library() -> &'static Library {
    loop {
        let found = CURRENT.load(Ordering::Acquire);
        // SAFETY: null, or a pointer to a state that was leaked below.
        let known = unsafe { found.as_ref() };
        let pid = std::process::id();
        if let Some(library) = known
            && library.pid == pid
        {
            return library;
        }
        let count = known.map_or(0, |library| library.initialized.load(Ordering::Relaxed));
        let fresh = Box::into_raw(Box::new(Library {
            pid,
            initialized: AtomicU32::new(count),
            inner: Mutex::default(),
        }));
        let exchanged = CURRENT.compare_exchange(found, fresh, Ordering::AcqRel, Ordering::Acquire);
        if exchanged.is_err() {
            // SAFETY: created above and never shared.
            drop(unsafe { Box::from_raw(fresh) });
        }
    }
}

/// Descriptor of the stream, -1 without one. A forked child closes it.
static DESCRIPTOR: AtomicI32 = AtomicI32::new(-1);

/// Closes the stream's descriptor at the start of a forked child. Later the child may have reused the number for
/// another
/// file.
extern "C" fn close_in_child() {
    let descriptor = DESCRIPTOR.swap(-1, Ordering::Relaxed);
    if descriptor >= 0 {
        // SAFETY: this library owns the descriptor, and the child never uses it.
        unsafe { libc::close(descriptor) };
    }
}

impl Library {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// Counts an `nvmlInit`; the first one connects.
    pub fn initialize(&self) -> Result {
        let mut inner = self.inner();
        if self.initialized.load(Ordering::Relaxed) == 0
            && let Err(error) = self.refresh(&mut inner, 0)
        {
            let why = error.to_string();
            if inner.said != why {
                log::error!("no NVML: {why}");
                if let Some(hint) = error.hint() {
                    log::error!("{hint}");
                }
                inner.said = why;
            }
            Self::disconnect(&mut inner);
            return Err(NvmlError::DRIVER_NOT_LOADED);
        }
        self.initialized.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Counts an `nvmlShutdown`; the last one disconnects.
    pub fn shut_down(&self) -> Result {
        let mut inner = self.inner();
        match self.initialized.load(Ordering::Relaxed) {
            0 => return Err(NvmlError::UNINITIALIZED),
            1 => Self::disconnect(&mut inner),
            _ => {}
        }
        self.initialized.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }

    fn disconnect(inner: &mut Inner) {
        DESCRIPTOR.store(-1, Ordering::Relaxed);
        inner.connection = None;
        inner.views.clear();
    }

    /// Returns `NVML_ERROR_UNINITIALIZED` before the first `nvmlInit` and after the last `nvmlShutdown`.
    pub fn check(&self) -> Result<&Self> {
        if self.initialized.load(Ordering::Relaxed) == 0 {
            return Err(NvmlError::UNINITIALIZED);
        }
        Ok(self)
    }

    /// Returns the number of devices.
    pub fn devices(&self) -> Result<u32> {
        self.view(0, Age::Any)?;
        Ok(self.inner().devices)
    }

    /// Returns a view of a device that is at most as old as `age`.
    pub fn view(&self, device: u32, age: Age) -> Result<Arc<View>> {
        self.check()?;
        let mut inner = self.inner();
        let known = inner.views.get(device as usize).cloned().flatten();
        if let Some(view) = known
            && (age == Age::Any || (age == Age::Recent && view.taken.elapsed() < RECENT))
        {
            return Ok(view);
        }
        // Retries on a new stream, since the backend may have been restarted.
        let asked = self.refresh(&mut inner, device).or_else(|_| {
            Self::disconnect(&mut inner);
            self.refresh(&mut inner, device)
        });
        asked.map_err(|error| {
            log::debug!("NVML: {error}");
            Self::disconnect(&mut inner);
            match error.is_timeout() {
                true => NvmlError::TIMEOUT,
                false => NvmlError::GPU_IS_LOST,
            }
        })
    }

    fn refresh(
        &self,
        inner: &mut Inner,
        device: u32,
    ) -> std::result::Result<Arc<View>, ObserverError> {
        let connection = match &mut inner.connection {
            Some(connection) => connection,
            none => {
                // Not a `Once`: a child that is forked during its initialization would wait forever.
                static IS_HANDLED: AtomicBool = AtomicBool::new(false);
                if !IS_HANDLED.swap(true, Ordering::Relaxed) {
                    // SAFETY: the handler is a function of this library, which is never unloaded (it is linked with
                    // `nodelete`), and calls only async-signal-safe functions.
                    unsafe { libc::pthread_atfork(None, None, Some(close_in_child)) };
                }
                let connection = Observer::open()?;
                DESCRIPTOR.store(connection.descriptor(), Ordering::Relaxed);
                none.insert(connection)
            }
        };
        let answer = connection.ask(device)?;
        inner.devices = answer
            .devices
            .min(u32::try_from(DEVICES).unwrap_or(u32::MAX));
        let view = Arc::new(View::new(answer.facts));
        let place = device as usize;
        if place < DEVICES {
            if inner.views.len() <= place {
                inner.views.resize(place + 1, None);
            }
            inner.views[place] = Some(Arc::clone(&view));
        }
        Ok(view)
    }

    /// Returns the handle of an existing device.
    pub fn handle(&self, device: u32) -> Result<nvmlDevice_t> {
        if device >= self.devices()? {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        let place = HANDLES
            .get(device as usize)
            .ok_or(NvmlError::INVALID_ARGUMENT)?;
        Ok(std::ptr::from_ref(place).cast_mut().cast())
    }

    /// Returns the number of the device with this handle.
    pub fn device(&self, handle: nvmlDevice_t) -> Result<u32> {
        self.check()?;
        let first = HANDLES.as_ptr() as usize;
        let number = (handle as usize)
            .checked_sub(first)
            .and_then(|number| u32::try_from(number).ok())
            .ok_or(NvmlError::INVALID_ARGUMENT)?;
        if number >= self.devices()? {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        Ok(number)
    }
}
