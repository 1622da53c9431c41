//! The pair of sockets between the supervisor and a tenant's process.
//!
//! The supervisor makes the pair, and both ends have trusted code. Neither end waits: a
//! message for which the other one has no room is queued.
//!
//! A descriptor is given in two messages: the one that it comes with, and [`Order::Released`] once
//! the supervisor has closed its copy. The process uses it after the second one, so that the
//! supervisor never closes the last copy of a foreign descriptor, and never uses one that others
//! hold as well.

mod message;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

use event_manager::{EventOps, EventSet, Events};
use rustix::io::Errno;

#[cfg(any(test, feature = "fuzzing"))]
pub use self::message::LONGEST_TEXT;
pub use self::message::{Order, Report, Service, figures};
use crate::datagram::{self, Plain};

/// Time until a failed send is tried again.
const AGAIN: Duration = Duration::from_millis(100);
/// Largest number of descriptors that one end has sent and the other has not received. The kernel
/// counts them for the user.
pub const GIVEN: usize = 16;
/// Longer than any report.
const LONGEST_REPORT: usize = 20 << 10;

/// Creates a pair: the supervisor's end, and the tenant's.
///
/// # Errors
/// Same as `socketpair` and `setsockopt`.
pub fn sockets() -> io::Result<(OwnedFd, OwnedFd)> {
    let (near, far) = datagram::pair()?;
    datagram::name_senders(&near)?;
    Ok((near, far))
}

/// A message with its descriptors.
type Queued = (Vec<u8>, Vec<OwnedFd>);

/// One end of a pair.
#[derive(Debug)]
pub struct End {
    socket: OwnedFd,
    queue: VecDeque<Queued>,
    /// Number of descriptors sent since the other end had received all messages.
    unread: usize,
    /// Whether the first queued message waits for room in the socket.
    is_full: bool,
    /// Events for which the loop watches it, once it does.
    watched: Option<EventSet>,
}

/// The other end is closed, or it has sent a datagram that is no message.
#[derive(Debug, PartialEq, Eq)]
pub enum Lost {
    Ended,
    Malformed,
}

