//! Scrubber process: closes descriptors, frees memory and maps files for one tenant, or refuses
//! the connections of one user. If it blocks, it delays only these.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::SeekFrom;
use rustix::io::Errno;
use wormhole_device::{EventWords, PARTIES, WORDS_FILE};
use wormhole_link::channel::Outgoing;
use wormhole_link::memory::Mapping;
use wormhole_ring::bootstrap::Bootstrap;
use wormhole_ring::control::Message;
use wormhole_ring::layout::SEGMENT_BYTES;
use wormhole_ring::session::Run;

use super::message::{Done, KEPT, Order, Work};
use crate::window_memory::Segment;
use crate::{connection, datagram, listener, privileges, session_file};

/// Bytes to free before the process checks for other orders.
const SLICE: u64 = 64 << 20;

/// Serves the supervisor until it closes its end, without privileges. Returns the process's exit
/// status.
pub fn main(socket: &OwnedFd) -> i32 {
    let confined = privileges::drop_capabilities().is_ok() && privileges::filter(false).is_ok();
    if !confined {
        return 2;
    }
    serve(socket);
    0
}

/// Serves as [`main`] does, with the privileges of this process.
pub fn serve(socket: &OwnedFd) {
    let mut queue = Queue::default();
    loop {
        let waits = queue.released.is_empty();
        match datagram::receive(socket, waits) {
            Ok(Some((bytes, files))) => match Order::decode(&bytes) {
                Some(order) => {
                    queue.add(order, files);
                }
                None => return,
            },
            Ok(None) => return queue.finish(),
            // The other side has ended and left answers unread. Its orders are still there.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if queue.ends() {
                    // The exit closes them, and does not wait for lingering sockets.
                    std::mem::forget(queue);
                    return;
                }
                if let Some(done) = queue.turn() {
                    // Fails only if the other side has ended, which is received next.
                    let _ = datagram::send(socket, &done.encode(), &[], true);
                }
            }
            Err(_) => return,
        }
    }
}

/// An order with its descriptors, possibly done in part.
#[derive(Debug)]
struct Job {
    ticket: u64,
    work: Work,
    files: Vec<OwnedFd>,
}

#[derive(Debug, Default)]
pub(crate) struct Queue {
    /// Jobs whose descriptors the supervisor may still hold. They wait, so that the supervisor does
    /// not close a last copy.
    held: Vec<Job>,
    released: VecDeque<Job>,
    /// Descriptors that the exit closes.
    kept: Vec<OwnedFd>,
}

impl Queue {
    fn add(&mut self, order: Order, files: Vec<OwnedFd>) {
        match order {
            Order::Do { ticket, work } => self.held.push(Job {
                ticket,
                work,
                files,
            }),
            Order::Released => {
                for job in self.held.drain(..) {
                    // Often awaited, and mostly done at once.
                    if matches!(job.work, Work::Close | Work::Status { .. }) {
                        self.released.push_front(job);
                    } else {
                        self.released.push_back(job);
                    }
                }
            }
        }
    }

    /// Does all that is left, because the other side has ended, and with it has closed its copies: a tenant's process
    /// orders to free memory and ends.
    fn finish(mut self) {
        self.add(Order::Released, Vec::new());
        while !self.released.is_empty() && !self.ends() {
            self.turn();
        }
        // The exit closes what is kept, and does not wait for lingering sockets.
        std::mem::forget(self);
    }

    /// Executes all orders from the supervisor at the other end of `socket`. Returns false if the
    /// supervisor has closed it.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn serve_all(&mut self, socket: &OwnedFd) -> bool {
        loop {
            match datagram::receive(socket, false) {
                Ok(Some((bytes, files))) => match Order::decode(&bytes) {
                    Some(order) => self.add(order, files),
                    None => return false,
                },
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.ends() {
                        return false;
                    }
                    if let Some(done) = self.turn() {
                        if datagram::send(socket, &done.encode(), &[], false).is_err() {
                            return false;
                        }
                    } else if self.released.is_empty() {
                        return true;
                    }
                }
                _ => return false,
            }
        }
    }

    /// Returns whether an order to exit is due.
    fn ends(&self) -> bool {
        let next = self.released.front();
        next.is_some_and(|job| job.work == Work::End)
    }

    /// Does a part of the first job. Returns the result if it was the last part.
    fn turn(&mut self) -> Option<Done> {
        let mut job = self.released.pop_front()?;
        let before = self.kept.len();
        match &job.work {
            Work::Refuse { code, reason } => {
                let refused = std::mem::take(&mut job.files).into_iter();
                self.kept
                    .extend(refused.filter_map(|one| refuse(one, *code, reason)));
            }
            Work::Keep => self.kept.append(&mut job.files),
            _ => {}
        }
        if self.kept.len() > before {
            let kept = io::Error::from_raw_os_error(KEPT);
            return Some(Done::new(job.ticket, &Err(kept)));
        }
        let result = match job.part() {
            Ok(Some(rest)) => {
                job.work = rest;
                self.released.push_front(job);
                return None;
            }
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        // Closed before the supervisor gets the result.
        drop(job.files);
        Some(Done::new(job.ticket, &result))
    }
}

