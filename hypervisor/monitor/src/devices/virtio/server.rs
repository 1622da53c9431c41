//! Connects a worker and its queues' notifications to a device thread's event loop.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber, SubscriberId};
use vmm_sys_util::eventfd::EventFd;

use super::device::VirtioWorker;
use super::queue::{ActiveQueue, ring};
use crate::device_thread::{DeviceThreadHandle, ThreadGone};
use crate::snapshot::OpenConnection;

/// A device's worker and its queues' eventfds, as a subscriber of the event loop.
#[derive(Debug)]
pub struct QueueServer {
    worker: Box<dyn VirtioWorker>,
    kicks: Vec<Arc<EventFd>>,
}

impl QueueServer {
    /// Creates a server of `worker`, whose queues are notified by `kicks`.
    pub(crate) fn new(worker: Box<dyn VirtioWorker>, kicks: Vec<Arc<EventFd>>) -> Self {
        Self { worker, kicks }
    }

    /// Passes `queues` and the negotiated feature bits to the worker and notifies each queue.
    pub(crate) fn start(&mut self, queues: Vec<ActiveQueue>, features: u64) {
        self.worker.start(queues, features);
        for kick in &self.kicks {
            ring(kick);
        }
    }

    /// Tells the worker that its driver started before a snapshot.
    fn restored(&mut self) {
        self.worker.restored();
    }

    /// Returns the connections of the guest that a snapshot would break.
    pub(crate) fn connections(&self) -> Vec<OpenConnection> {
        self.worker.connections()
    }

    /// Lets the worker return the buffers that it has taken.
    pub(crate) fn settle(&mut self) {
        self.worker.settle();
    }

    /// Stops the worker after the driver reset the device.
    pub(crate) fn stop(&mut self) {
        self.worker.stop();
    }

    /// Finishes the worker after the guest has ended.
    pub(crate) fn finish(&mut self) {
        self.worker.finish();
    }
}

impl MutEventSubscriber for QueueServer {
    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        let fd = events.fd();
        let Some(queue) = self.kicks.iter().position(|kick| kick.as_raw_fd() == fd) else {
            return self.worker.descriptor_ready(events, ops);
        };
        // An empty counter means that an earlier read consumed the notification.
        if let Err(error) = self.kicks[queue].read() {
            tracing::trace!(%error, "a queue's eventfd was empty");
        }
        self.worker.queue_ready(queue, ops);
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        for kick in &self.kicks {
            if let Err(error) = ops.add(Events::new(kick, EventSet::IN)) {
                tracing::error!(%error, "a device cannot wait for its queues");
            }
        }
        self.worker.watch(ops);
    }
}

#[derive(Debug)]
enum State {
    /// The device is not started.
    Idle(QueueServer),
    /// The server is on the device thread.
    Serving(SubscriberId),
    /// The device thread ended, and the server with it.
    Gone,
}

/// Controls a device's worker from the vCPU threads.
#[derive(Debug)]
pub struct ServerHandle {
    thread: DeviceThreadHandle,
    kicks: Vec<Arc<EventFd>>,
    state: State,
}

impl ServerHandle {
    /// Creates the handle of a device whose queues `worker` serves on `thread`.
    ///
    /// # Errors
    /// The eventfds of `queues` queues cannot be created.
    pub fn new(
        thread: DeviceThreadHandle,
        worker: Box<dyn VirtioWorker>,
        queues: usize,
    ) -> std::io::Result<Self> {
        let kicks = (0..queues)
            .map(|_| EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).map(Arc::new))
            .collect::<Result<Vec<_>, _>>()?;
        let server = QueueServer::new(worker, kicks.clone());
        Ok(Self {
            thread,
            kicks,
            state: State::Idle(server),
        })
    }

    /// Returns the eventfds that notify the queues.
    pub fn kicks(&self) -> &[Arc<EventFd>] {
        &self.kicks
    }

    /// Notifies a queue.
    pub fn notify(&self, queue: u16) {
        if let Some(kick) = self.kicks.get(usize::from(queue)) {
            ring(kick);
        }
    }

    /// Passes `queues` and the negotiated feature bits to the worker and adds it to its thread.
    pub fn start(&mut self, queues: Vec<ActiveQueue>, features: u64) -> Result<(), ThreadGone> {
        self.start_by(queues, features, |_| {})
    }

    /// Starts as [`Self::start`] does, with queues that the driver set up before a snapshot.
    pub fn restart(&mut self, queues: Vec<ActiveQueue>, features: u64) -> Result<(), ThreadGone> {
        self.start_by(queues, features, QueueServer::restored)
    }

    fn start_by(
        &mut self,
        queues: Vec<ActiveQueue>,
        features: u64,
        prepare: fn(&mut QueueServer),
    ) -> Result<(), ThreadGone> {
        self.stop();
        let State::Idle(mut server) = std::mem::replace(&mut self.state, State::Gone) else {
            return Err(ThreadGone);
        };
        // Each queue is notified, so that the thread processes earlier buffers once it has the server.
        server.start(queues, features);
        prepare(&mut server);
        self.state = State::Serving(self.thread.add(server)?);
        Ok(())
    }

    /// Takes the queues from the worker, which does not access them once this returns.
    pub fn stop(&mut self) {
        if let State::Serving(id) = self.state {
            self.state = self.thread.remove(id).map_or(State::Gone, State::Idle);
        }
    }
}
