//! A thread with an event loop, on which virtio devices serve their queues.
//!
//! A [`QueueServer`] lives on the thread from the driver's DRIVER_OK to reset, and with its vCPU-side
//! half the rest of the time. So a thread can have any number of devices of any kind, and a VM any
//! number of threads.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use event_manager::{EventManager, RemoteEndpoint, SubscriberId, SubscriberOps};

use crate::confinement::Confinement;
use crate::devices::virtio::QueueServer;
use crate::sync::lock;
use crate::vcpu::ThreadError;
use crate::vm::VmError;

/// The thread's event loop has ended; its servers ended with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the device's thread has ended")]
pub struct ThreadGone;

/// A started thread. Dropping it ends the devices on it, each by [`QueueServer::finish`], and joins it.
#[derive(Debug)]
pub(crate) struct DeviceThread {
    stop: Arc<AtomicBool>,
    handle: DeviceThreadHandle,
    thread: Option<JoinHandle<()>>,
}

/// Moves servers to a thread and back.
#[derive(Debug, Clone)]
pub struct DeviceThreadHandle {
    endpoint: RemoteEndpoint<QueueServer>,
    serving: Arc<Mutex<HashSet<SubscriberId>>>,
}

impl DeviceThread {
    /// Starts a thread called `name`.
    pub fn start(name: &str) -> Result<Self, VmError> {
        let mut manager = EventManager::new().map_err(VmError::EventLoop)?;
        let handle = DeviceThreadHandle {
            endpoint: manager.remote_endpoint(),
            serving: Arc::default(),
        };
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let serving = Arc::clone(&handle.serving);
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                while !stopped.load(Ordering::SeqCst) {
                    if let Err(error) = manager.run() {
                        tracing::error!(%error, "the devices' event loop failed");
                        break;
                    }
                }
                for id in lock(&serving).drain() {
                    if let Ok(server) = manager.subscriber_mut(id) {
                        server.finish();
                    }
                }
            })
            .map_err(|source| ThreadError::Spawn {
                name: name.to_owned(),
                source,
            })?;
        Ok(Self {
            stop,
            handle,
            thread: Some(thread),
        })
    }

    /// Leaves the thread what serving its devices' queues needs. To be called before the guest runs.
    pub fn confine(&self, confinement: Confinement) -> Result<(), VmError> {
        self.handle
            .endpoint
            .call_blocking::<_, _, event_manager::Error>(move |_| Ok(confinement.enter()))
            .map_err(VmError::EventLoop)?
            .map_err(VmError::Confinement)
    }

    /// A handle for a device of this thread.
    pub fn handle(&self) -> DeviceThreadHandle {
        self.handle.clone()
    }
}

impl Drop for DeviceThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        if let Err(error) = self.handle.endpoint.kick() {
            tracing::debug!(%error, "the devices' event loop has ended already");
        }
        if self
            .thread
            .take()
            .is_some_and(|thread| thread.join().is_err())
        {
            tracing::error!("the devices' thread panicked");
        }
    }
}

impl DeviceThreadHandle {
    /// Lets `server` serve its queues on the thread. Not to be called on the thread itself.
    pub(crate) fn add(&self, server: QueueServer) -> Result<SubscriberId, ThreadGone> {
        let serving = Arc::clone(&self.serving);
        self.endpoint
            .call_blocking::<_, _, event_manager::Error>(move |ops| {
                let id = ops.add_subscriber(server);
                lock(&serving).insert(id);
                Ok(id)
            })
            .map_err(|_| ThreadGone)
    }

    /// Takes a server off the thread: when this returns it has dropped its queues.
    pub(crate) fn remove(&self, id: SubscriberId) -> Result<QueueServer, ThreadGone> {
        let serving = Arc::clone(&self.serving);
        self.endpoint
            .call_blocking::<_, _, event_manager::Error>(move |ops| {
                let mut server = ops.remove_subscriber(id)?;
                lock(&serving).remove(&id);
                server.stop();
                Ok(server)
            })
            .map_err(|_| ThreadGone)
    }
}