impl End {
    pub fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            queue: VecDeque::new(),
            unread: 0,
            is_full: false,
            watched: None,
        }
    }

    /// Makes the event loop watch it under `token`.
    ///
    /// # Errors
    /// Same as `epoll_ctl`.
    pub fn register(
        &mut self,
        ops: &mut EventOps<'_>,
        token: u32,
    ) -> Result<(), event_manager::Error> {
        ops.add(Events::with_data(&self.socket, token, EventSet::IN))?;
        self.watched = Some(EventSet::IN);
        Ok(())
    }

    /// Makes the event loop report room for queued messages. Call it after each event.
    pub fn watch(&mut self, ops: &mut EventOps<'_>, token: u32) {
        let Some(watched) = self.watched else {
            return;
        };
        let mut set = EventSet::IN;
        set.set(EventSet::OUT, self.is_full);
        if set != watched {
            match ops.modify(Events::with_data(&self.socket, token, set)) {
                Ok(()) => self.watched = Some(set),
                Err(error) => tracing::error!("the event loop: {error}"),
            }
        }
    }

    /// Refuses what the other end sends from now on, and drops what it has sent. Returns whether the
    /// socket holds no descriptors then, so that it can be closed here.
    pub fn drain(&self) -> bool {
        crate::connection::shut_down(&self.socket);
        loop {
            match datagram::receive_named(&self.socket, &mut [0; LONGEST_REPORT]) {
                Ok(None) => return true,
                // The second error precedes the messages of an end that was closed unread.
                Ok(Some(Plain::Bytes { .. })) | Err(Errno::INTR | Errno::CONNRESET) => {}
                Ok(Some(Plain::Descriptors)) | Err(_) => return false,
            }
        }
    }

    /// Removes it from the event loop. Returns its socket and the queued messages.
    pub fn into_parts(self, ops: &mut EventOps<'_>) -> (OwnedFd, VecDeque<Queued>) {
        if self.watched.is_some() {
            crate::connection::forget(ops, &self.socket);
        }
        (self.socket, self.queue)
    }

    /// Sends an order.
    pub fn order(&mut self, order: &Order) {
        self.send(order.encode(), Vec::new());
    }

    /// Sends an order with descriptors, and closes these.
    pub fn give(&mut self, order: &Order, descriptors: Vec<OwnedFd>) {
        self.send(order.encode(), descriptors);
        self.order(&Order::Released);
    }

    /// Sends a message with descriptors, and closes these, or queues it.
    pub fn send(&mut self, bytes: Vec<u8>, descriptors: Vec<OwnedFd>) {
        self.queue.push_back((bytes, descriptors));
        self.flush();
    }

    /// Sends as many queued messages as the socket takes.
    pub fn flush(&mut self) {
        self.is_full = false;
        while let Some((bytes, descriptors)) = self.queue.pop_front() {
            let sent = match self.may_send(descriptors.len()) {
                true => datagram::send(&self.socket, &bytes, &descriptors, false),
                false => Err(Errno::TOOMANYREFS),
            };
            match sent {
                // Its descriptors are closed before the next message is sent.
                Ok(()) => self.unread += descriptors.len(),
                Err(error) => {
                    self.is_full = error == Errno::AGAIN;
                    // If the other process has ended, the owner of this end closes them.
                    return self.queue.push_front((bytes, descriptors));
                }
            }
        }
    }

    /// Returns whether so many further descriptors may be sent before the other end has received
    /// the earlier ones.
    fn may_send(&mut self, count: usize) -> bool {
        if self.unread + count > GIVEN && datagram::is_read(&self.socket) {
            self.unread = 0;
        }
        count == 0 || self.unread + count <= GIVEN
    }

    /// Returns the time at which to [`flush`](Self::flush) again if the loop reports no room: the
    /// other end has received no descriptors for long, or others use up the user's limit on
    /// descriptors in flight.
    pub fn deadline(&self) -> Option<Instant> {
        (!self.queue.is_empty() && !self.is_full).then(|| Instant::now() + AGAIN)
    }

    /// Returns whether the first queued message waits for room in the socket.
    pub fn is_full(&self) -> bool {
        self.is_full
    }

    /// Returns the number of queued messages.
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Receives the next report of a tenant's process, if there is one. Such a process sends no
    /// descriptors; if it does, they stay in the socket.
    ///
    /// # Errors
    /// The process has closed its end, or sent something else.
    pub fn report(&self) -> Result<Option<Report>, Lost> {
        let mut buffer = [0; LONGEST_REPORT];
        match datagram::receive_named(&self.socket, &mut buffer) {
            Ok(None) | Err(Errno::CONNRESET) => Err(Lost::Ended),
            Ok(Some(Plain::Bytes { count, .. })) => match Report::decode(&buffer[..count]) {
                Some(report) => Ok(Some(report)),
                None => Err(Lost::Malformed),
            },
            Ok(Some(Plain::Descriptors)) => Err(Lost::Malformed),
            Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            Err(_) => Err(Lost::Ended),
        }
    }
}

impl AsRawFd for End {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

/// A tenant's end of the pair: its way to the supervisor.
#[derive(Clone, Debug)]
pub struct SupervisorLink(Rc<RefCell<End>>);

impl SupervisorLink {
    pub fn new(socket: OwnedFd) -> Self {
        Self(Rc::new(RefCell::new(End::new(socket))))
    }

    pub fn end(&self) -> std::cell::RefMut<'_, End> {
        self.0.borrow_mut()
    }

    pub fn report(&self, report: &Report) {
        self.end().send(report.encode(), Vec::new());
    }

    /// Receives the next order with its descriptors, if there is one.
    ///
    /// # Errors
    /// The supervisor has closed its end.
    pub fn next(&self) -> Result<Option<(Order, Vec<OwnedFd>)>, Lost> {
        match datagram::receive(&self.end().socket, false) {
            Ok(Some((bytes, descriptors))) => match Order::decode(&bytes) {
                Some(order) => Ok(Some((order, descriptors))),
                None => Err(Lost::Malformed),
            },
            Ok(None) => Err(Lost::Ended),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(_) => Err(Lost::Ended),
        }
    }

