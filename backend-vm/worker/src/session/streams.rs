//! Streams, events and fences.

use std::sync::Arc;

use wormhole_api::constants::event_flags::{DISABLE_TIMING, INTERPROCESS};
use wormhole_api::{
    CuResult, Event as EventKind, EventCreate, EventDestroy, EventElapsed, EventElapsedReply,
    EventQuery, EventRecord, EventSynchronize, Fence, FenceWrite, Handle, Outcome, Serve, Served,
    Stream, StreamCreate, StreamDestroy, StreamQuery, StreamWaitEvent, Synchronize,
    SynchronizeReply,
};
use wormhole_device::Device;
use wormhole_ring::fence::FenceIndex;

use super::sharing::Key;
use super::{Answer, Call, Finish, Session};
use crate::objects::{EventObject, StreamObject};
use wormhole_link::counters::Counter;

impl Session {
    /// The stream behind a handle.
    pub(super) fn stream(&self, handle: Handle<Stream>) -> Result<&Arc<StreamObject>, CuResult> {
        if handle.is_legacy() {
            return Ok(&self.legacy[self.on]);
        }
        self.streams
            .get(handle)
            .ok_or_else(|| self.invalid_handle())
    }

    pub(super) fn event(&self, handle: Handle<EventKind>) -> Result<&Arc<EventObject>, CuResult> {
        self.events.get(handle).ok_or_else(|| self.invalid_handle())
    }
}

impl Serve<StreamCreate> for Session {
    fn serve(&mut self, _: &Call, message: &StreamCreate) -> Outcome<()> {
        let (new, flags, priority) = (message.new, message.flags, message.priority);
        let raw = self.done(self.device.create_stream(flags, priority))?;
        let stream = Arc::new(StreamObject::new(raw));
        match self.streams.insert(new, Arc::clone(&stream)) {
            Ok(()) => {
                self.watcher.watch(&stream);
                Ok(Served::Done(()))
            }
            Err(error) => {
                self.counters.add(Counter::InvalidHandles, 1);
                let _ = self.device.destroy_stream(raw);
                Err(error.into())
            }
        }
    }
}

impl Serve<StreamDestroy> for Session {
    fn serve(&mut self, _: &Call, message: &StreamDestroy) -> Outcome<()> {
        let handle = message.stream;
        let Some(stream) = self.streams.remove(handle) else {
            return Err(self.invalid_handle());
        };
        let device = self.device.as_ref();
        let buried = self.graveyard.bury_stream(device, &self.watcher, stream);
        self.done(buried).map(Served::Done)
    }
}

impl Serve<StreamQuery> for Session {
    fn serve(&mut self, _: &Call, message: &StreamQuery) -> Outcome<()> {
        let handle = message.stream;
        let stream = self.stream(handle)?.raw;
        self.finished(self.device.query_stream(stream))
            .map(Served::Done)
    }
}

impl Session {
    /// "Not ready" is an answer, not a failure.
    fn finished(&self, result: wormhole_device::Result<bool>) -> Result<(), CuResult> {
        match result {
            Ok(true) => Ok(()),
            Ok(false) | Err(CuResult::NOT_READY) => Err(CuResult::NOT_READY),
            Err(error) => Err(self.failed(error)),
        }
    }
}

impl Serve<StreamWaitEvent> for Session {
    fn serve(&mut self, _: &Call, message: &StreamWaitEvent) -> Outcome<()> {
        let stream = self.stream(message.stream)?.raw;
        let event = self.event(message.event)?.raw;
        self.done(self.device.wait_event(stream, event, message.flags))
            .map(Served::Done)
    }
}

impl Session {
    pub(super) fn write_fence(
        &self,
        handle: Handle<Stream>,
        fence: Fence,
        value: u64,
    ) -> Result<(), CuResult> {
        let stream = self.stream(handle)?;
        // Decoded against the same bound, so always there.
        let Some(index) = FenceIndex::new(fence.index()) else {
            return Err(self.invalid_address());
        };
        let address = self.base + index.address_offset() as u64;
        self.counters.add(Counter::Fences, 1);
        self.done(self.device.write_fence(stream.raw, address, value))?;
        self.watcher.expect(index, value, stream);
        Ok(())
    }
}

