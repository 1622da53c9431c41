//! Sends records, which have no answer, and requests, whose answer is waited for.

use wormhole_api::{Decode, EncodeError, Message};
use wormhole_ring::control;
use wormhole_ring::layout::SLOT_PAYLOAD;
use wormhole_ring::ring::{PushError, RecordHead, Sleep};
use wormhole_ring::status::EndCause;
use wormhole_ring::stream::StreamError;
use wormhole_ring::sync::Ordering;
use wormhole_ring::waits::Wait;

use super::transport::{Streams, Way};
use super::{OnDevice, Session, gate};
use crate::error::{CuError, Result};
use crate::{log, thread};

/// Answers up to this size are read into a small buffer.
const SMALL: usize = 256;

impl OnDevice {
    /// Writes a message that has no answer.
    #[inline]
    pub fn record<M: Message>(self, message: &M) -> Result {
        self.alive()?;
        let _passage = gate::enter::<M>();
        self.send(RecordHead::record(M::ID).on(self.0.number), message)
    }

    /// Sends a message and waits until it has been executed; `read` decodes the answer.
    ///
    /// # Errors
    /// Returns the session's error if the session has ended by the time of the answer, because a record before the
    /// message may have failed; else the answer's error.
    pub fn request<M: Message, R>(
        self,
        message: &M,
        read: impl FnOnce(M::Reply<'_>) -> R,
    ) -> Result<R> {
        self.alive()?;
        let passage = gate::enter::<M>();
        let answered = self.request_after_end(message, read);
        drop(passage);
        gate::refresh();
        self.alive()?;
        answered
    }

    /// Sends a request even if the context is dead: the worker still answers.
    pub fn request_after_end<M: Message, R>(
        self,
        message: &M,
        read: impl FnOnce(M::Reply<'_>) -> R,
    ) -> Result<R> {
        self.ask(self.0.number, message, read)
    }
}

impl Session {
    /// Sends a request to the device with this number at the backend.
    pub(super) fn ask<M: Message, R>(
        &self,
        device: u16,
        message: &M,
        read: impl FnOnce(M::Reply<'_>) -> R,
    ) -> Result<R> {
        let slot = match self.free_slots.take() {
            Some(slot) => slot,
            None => self.wait(Wait::Slot, || self.free_slots.take())?,
        };
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        let head = RecordHead::request(M::ID, slot.index, sequence).on(device);
        if let Some(streams) = self.way.streams() {
            let answered = self.ask_by(streams, head, message, read);
            if self.alive().is_err() {
                // The answer may still come, so the slot is never freed.
                std::mem::forget(slot);
            }
            return answered;
        }
        self.send(head, message)?;
        let wait = Wait::Answer(slot.index, sequence);
        let polled =
            self.wait_for_answer(wait, || self.slots.poll(slot.index, sequence).transpose());
        let polled = match polled {
            Ok(polled) => polled,
            Err(error) => {
                // The answer may still come, so the slot is never freed.
                std::mem::forget(slot);
                return Err(error);
            }
        };
        let answer = polled.map_err(|error| self.broken(M::NAME, &error))?;
        if answer.status != 0 {
            return Err(refused(CuError(answer.status)));
        }
        if answer.length <= SMALL {
            self.read_answer::<M, R, SMALL>(&slot, answer.length, read)
        } else {
            self.read_answer::<M, R, SLOT_PAYLOAD>(&slot, answer.length, read)
        }
    }

    /// Sends a request on this thread's stream, and reads the answer from there.
    #[cold]
    fn ask_by<M: Message, R>(
        &self,
        streams: &Streams,
        head: RecordHead,
        message: &M,
        read: impl FnOnce(M::Reply<'_>) -> R,
    ) -> Result<R> {
        let head = head.by(thread::number());
        let answered = message.encode(|parts| {
            streams.with(|client| {
                let (status, payload) = client.record(head, parts)?;
                if status != 0 {
                    return Ok(Err(refused(CuError(status))));
                }
                match M::Reply::decode(payload) {
                    Ok(reply) => Ok(Ok(read(reply))),
                    Err(error) => Ok(Err(self.broken(M::NAME, &error))),
                }
            })
        });
        match answered {
            Ok(answered) => self.told(answered)?,
            Err(error) => Err(too_long(&error)),
        }
    }

    /// Ends the session if its stream has failed.
    pub(super) fn told<R>(&self, said: std::result::Result<R, StreamError>) -> Result<R> {
        said.map_err(|error| match (error, self.status.load()) {
            (StreamError::Over, Some(cause)) if cause.result != 0 => CuError(cause.result),
            (error, _) => self.broken("the transport", &error),
        })
    }

    fn read_answer<M: Message, R, const BYTES: usize>(
        &self,
        slot: &super::answers::Held<'_>,
        length: usize,
        read: impl FnOnce(M::Reply<'_>) -> R,
    ) -> Result<R> {
        let mut buffer = [0; BYTES];
        let payload = &mut buffer[..length];
        self.slots.copy_payload(slot.index, 0, payload);
        match M::Reply::decode(payload) {
            Ok(reply) => Ok(read(reply)),
            Err(error) => Err(self.broken(M::NAME, &error)),
        }
    }

    /// Sends a message by this thread: the backend keeps the order of each thread.
    #[inline]
    fn send<M: Message>(&self, head: RecordHead, message: &M) -> Result {
        let head = head.by(thread::number());
        message
            .encode(|parts| self.push(head, parts))
            .unwrap_or_else(|error| Err(too_long(&error)))
    }

    #[inline]
    fn push(&self, head: RecordHead, parts: &[&[u8]]) -> Result {
        if let Some(streams) = self.way.streams() {
            return self.told(streams.with(|client| client.record(head, parts).map(drop)));
        }
        match self.producer.push(head, parts) {
            Ok(()) => {}
            Err(PushError::Full { .. }) => {
                self.ring_doorbell();
                self.wait(Wait::Room, || match self.producer.push(head, parts) {
                    Err(PushError::Full { .. }) => None,
                    done => Some(done),
                })?
                .map_err(|error| self.broken("the ring", &error))?;
            }
            Err(error) => return Err(self.broken("the ring", &error)),
        }
        self.ring_doorbell();
        Ok(())
    }

    /// Wakes the worker, if it sleeps.
    #[inline]
    fn ring_doorbell(&self) {
        if let Some(sleep) = self.producer.must_ring() {
            self.wake_worker(sleep);
        } else if matches!(self.way, Way::Doorbell) {
            // The call of the system that is to be measured.
            self.producer.wake_consumer();
        }
    }

    #[cold]
    fn wake_worker(&self, sleep: Sleep) {
        if self.is_local && sleep == Sleep::OnWord {
            self.producer.wake_consumer();
            return;
        }
        if let Err(error) = self.control.send(&control::Message::Doorbell) {
            log::debug!("the doorbell could not be rung: {error}");
            self.end_of_stream();
        }
    }

    #[cold]
    fn broken(&self, what: &str, error: &dyn std::fmt::Display) -> CuError {
        log::error_once!("{what}: {error}; the session cannot go on");
        self.status
            .set_once(CuError::UNKNOWN.0, EndCause::Violation);
        CuError::UNKNOWN
    }
}

/// Returns the error of an answer. Logs the cause if it is a limit of the backend's system.
#[cold]
fn refused(error: CuError) -> CuError {
    if error == CuError::OPERATING_SYSTEM {
        log::error_once!(
            "the backend's system refused a call ({error}): its limit of processes and threads may be reached \
             (RLIMIT_NPROC, pids.max of a cgroup, or kernel.threads-max)"
        );
    }
    error
}

#[cold]
fn too_long(error: &EncodeError) -> CuError {
    log::error_once!("{error}");
    match error {
        EncodeError::Tail { .. } | EncodeError::Total { .. } => CuError::NOT_SUPPORTED,
    }
}
