//! Registrar: the only thread that registers host memory with the devices.
//!
//! Registering and unregistering may block on the device, and a context reset ends every
//! registration. One thread does all three, one after the other, and owns the list of
//! registrations, so none is made during a reset and lost with it.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};

use wormhole_api::CuResult;
use wormhole_device::Result;
use wormhole_link::progress::Progress;

use super::abort_on_panic::AbortOnPanic;
use super::devices::Devices;

/// Host ranges registered with the devices.
#[derive(Debug)]
pub struct Registrations {
    devices: Devices,
    /// Start → bytes.
    ranges: BTreeMap<u64, u64>,
}

impl Registrations {
    pub fn new(devices: Devices) -> Self {
        Self {
            devices,
            ranges: BTreeMap::new(),
        }
    }

    /// Registers a range.
    ///
    /// # Safety
    /// The range stays mapped, readable and writable, until [`Registrations::remove`] has been
    /// called for it.
    ///
    /// # Errors
    /// The device's error.
    pub unsafe fn add(&mut self, address: u64, bytes: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.devices.register(address, bytes) }?;
        self.ranges.insert(address, bytes);
        Ok(())
    }

    /// Returns the sticky error of the first device whose context is dead.
    pub fn fault(&self) -> Option<CuResult> {
        self.devices.fault()
    }

    /// Ends the registration of the range that starts at `address`.
    ///
    /// # Errors
    /// The device's error. The device may still reach the range, so the range must stay mapped.
    pub fn remove(&mut self, address: u64) -> Result<()> {
        if self.ranges.contains_key(&address) {
            self.devices.unregister(address)?;
            self.ranges.remove(&address);
        }
        Ok(())
    }

    /// Resets the devices' contexts and registers all ranges again.
    ///
    /// # Errors
    /// The device's error.
    pub fn reset(&self) -> Result<()> {
        self.devices.reset()?;
        for (&address, &bytes) in &self.ranges {
            // SAFETY: the range has been mapped since it was added, and was not removed.
            unsafe { self.devices.register(address, bytes) }?;
        }
        Ok(())
    }
}

/// Task for the registrar.
pub struct Task(Box<dyn FnOnce(&mut Registrations) + Send + Sync>);

impl Task {
    pub fn new(task: impl FnOnce(&mut Registrations) + Send + Sync + 'static) -> Self {
        Self(Box::new(task))
    }
}

impl fmt::Debug for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Task").finish_non_exhaustive()
    }
}

/// Handle on the registrar. The thread ends when the last handle is dropped.
#[derive(Clone)]
pub struct Registrar {
    tasks: Sender<Task>,
    /// Tasks that are not done yet.
    left: Arc<AtomicUsize>,
    progress: Progress,
}

impl fmt::Debug for Registrar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registrar").finish_non_exhaustive()
    }
}

impl Registrar {
    /// Starts the thread with the registrations made so far.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(mut registrations: Registrations, progress: &Progress) -> io::Result<Self> {
        let (tasks, receiver) = channel::<Task>();
        let theirs = progress.clone();
        let left = Arc::new(AtomicUsize::new(0));
        let done = Arc::clone(&left);
        std::thread::Builder::new()
            .name("registrar".to_owned())
            .spawn(move || {
                let _abort_on_panic = AbortOnPanic;
                while let Ok(task) = receiver.recv() {
                    (task.0)(&mut registrations);
                    theirs.end_task();
                    done.fetch_sub(1, Ordering::Release);
                }
            })?;
        Ok(Self {
            tasks,
            left,
            progress: progress.clone(),
        })
    }

    /// Returns whether a task is queued or underway.
    #[inline]
    pub fn is_busy(&self) -> bool {
        self.left.load(Ordering::Acquire) != 0
    }

    /// Queues `task` behind the tasks before it. Never blocks.
    pub fn run(&self, task: Task) {
        self.progress.add_task();
        self.left.fetch_add(1, Ordering::Relaxed);
        if self.tasks.send(task).is_err() {
            tracing::error!("the registrar is gone");
        }
    }
}
