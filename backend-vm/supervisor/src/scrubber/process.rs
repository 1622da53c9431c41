//! The process: closes, gives memory back and maps for one tenant at a time. Whatever it waits for, only that tenant
//! waits with it.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::SeekFrom;
use rustix::io::Errno;
use wormhole_device::{EventWords, PARTIES, WORDS_FILE};
use wormhole_link::memory::Mapping;
use wormhole_ring::bootstrap::Bootstrap;
use wormhole_ring::layout::{BOOTSTRAP_BYTES, SEGMENT_BYTES};
use wormhole_ring::memory::WindowMemory;
use wormhole_ring::session::Run;

use super::message::{Done, Order, Work};
use crate::session_file;
use crate::{datagram, privileges};

/// Bytes that are given back before other orders are looked at.
const SLICE: u64 = 64 << 20;

/// Serves the supervisor until it closes its end, without privileges: the process's exit status.
pub fn main(socket: &OwnedFd) -> i32 {
    let confined = privileges::drop_capabilities().is_ok() && privileges::filter(false).is_ok();
    if !confined {
        return 2;
    }
    serve(socket);
    0
}

/// As [`main`], as this process is.
pub fn serve(socket: &OwnedFd) {
    let mut queue = Queue::default();
    loop {
        let waits = queue.released.is_empty();
        match datagram::receive(socket, waits) {
            Ok(Some((bytes, files))) => match Order::decode(&bytes) {
                Some(order) => {
                    queue.add(order, files);
                    if queue.ends() {
                        // The end of this process closes them, and waits for no socket that lingers.
                        std::mem::forget(queue);
                        return;
                    }
                }
                None => return,
            },
            Ok(None) => return,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if let Some(done) = queue.turn()
                    && datagram::send(socket, &done.encode(), &[], true).is_err()
                {
                    return;
                }
            }
            Err(_) => return,
        }
    }
}

/// An order with its descriptors, in part done.
#[derive(Debug)]
struct Job {
    ticket: u64,
    work: Work,
    files: Vec<OwnedFd>,
}

#[derive(Debug, Default)]
pub(crate) struct Queue {
    /// The supervisor may still have copies of their descriptors, and is not to have the last.
    held: Vec<Job>,
    released: VecDeque<Job>,
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
                    // Somebody may wait for it, and it is mostly done at once.
                    if matches!(job.work, Work::Close | Work::Status { .. }) {
                        self.released.push_front(job);
                    } else {
                        self.released.push_back(job);
                    }
                }
            }
        }
    }

    /// Does all that is to be done for the supervisor at the other end of `socket`. False if it has closed that.
    #[cfg(any(test, fuzzing))]
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

    /// Whether the supervisor has no copy any more of what is to be closed by the end of this process.
    fn ends(&self) -> bool {
        self.released.iter().any(|job| job.work == Work::End)
    }

    /// Does a part of the first job: what became of it if it was the last part.
    fn turn(&mut self) -> Option<Done> {
        let mut job = self.released.pop_front()?;
        let result = match job.part() {
            Ok(Some(rest)) => {
                job.work = rest;
                self.released.push_front(job);
                return None;
            }
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        // Closed before anybody is told.
        drop(job.files);
        Some(Done::new(job.ticket, &result))
    }
}

impl Job {
    /// Does a part of the work, and says what is left of it.
    fn part(&self) -> io::Result<Option<Work>> {
        let Some(file) = self.files.first() else {
            return Ok(None);
        };
        match &self.work {
            Work::Close | Work::End => Ok(None),
            Work::Scrub(runs) => scrub(file, runs),
            Work::Discard(from) => discard(file, *from),
            Work::Bury(parties) => bury(file, *parties).map(|()| None),
            Work::Bootstrap(bytes) => write_bootstrap(file, *bytes),
            Work::Status {
                segment,
                result,
                cause,
            } => session_file::set_status(file, *segment, *result, *cause).map(|()| None),
        }
    }
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

/// Gives back what comes first in a session's file from an offset on. Its end is reached even if somebody still writes.
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

/// Completes what these parties of an event, a bit each, have recorded in its words.
pub fn bury(file: &OwnedFd, parties: u32) -> io::Result<()> {
    let mapping = Mapping::new(file, 0, WORDS_FILE)?;
    // SAFETY: pages of a file that cannot shrink, mapped until the end of this function.
    let words = unsafe { EventWords::new(mapping.base()) };
    for party in (0..PARTIES).filter(|party| parties & 1 << party != 0) {
        words.bury(party);
    }
    Ok(())
}

fn write_bootstrap(file: &OwnedFd, bytes: u64) -> io::Result<Option<Work>> {
    let start = Mapping::new(file, 0, BOOTSTRAP_BYTES)?;
    // SAFETY: the mapping outlives the window, which is dropped in this statement.
    unsafe { WindowMemory::new(start.base(), start.bytes()) }
        .and_then(|window| Bootstrap::for_window(bytes).write(&window))
        .map_err(io::Error::other)?;
    Ok(None)
}