    /// Closes the connection to the supervisor, which sees the end of this process's work.
    pub fn leave(&self) {
        crate::connection::shut_down(&self.end().socket);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (End, SupervisorLink) {
        let (near, far) = sockets().unwrap();
        (End::new(near), SupervisorLink::new(far))
    }

    #[test]
    fn messages_for_which_there_is_no_room_are_sent_later_in_order() {
        const SENT: u64 = 2000;
        let (end, process) = pair();
        for ticket in 0..SENT {
            process.report(&Report::Kill { ticket });
        }
        assert!(process.end().queued() > 0, "all had room");
        for ticket in 0..SENT {
            process.end().flush();
            assert_eq!(end.report(), Ok(Some(Report::Kill { ticket })));
        }
        assert_eq!(end.report(), Ok(None));
        assert_eq!(process.end().queued(), 0);
    }

    #[test]
    fn a_process_that_sends_descriptors_breaks_the_protocol_and_they_stay_in_the_socket() {
        let (end, process) = pair();
        let (reader, writer) = io::pipe().unwrap();
        let message = Report::Attached { lines: 0 }.encode();
        let sent = datagram::send(&process.end().socket, &message, &[reader.into()], false);
        assert_eq!(sent, Ok(()));
        assert_eq!(end.report(), Err(Lost::Malformed));
        assert!(!end.drain());
        // The pipe has a reader.
        assert_eq!(rustix::io::write(&writer, &[0]), Ok(1));
    }

    #[test]
    fn descriptors_after_empty_messages_stay_in_the_socket() {
        for sends_more in [false, true] {
            let (end, process) = pair();
            let (reader, writer) = io::pipe().unwrap();
            let send = |bytes: &[u8], descriptors: &[OwnedFd]| {
                datagram::send(&process.end().socket, bytes, descriptors, false)
            };
            assert_eq!((send(&[], &[]), send(&[], &[])), (Ok(()), Ok(())));
            if !sends_more {
                assert_eq!(end.report(), Err(Lost::Malformed));
                assert!(end.drain());
                // Nothing can be sent after that.
                assert_eq!(send(&[7], &[reader.into()]), Err(Errno::PIPE));
                continue;
            }
            assert_eq!(send(&[7], &[reader.into()]), Ok(()));
            process.leave();
            assert_eq!(end.report(), Err(Lost::Malformed));
            assert!(!end.drain());
            // The pipe has a reader.
            assert_eq!(rustix::io::write(&writer, &[0]), Ok(1));
        }
    }

    #[test]
    fn an_end_that_was_closed_with_unread_messages_holds_what_it_has_sent() {
        let (mut end, process) = pair();
        let (reader, writer) = io::pipe().unwrap();
        end.order(&Order::Dump);
        datagram::send(&process.end().socket, &[7], &[reader.into()], false).unwrap();
        drop(process);
        assert!(!end.drain());
        assert_eq!(rustix::io::write(&writer, &[0]), Ok(1));
    }

    #[test]
    fn few_descriptors_are_sent_that_the_other_end_has_not_received() {
        let (mut end, process) = pair();
        let gift = || vec![OwnedFd::from(io::pipe().unwrap().0)];
        for _ in 0..100 {
            end.give(&Order::Dump, gift());
        }
        let received = || {
            let mut count = 0;
            while let Some((_, descriptors)) = process.next().unwrap() {
                count += descriptors.len();
            }
            count
        };
        assert_eq!(received(), GIVEN);
        assert!(end.queued() > 0 && end.deadline().is_some());
        end.flush();
        assert_eq!(received(), GIVEN);
    }

    #[test]
    fn what_is_no_message_is_refused_and_an_end_is_seen_after_the_last_message() {
        let (end, process) = pair();
        datagram::send(&process.end().socket, &[0xff], &[], false).unwrap();
        process.report(&Report::Scrubber);
        process.leave();
        assert_eq!(end.report(), Err(Lost::Malformed));
        assert_eq!(end.report(), Ok(Some(Report::Scrubber)));
        assert_eq!(end.report(), Err(Lost::Ended));
        assert!(end.drain());
    }
}
