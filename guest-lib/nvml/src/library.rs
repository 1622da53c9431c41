//! The state of the library in this process: how often it was initialized, the stream to the backend, and what was
//! last known of each device.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nvml_wrapper_sys::bindings::nvmlDevice_t;
use wormhole_connect::log;

use crate::backend::{BackendError, Connection};
use crate::error::{NvmlError, Result};
use crate::view::View;

/// How long what changes by itself is taken for true.
const RECENT: Duration = Duration::from_millis(20);
/// Devices that have handles.
const DEVICES: usize = 64;

/// A device's handle is the address of its place here.
static HANDLES: [u8; DEVICES] = [0; DEVICES];

/// How old a view may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Age {
    /// For what never changes.
    Any,
    /// For what changes by itself.
    Recent,
    /// For what the program changes, and looks whether it did.
    Now,
}

/// The state of one process.
#[derive(Debug)]
pub struct Library {
    /// A forked child has a state of its own.
    pid: u32,
    /// `nvmlInit` less `nvmlShutdown`.
    initialized: AtomicU32,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    connection: Option<Connection>,
    devices: u32,
    views: Vec<Option<Arc<View>>>,
    /// Why it could not be initialized the last time, which is said once.
    said: String,
}

static CURRENT: AtomicPtr<Library> = AtomicPtr::new(std::ptr::null_mut());

/// The state of this very process. A forked child finds its parent's and takes the count over, and nothing else: the
/// parent may have been in the middle of anything.
pub fn library() -> &'static Library {
    loop {
        let found = CURRENT.load(Ordering::Acquire);
        // SAFETY: null, or what was leaked below.
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
            // SAFETY: made above, and known to nobody.
            drop(unsafe { Box::from_raw(fresh) });
        }
    }
}

/// The stream's descriptor, -1 without one. A forked child has no use for it.
static DESCRIPTOR: AtomicI32 = AtomicI32::new(-1);

/// Closed as the child begins: later the number may be of a file of its own.
extern "C" fn close_in_child() {
    let descriptor = DESCRIPTOR.swap(-1, Ordering::Relaxed);
    if descriptor >= 0 {
        // SAFETY: the descriptor is this library's, and the child never uses it.
        unsafe { libc::close(descriptor) };
    }
}

impl Library {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts an `nvmlInit`; the first connects.
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

    /// Takes an `nvmlInit` back; the last disconnects.
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

    /// `NVML_ERROR_UNINITIALIZED` before the first `nvmlInit` and after the last `nvmlShutdown`.
    pub fn check(&self) -> Result<&Self> {
        if self.initialized.load(Ordering::Relaxed) == 0 {
            return Err(NvmlError::UNINITIALIZED);
        }
        Ok(self)
    }

    /// How many devices there are.
    pub fn devices(&self) -> Result<u32> {
        self.view(0, Age::Any)?;
        Ok(self.inner().devices)
    }

    /// What is known of a device.
    pub fn view(&self, device: u32, age: Age) -> Result<Arc<View>> {
        self.check()?;
        let mut inner = self.inner();
        let known = inner.views.get(device as usize).cloned().flatten();
        if let Some(view) = known
            && (age == Age::Any || (age == Age::Recent && view.taken.elapsed() < RECENT))
        {
            return Ok(view);
        }
        // A backend that was started anew is asked on a new stream.
        let asked = self.refresh(&mut inner, device).or_else(|_| {
            Self::disconnect(&mut inner);
            self.refresh(&mut inner, device)
        });
        asked.map_err(|error| {
            log::debug!("NVML: {error}");
            Self::disconnect(&mut inner);
            error.code()
        })
    }

    fn refresh(
        &self,
        inner: &mut Inner,
        device: u32,
    ) -> std::result::Result<Arc<View>, BackendError> {
        let connection = match &mut inner.connection {
            Some(connection) => connection,
            none => {
                // No `Once`, for which a child would wait that was forked in the middle of it.
                static IS_HANDLED: AtomicBool = AtomicBool::new(false);
                if !IS_HANDLED.swap(true, Ordering::Relaxed) {
                    // SAFETY: the handler is a function of this library, which is never unloaded (it is linked with
                    // `nodelete`), and calls only what is safe where it runs.
                    unsafe { libc::pthread_atfork(None, None, Some(close_in_child)) };
                }
                let connection = Connection::open()?;
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

    /// The handle of a device that exists.
    pub fn handle(&self, device: u32) -> Result<nvmlDevice_t> {
        if device >= self.devices()? {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        let place = HANDLES
            .get(device as usize)
            .ok_or(NvmlError::INVALID_ARGUMENT)?;
        Ok(std::ptr::from_ref(place).cast_mut().cast())
    }

    /// The number of the device with this handle.
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