impl Job {
    /// Does a part of the work, and returns the rest.
    fn part(&self) -> io::Result<Option<Work>> {
        let Some(file) = self.files.first() else {
            return Ok(None);
        };
        match &self.work {
            Work::Close | Work::Refuse { .. } | Work::Keep | Work::End => Ok(None),
            Work::Scrub(runs) => scrub(file, runs),
            Work::Discard(from) => discard(file, *from),
            Work::CompleteRecords(parties) => complete_records(file, *parties).map(|()| None),
            Work::Bootstrap(bytes) => write_bootstrap(file, *bytes),
            Work::Status {
                segment,
                result,
                cause,
            } => session_file::set_status(file, *segment, *result, *cause).map(|()| None),
        }
    }
}

/// Sends a refusal on a connection, unless the reason is empty, as far as the connection takes it at once, and shuts it down. Returns it if
/// it holds descriptors, whose closing may take any time.
fn refuse(connection: OwnedFd, code: u32, reason: &str) -> Option<OwnedFd> {
    if !reason.is_empty() {
        let refused = Message::Refused { code, reason };
        let _ = Outgoing::default().send(&connection, &refused, Vec::new());
    }
    connection::shut_down(&connection);
    (!listener::has_no_descriptors(&connection)).then_some(connection)
}

#[expect(clippy::cast_possible_truncation, reason = "a small constant")]
const SLICE_SEGMENTS: u32 = (SLICE / SEGMENT_BYTES as u64) as u32;

fn scrub(file: &OwnedFd, runs: &[Run]) -> io::Result<Option<Work>> {
    let Some((run, others)) = runs.split_last() else {
        return Ok(None);
    };
    let slice = Run {
        first: run.first,
        count: run.count.min(SLICE_SEGMENTS),
    };
    session_file::scrub(file, slice)?;
    let mut rest = others.to_vec();
    if run.count > slice.count {
        rest.push(Run {
            first: run.first + slice.count,
            count: run.count - slice.count,
        });
    }
    Ok((!rest.is_empty()).then_some(Work::Scrub(rest)))
}

/// Frees the first data in a session's file from an offset on. Terminates even if a process keeps
/// writing.
fn discard(file: &OwnedFd, from: u64) -> io::Result<Option<Work>> {
    let data = match rustix::fs::seek(file, SeekFrom::Data(from)) {
        Ok(data) => data,
        Err(Errno::NXIO) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let end = u64::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(0);
    let slice = SLICE.min(end.saturating_sub(data));
    if slice == 0 {
        return Ok(None);
    }
    wormhole_device::file::punch_hole(file, data, slice)?;
    Ok(Some(Work::Discard(data + slice)))
}

/// Completes the records of these parties, a bit each, in an event's words.
pub fn complete_records(file: &OwnedFd, parties: u32) -> io::Result<()> {
    let mapping = Mapping::new(file, 0, WORDS_FILE)?;
    // SAFETY: pages of a file that cannot shrink, mapped until the end of this function.
    let words = unsafe { EventWords::new(mapping.base()) };
    for party in (0..PARTIES).filter(|party| parties & 1 << party != 0) {
        words.complete_records(party);
    }
    Ok(())
}

fn write_bootstrap(file: &OwnedFd, bytes: u64) -> io::Result<Option<Work>> {
    let start = Segment::map(file, 0)?;
    let written = Bootstrap::for_window(bytes).write(start.memory());
    written.map_err(io::Error::other)?;
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn memory_is_freed_although_the_process_that_ordered_it_has_ended() {
        let (near, far) = datagram::pair().unwrap();
        let file = wormhole_link::memory::anonymous_file(c"session").unwrap();
        rustix::fs::ftruncate(&file, 2 << 20).unwrap();
        rustix::io::pwrite(&file, &[1; 4096], 1 << 20).unwrap();
        let order = |ticket, work| {
            let copy = [file.try_clone().unwrap()];
            let order = Order::Do { ticket, work }.encode();
            datagram::send(&near, &order, &copy, false).unwrap();
        };
        order(1, Work::Discard(0));
        // An answer that is left unread.
        datagram::send(
            &far,
            &Done {
                ticket: 0,
                error: 0,
            }
            .encode(),
            &[],
            false,
        )
        .unwrap();
        drop(near);
        serve(&far);
        assert_eq!(rustix::fs::fstat(&file).unwrap().st_blocks, 0);
    }

    #[test]
    fn a_refusal_without_a_sentence_leaves_nothing_unread() {
        for (reason, is_sent) in [("too many", true), ("", false)] {
            let (mut launcher, connection) = UnixStream::pair().unwrap();
            assert!(refuse(connection.into(), 1, reason).is_none());
            let mut bytes = Vec::new();
            launcher.read_to_end(&mut bytes).unwrap();
            assert_eq!(bytes.is_empty(), !is_sent, "{reason}");
        }
    }
}