impl Serve<FenceWrite> for Session {
    fn serve(&mut self, _: &Call, message: &FenceWrite) -> Outcome<()> {
        self.write_fence(message.stream, message.fence, message.value)
            .map(Served::Done)
    }
}

impl Serve<Synchronize> for Session {
    fn serve<'s>(
        &'s mut self,
        call: &Call,
        message: &Synchronize,
    ) -> Outcome<SynchronizeReply<'s>> {
        let stream = message.stream.map(|handle| self.stream(handle).cloned());
        let stream = stream.transpose()?;
        self.defer(call, move |device: &dyn Device| {
            let result = match &stream {
                Some(stream) => device.synchronize_stream(stream.raw),
                None => device.synchronize(),
            };
            drop(stream);
            let text = device.take_output();
            Box::new(move |session: &mut Session| {
                session.output.append(&text);
                match result {
                    Ok(()) => {
                        let (remaining, stdout, stderr) = session.output.next_part();
                        Answer::reply(&SynchronizeReply {
                            remaining,
                            stdout,
                            stderr,
                        })
                    }
                    Err(error) => Answer::failed(session.failed(error)),
                }
            }) as Finish
        })
    }
}

impl Serve<EventCreate> for Session {
    fn serve(&mut self, _: &Call, message: &EventCreate) -> Outcome<()> {
        let (new, flags) = (message.new, message.flags);
        // One that is to be shared may wait for the device, and has a message of its own.
        if flags & INTERPROCESS != 0 {
            return Err(CuResult::INVALID_VALUE);
        }
        let raw = self.done(self.device.create_event(flags))?;
        let event = EventObject {
            raw,
            of_launches: flags & DISABLE_TIMING != 0,
        };
        let entered = self.events.insert(new, Arc::new(event));
        entered.map(Served::Done).map_err(|error| {
            self.counters.add(Counter::InvalidHandles, 1);
            let _ = self.device.destroy_event(raw);
            error.into()
        })
    }
}

impl Serve<EventRecord> for Session {
    fn serve(&mut self, _: &Call, message: &EventRecord) -> Outcome<()> {
        let stream = self.stream(message.stream)?.raw;
        let event = self.event(message.event)?.raw;
        self.done(self.device.record_event(event, stream, message.flags))?;
        if let Some(fence) = message.fence {
            self.write_fence(message.stream, fence, message.value)?;
        }
        Ok(Served::Done(()))
    }
}

impl Serve<EventQuery> for Session {
    fn serve(&mut self, _: &Call, message: &EventQuery) -> Outcome<()> {
        let handle = message.event;
        let event = self.event(handle)?.raw;
        self.finished(self.device.query_event(event))
            .map(Served::Done)
    }
}

impl Serve<EventSynchronize> for Session {
    fn serve(&mut self, call: &Call, message: &EventSynchronize) -> Outcome<()> {
        let handle = message.event;
        let event = Arc::clone(self.event(handle)?);
        self.defer(call, move |device: &dyn Device| {
            let result = device.synchronize_event(event.raw);
            drop(event);
            let text = device.take_output();
            Box::new(move |session: &mut Session| {
                session.output.append(&text);
                match result {
                    Ok(()) => Answer::done(),
                    Err(error) => Answer::failed(session.failed(error)),
                }
            }) as Finish
        })
    }
}

impl Serve<EventElapsed> for Session {
    fn serve(&mut self, _: &Call, message: &EventElapsed) -> Outcome<EventElapsedReply> {
        let start = self.event(message.start)?.raw;
        let end = self.event(message.end)?.raw;
        match self.device.elapsed(start, end) {
            Ok(milliseconds) => Ok(Served::Done(EventElapsedReply { milliseconds })),
            Err(CuResult::NOT_READY) => Err(CuResult::NOT_READY),
            Err(error) => Err(self.failed(error)),
        }
    }
}

impl Serve<EventDestroy> for Session {
    fn serve(&mut self, _: &Call, message: &EventDestroy) -> Outcome<()> {
        let handle = message.event;
        let Some(event) = self.events.remove(handle) else {
            return Err(self.invalid_handle());
        };
        self.unshare(Key::Event(handle));
        let buried = self.graveyard.bury_event(self.device.as_ref(), event);
        self.done(buried).map(Served::Done)
    }
}
