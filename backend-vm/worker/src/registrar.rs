//! The thread that registers host memory with the devices: the only one that does.
//!
//! Registering and unregistering may wait for the device, and a reset of the context ends every
//! registration. So one thread does all three, one after the other, and owns the list of what is
//! registered: nothing is registered beside a reset and lost with it.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::mpsc::{Sender, channel};

use wormhole_api::CuResult;
use wormhole_device::Result;

use super::abort_on_panic::AbortOnPanic;
use super::devices::Devices;
use wormhole_link::progress::Progress;

/// The host ranges that the devices reach.
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
    /// The range is mapped, readable and writable, until [`Registrations::remove`] has been called for it.
    ///
    /// # Errors
    /// The device's.
    pub unsafe fn add(&mut self, address: u64, bytes: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.devices.register(address, bytes) }?;
        self.ranges.insert(address, bytes);
        Ok(())
    }

    /// The error that the device's context died of, if it did.
    pub fn fault(&self) -> Option<CuResult> {
        self.devices.fault()
    }

    /// Ends the registration of the range that starts at `address`.
    ///
    /// # Errors
    /// The device's: it may still reach the range, which has to stay mapped.
    pub fn remove(&mut self, address: u64) -> Result<()> {
        match self.ranges.remove(&address) {
            Some(_) => self.devices.unregister(address),
            None => Ok(()),
        }
    }

    /// Destroys everything in the context and registers anew what was registered.
    ///
    /// # Errors
    /// The device's.
    pub fn reset(&self) -> Result<()> {
        self.devices.reset()?;
        for (&address, &bytes) in &self.ranges {
            // SAFETY: mapped since it was added, and not removed.
            unsafe { self.devices.register(address, bytes) }?;
        }
        Ok(())
    }
}

/// What the thread is to do.
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

/// A hand on the thread. It ends with the last of them.
#[derive(Clone)]
pub struct Registrar {
    tasks: Sender<Task>,
    progress: Progress,
}

impl fmt::Debug for Registrar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registrar").finish_non_exhaustive()
    }
}

impl Registrar {
    /// Starts the thread with what is registered already.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(mut registrations: Registrations, progress: &Progress) -> io::Result<Self> {
        let (tasks, receiver) = channel::<Task>();
        let theirs = progress.clone();
        std::thread::Builder::new()
            .name("registrar".to_owned())
            .spawn(move || {
                let _critical = AbortOnPanic;
                while let Ok(task) = receiver.recv() {
                    (task.0)(&mut registrations);
                    theirs.end_task();
                }
            })?;
        Ok(Self {
            tasks,
            progress: progress.clone(),
        })
    }

    /// Runs `task` when those before it are done. Never waits.
    pub fn run(&self, task: Task) {
        self.progress.add_task();
        if self.tasks.send(task).is_err() {
            tracing::error!("the registrar is gone");
        }
    }
}
