//! Runs an event loop on a thread, on which virtio devices serve their queues.
//!
//! A [`QueueServer`] belongs to the thread from DRIVER_OK to reset, and to its
//! [`ServerHandle`](crate::devices::virtio::ServerHandle) otherwise. A thread can serve any number of
//! devices of any kind, and a VM can have any number of threads.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use event_manager::{EventManager, RemoteEndpoint, SubscriberId, SubscriberOps};
use wormhole_lock::Mutex;

use crate::confinement::Confinement;
use crate::devices::virtio::QueueServer;
use crate::snapshot::OpenConnection;
use crate::vcpu::ThreadError;
use crate::vm::VmError;

/// The thread's event loop has ended, and its servers with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the device's thread has ended")]
pub struct ThreadGone;

/// A started thread. Dropping it calls [`QueueServer::finish`] of each device on it and joins it.
#[derive(Debug)]
pub(crate) struct DeviceThread {
    stop: Arc<AtomicBool>,
    handle: DeviceThreadHandle,
    thread: Option<JoinHandle<()>>,
}

/// A thread that stands.
#[derive(Debug)]
pub(crate) struct Parked {
    /// Connections of the guest that its devices have open.
    pub connections: Vec<OpenConnection>,
    _resume: Sender<()>,
}

/// Handle with which a device adds its server to a thread and removes it.
#[derive(Debug, Clone)]
pub struct DeviceThreadHandle {
    endpoint: RemoteEndpoint<QueueServer>,
    serving: Arc<Mutex<HashSet<SubscriberId>>>,
}

impl DeviceThread {
    /// Starts a thread with the name `name`.
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
                for id in serving.lock().drain() {
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

    /// Confines the thread. Call before the guest runs.
    pub fn confine(&self, confinement: Confinement) -> Result<(), VmError> {
        self.handle
            .endpoint
            .call_blocking::<_, _, event_manager::Error>(move |_| Ok(confinement.enter()))
            .map_err(VmError::EventLoop)?
            .map_err(VmError::Confinement)
    }

    /// Lets the thread stand once it has returned the buffers that it has taken. It takes none until the value is dropped.
    pub fn park(&self) -> Result<Parked, ThreadGone> {
        let (tell, told) = channel();
        let (resume, resumed) = channel::<()>();
        let serving = Arc::clone(&self.handle.serving);
        let parking = self.handle.endpoint.fire(move |ops| {
            let ids: Vec<_> = serving.lock().iter().copied().collect();
            let connections = ids.into_iter().filter_map(|id| {
                let server = ops.subscriber_mut(id).ok()?;
                server.settle();
                Some(server.connections())
            });
            if tell.send(connections.flatten().collect()).is_ok() {
                // An error is the end of the other side: nothing is sent.
                let _ = resumed.recv();
            }
        });
        parking.map_err(|_| ThreadGone)?;
        let connections = told.recv().map_err(|_| ThreadGone)?;
        Ok(Parked {
            connections,
            _resume: resume,
        })
    }

    /// Ends the thread's event loop after the events that it has already.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
    }

    /// Returns a handle for a device of this thread.
    pub fn handle(&self) -> DeviceThreadHandle {
        self.handle.clone()
    }
}

impl Drop for DeviceThread {
    fn drop(&mut self) {
        self.stop();
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
    /// Adds `server` to the thread's event loop. Must not be called on the thread itself.
    pub(crate) fn add(&self, server: QueueServer) -> Result<SubscriberId, ThreadGone> {
        let serving = Arc::clone(&self.serving);
        self.endpoint
            .call_blocking::<_, _, event_manager::Error>(move |ops| {
                let id = ops.add_subscriber(server);
                serving.lock().insert(id);
                Ok(id)
            })
            .map_err(|_| ThreadGone)
    }

    /// Removes a server from the thread. The server has dropped its queues when this returns.
    pub(crate) fn remove(&self, id: SubscriberId) -> Result<QueueServer, ThreadGone> {
        let serving = Arc::clone(&self.serving);
        self.endpoint
            .call_blocking::<_, _, event_manager::Error>(move |ops| {
                let mut server = ops.remove_subscriber(id)?;
                serving.lock().remove(&id);
                server.stop();
                Ok(server)
            })
            .map_err(|_| ThreadGone)
    }
}
