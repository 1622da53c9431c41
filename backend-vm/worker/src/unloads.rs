//! Unloads of modules for which no call waits.
//!
//! The driver unloads a module only when the kernels before it are done. A thread of their own does such unloads, one after
//! the other, so that nothing but a reset of the context waits for them.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};

use wormhole_api::CuResult;
use wormhole_link::tasks;

use super::abort_on_panic::AbortOnPanic;
use super::objects::Loaded;

/// Work of the thread.
type Work = Box<dyn FnOnce() + Send>;

/// Images that are to be unloaded, and the thread that does it, which is started at first use.
#[derive(Default)]
pub struct Unloads {
    queue: Option<Sender<Work>>,
    left: Arc<AtomicUsize>,
}

impl fmt::Debug for Unloads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Unloads").finish_non_exhaustive()
    }
}

impl Unloads {
    /// Queues an image. A failure of the device is logged only.
    ///
    /// # Errors
    /// The image, if the thread cannot be started.
    pub fn add(&mut self, image: Arc<Loaded>) -> Result<(), Arc<Loaded>> {
        let queue = match &self.queue {
            Some(queue) => queue,
            None => match start() {
                Ok(queue) => self.queue.insert(queue),
                Err(error) => {
                    let error = tasks::named(error);
                    tracing::warn!("no thread can be made for unloads: {error}");
                    return Err(image);
                }
            },
        };
        let left = Arc::clone(&self.left);
        left.fetch_add(1, Ordering::Relaxed);
        let sent = queue.send(Box::new(move || {
            unload(&image);
            left.fetch_sub(1, Ordering::Release);
        }));
        if sent.is_err() {
            tracing::error!("the thread of unloads is gone");
        }
        Ok(())
    }

    pub fn are_outstanding(&self) -> bool {
        self.left.load(Ordering::Acquire) != 0
    }

    /// Returns the unloads that are not done yet. Returns `None` if there are none.
    pub fn outstanding(&self) -> Option<Outstanding> {
        let some = self.are_outstanding();
        self.queue.clone().filter(|_| some).map(Outstanding)
    }
}

/// Unloads an image. A failure is logged only.
pub fn unload(image: &Loaded) {
    if let Err(error) = image.unload() {
        tracing::debug!("unloading an image without a handle: {error}");
    }
}

fn start() -> io::Result<Sender<Work>> {
    let (queue, receiver) = channel::<Work>();
    std::thread::Builder::new()
        .name("unloads".to_owned())
        .spawn(move || {
            let _abort_on_panic = AbortOnPanic;
            receiver.into_iter().for_each(|work| work());
        })?;
    Ok(queue)
}

/// Unloads that are not done yet.
#[derive(Debug)]
pub struct Outstanding(Sender<Work>);

/// Asks for memory. If there is none left, waits for unloads that nobody waits for, and asks again: natively the memory of their
/// modules was free before the call.
pub fn ask_twice<T>(
    outstanding: Option<Outstanding>,
    mut ask: impl FnMut() -> wormhole_device::Result<T>,
) -> wormhole_device::Result<T> {
    match (ask(), outstanding) {
        (Err(CuResult::OUT_OF_MEMORY), Some(outstanding)) => {
            outstanding.wait();
            ask()
        }
        (result, _) => result,
    }
}

impl Outstanding {
    /// Waits until they are done. May block on the device.
    pub fn wait(self) {
        let (done, waits) = channel::<()>();
        if self.0.send(Box::new(move || drop(done))).is_ok() {
            // Nothing is sent: the wait ends when the thread drops its end.
            let _ = waits.recv();
        }
    }
}
