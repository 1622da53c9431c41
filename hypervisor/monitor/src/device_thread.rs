//! The thread on which the devices' event loop runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use event_manager::{EventManager, RemoteEndpoint, SubscriberId, SubscriberOps};

use crate::devices::vsock::VsockEngine;
use crate::vcpu::ThreadError;
use crate::vm::VmError;

/// The thread that serves the devices' queues and sockets.
#[derive(Debug)]
pub(crate) struct DeviceThread {
    stop: Arc<AtomicBool>,
    endpoint: RemoteEndpoint<VsockEngine>,
    thread: Option<JoinHandle<()>>,
}

impl DeviceThread {
    /// Starts the event loop with the devices that `add` puts into it.
    pub fn start(
        add: impl FnOnce(&mut EventManager<VsockEngine>) -> Result<Option<SubscriberId>, VmError>,
    ) -> Result<Self, VmError> {
        let mut manager = EventManager::new().map_err(VmError::EventLoop)?;
        let engine = add(&mut manager)?;
        let endpoint = manager.remote_endpoint();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("devices".to_owned())
            .spawn(move || {
                while !stopped.load(Ordering::SeqCst) {
                    if let Err(error) = manager.run() {
                        tracing::error!(%error, "the devices' event loop failed");
                        break;
                    }
                }
                if let Some(Ok(engine)) = engine.map(|id| manager.subscriber_mut(id)) {
                    engine.finish();
                }
            })
            .map_err(|source| ThreadError::Spawn {
                name: "the devices".to_owned(),
                source,
            })?;
        Ok(Self {
            stop,
            endpoint,
            thread: Some(thread),
        })
    }
}

impl Drop for DeviceThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        if let Err(error) = self.endpoint.kick() {
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
