//! Thread that starts workers: a clone, mounts and an exec for which the spawner's loop does not
//! wait.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, eventfd};
use wormhole_link::device::DeviceChoice;
use wormhole_link::tasks;
use wormhole_sandbox::{Confinement, SpawnError};

use crate::workers::{self, Started};

/// A worker to start.
#[derive(Debug)]
pub struct Order {
    pub program: PathBuf,
    pub device: DeviceChoice,
    pub environment: Vec<(OsString, OsString)>,
}

/// Result of an order, with its ticket.
type Outcome = (u64, Result<Started, SpawnError>);

/// Spawner loop's handle on the thread. Readable when an order is finished.
///
/// The kernel kills a worker when the thread that started it ends, so the thread lives as long as
/// this value.
#[derive(Debug)]
pub struct SpawnThread {
    orders: Option<Sender<(u64, Order)>>,
    outcomes: Receiver<Outcome>,
    /// An eventfd, written once for each order.
    bell: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl SpawnThread {
    /// Starts the thread, with the calling thread's signal mask.
    ///
    /// # Errors
    /// No descriptor or thread can be created.
    pub fn new(confinement: Confinement) -> io::Result<Self> {
        let bell = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        let theirs = bell.try_clone()?;
        let (orders, inbox) = mpsc::channel();
        let (outbox, outcomes) = mpsc::channel();
        let thread = tasks::spawn("starter", move || {
            serve(&confinement, &inbox, &outbox, &theirs);
        })?;
        Ok(Self {
            orders: Some(orders),
            outcomes,
            bell,
            thread: Some(thread),
        })
    }

    /// Sends the thread an order. Returns false if the thread has ended.
    pub fn order(&self, ticket: u64, order: Order) -> bool {
        self.orders
            .as_ref()
            .is_some_and(|orders| orders.send((ticket, order)).is_ok())
    }

    /// Returns the results since the last call.
    pub fn finished(&self) -> Vec<Outcome> {
        // The read fails if no order was finished.
        let _ = rustix::io::read(&self.bell, &mut [0; size_of::<u64>()]);
        self.outcomes.try_iter().collect()
    }

    /// Waits for the order in progress. No order may follow.
    pub fn end(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that starts workers has panicked");
        }
    }
}

impl AsFd for SpawnThread {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

fn serve(
    confinement: &Confinement,
    orders: &Receiver<(u64, Order)>,
    outcomes: &Sender<Outcome>,
    bell: &OwnedFd,
) {
    for (ticket, order) in orders {
        let outcome = workers::start(
            &order.program,
            order.device,
            &order.environment,
            confinement,
        );
        if outcomes.send((ticket, outcome)).is_err() {
            return;
        }
        if let Err(error) = rustix::io::write(bell, &1_u64.to_ne_bytes()) {
            tracing::error!("a started worker cannot be announced: {error}");
        }
    }
}
