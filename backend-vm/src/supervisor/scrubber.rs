//! The thread that gives memory back: freeing gigabytes takes long, and the event loop waits for nobody.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::mpsc::{self, Receiver, Sender};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use wormhole_ring::session::Run;

use super::{Id, session_file};

/// Memory to give back.
#[derive(Debug)]
struct Order {
    file: OwnedFd,
    run: Run,
    /// The session that goes on and may be granted the run again.
    session: Option<Id>,
}

/// A run of a session that goes on is scrubbed, or cannot be.
#[derive(Debug)]
pub struct Scrubbed {
    pub session: Id,
    pub run: Run,
    pub result: io::Result<()>,
}

/// The event loop's handle on the thread. It is readable when something is scrubbed.
#[derive(Debug)]
pub struct Scrubber {
    orders: Sender<Order>,
    outcomes: Receiver<Scrubbed>,
    bell: EventFd,
}

impl Scrubber {
    /// Starts the thread, with the calling thread's signal mask. It ends with this value.
    ///
    /// # Errors
    /// No descriptor or no thread can be had.
    pub fn new() -> io::Result<Self> {
        let bell = EventFd::new(EFD_NONBLOCK)?;
        let theirs = bell.try_clone()?;
        let (orders, inbox) = mpsc::channel();
        let (outbox, outcomes) = mpsc::channel();
        std::thread::Builder::new()
            .name("scrubber".to_owned())
            .spawn(move || serve(&inbox, &outbox, &theirs))?;
        Ok(Self {
            orders,
            outcomes,
            bell,
        })
    }

    /// Has a run of a session that goes on scrubbed; [`Scrubber::finished`] tells when that is done.
    pub fn scrub(&self, session: Id, file: OwnedFd, run: Run) {
        self.order(Order {
            file,
            run,
            session: Some(session),
        });
    }

    /// Has a run of a session that has ended scrubbed.
    pub fn discard(&self, file: OwnedFd, run: Run) {
        self.order(Order {
            file,
            run,
            session: None,
        });
    }

    fn order(&self, order: Order) {
        if self.orders.send(order).is_err() {
            tracing::error!("the thread that gives memory back has ended");
        }
    }

    /// What was scrubbed since the last call.
    pub fn finished(&self) -> Vec<Scrubbed> {
        // Empty when nothing was.
        let _ = self.bell.read();
        self.outcomes.try_iter().collect()
    }
}

impl AsRawFd for Scrubber {
    fn as_raw_fd(&self) -> RawFd {
        self.bell.as_raw_fd()
    }
}

fn serve(orders: &Receiver<Order>, outcomes: &Sender<Scrubbed>, bell: &EventFd) {
    for Order { file, run, session } in orders {
        let result = session_file::scrub(&file, run);
        drop(file);
        let Some(session) = session else {
            if let Err(error) = result {
                tracing::error!("{run} of an ended session cannot be scrubbed: {error}");
            }
            continue;
        };
        let scrubbed = Scrubbed {
            session,
            run,
            result,
        };
        if outcomes.send(scrubbed).is_err() {
            return;
        }
        if let Err(error) = bell.write(1) {
            tracing::error!("scrubbed memory cannot be announced: {error}");
        }
    }
}
