//! Event queue by which other threads reach the executor, and what wakes it: an eventfd, or the ring's doorbell, on which it
//! sleeps while it also expects records of the guest.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};

use vmm_sys_util::eventfd::EventFd;
use wormhole_ring::ring::Doorbell;

#[derive(Debug)]
struct Bell {
    eventfd: EventFd,
    /// Wakes an executor that sleeps on the ring.
    doorbell: OnceLock<Doorbell>,
    /// Whether the queue has an event.
    pending: AtomicBool,
    /// Whether the executor sleeps or is about to.
    asleep: AtomicBool,
}

/// Sending end of the queue. Each thread has its own.
#[derive(Debug)]
pub struct Notifier<T> {
    queue: Sender<T>,
    bell: Arc<Bell>,
}

/// Receiving end of the queue, for the executor.
#[derive(Debug)]
pub struct Inbox<T> {
    queue: Receiver<T>,
    bell: Arc<Bell>,
}

/// Creates a queue and its eventfd.
///
/// # Errors
/// The eventfd cannot be created.
pub fn inbox<T>() -> io::Result<(Notifier<T>, Inbox<T>)> {
    let (sender, receiver) = channel();
    let bell = Arc::new(Bell {
        eventfd: EventFd::new(libc::EFD_CLOEXEC)?,
        doorbell: OnceLock::new(),
        pending: AtomicBool::new(false),
        asleep: AtomicBool::new(false),
    });
    let notifier = Notifier {
        queue: sender,
        bell: Arc::clone(&bell),
    };
    Ok((
        notifier,
        Inbox {
            queue: receiver,
            bell,
        },
    ))
}

impl<T> Clone for Notifier<T> {
    fn clone(&self) -> Self {
        Self {
            queue: self.queue.clone(),
            bell: Arc::clone(&self.bell),
        }
    }
}

impl<T> Notifier<T> {
    /// Sends `item` to the executor and wakes it if it sleeps. The item is lost if the executor is
    /// gone.
    pub fn send(&self, item: T) {
        if self.queue.send(item).is_ok() {
            // SYNC POINT: inbox. Either the executor's check after announcing its sleep sees this,
            // or the load below sees the announcement.
            self.bell.pending.store(true, Ordering::SeqCst);
            if self.bell.asleep.load(Ordering::SeqCst) {
                self.ring();
            }
        }
    }

    /// Wakes the executor, however it sleeps.
    pub fn ring(&self) {
        if let Some(doorbell) = self.bell.doorbell.get() {
            doorbell.ring();
        }
        // The write fails only if the counter is full, and then the eventfd is readable already.
        let _ = self.bell.eventfd.write(1);
    }
}

impl<T> Inbox<T> {
    /// Returns whether [`Inbox::next`] is worth calling. Costs one load. An executor that sleeps on the ring calls this once
    /// more after it has announced that there: [`Notifier::ring`] ends the sleep for any later event.
    #[inline]
    pub fn is_pending(&self) -> bool {
        self.bell.pending.load(Ordering::Acquire)
    }

    /// Clears the pending flag. Call it before draining: later sends set the flag again.
    pub fn acknowledge(&self) {
        self.bell.pending.store(false, Ordering::SeqCst);
    }

    pub fn next(&self) -> Option<T> {
        self.queue.try_recv().ok()
    }

    /// Announces that the executor is about to sleep. Returns false if an event is pending, so that
    /// it must not.
    pub fn announce_sleep(&self) -> bool {
        self.bell.asleep.store(true, Ordering::SeqCst);
        // SYNC POINT: inbox.
        if self.bell.pending.load(Ordering::SeqCst) {
            self.awake();
            return false;
        }
        true
    }

    /// Sets the doorbell of the ring on which the executor sleeps, before it does so for the first time.
    pub fn sleeps_by(&self, doorbell: Doorbell) {
        // One executor has one ring.
        let _ = self.bell.doorbell.set(doorbell);
    }

    /// Sleeps until the eventfd is written.
    pub fn sleep(&self) {
        let _ = self.bell.eventfd.read();
    }

    pub fn awake(&self) {
        self.bell.asleep.store(false, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sleeper_is_woken_by_what_is_sent() {
        let (notifier, inbox) = inbox::<u32>().unwrap();
        let receiver = std::thread::spawn(move || {
            let mut sum = 0;
            while sum < 5050 {
                if inbox.announce_sleep() {
                    inbox.sleep();
                    inbox.awake();
                }
                inbox.acknowledge();
                while let Some(item) = inbox.next() {
                    sum += item;
                }
            }
            sum
        });
        for item in 1..=100 {
            notifier.send(item);
        }
        assert_eq!(receiver.join().unwrap(), 5050);
    }
}
