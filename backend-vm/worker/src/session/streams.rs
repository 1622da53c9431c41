//! Streams, events and fences.

use std::sync::Arc;

use wormhole_api::constants::event_flags::{DISABLE_TIMING, INTERPROCESS};
use wormhole_api::constants::stream_flags::NON_BLOCKING;
use wormhole_api::{
    CuResult, Event, EventCreate, EventDestroy, EventElapsed, EventElapsedReply, EventQuery,
    EventRecord, EventSynchronize, Fence, FenceWrite, Handle, Outcome, Serve, Served, Stream,
    StreamCreate, StreamDestroy, StreamQuery, StreamWaitEvent, Synchronize, SynchronizeReply,
};
use wormhole_device::Device;
use wormhole_link::counters::Counter;
use wormhole_ring::fence::FenceIndex;

use super::sharing::Key;
use super::{Answer, Call, Finish, Session};
use crate::objects::{EventObject, StreamObject};

impl Serve<StreamCreate> for Session {
    fn serve(&mut self, call: &Call, message: &StreamCreate) -> Outcome<()> {
        let (new, flags, priority) = (message.new, message.flags, message.priority);
        let here = self.here(call);
        let raw = self.done(here.stream_create(flags, priority))?;
        let mut stream = StreamObject::new(here, raw);
        stream.blocking = flags & NON_BLOCKING == 0;
        self.enter_stream(new, stream).map(Served::Done)
    }
}

impl Session {
    /// Enters a new stream, or destroys it if the handle is refused.
    pub(super) fn enter_stream(
        &mut self,
        new: Handle<Stream>,
        stream: StreamObject,
    ) -> Result<(), CuResult> {
        let stream = Arc::new(stream);
        let entered = self.objects.streams.enter(new, Arc::clone(&stream));
        match entered {
            Ok(()) => self.watcher.watch(&stream),
            Err(_) => _ = stream.device.destroy_stream(stream.raw),
        }
        entered
    }

    /// Enters a new event, or destroys it if the handle is refused.
    pub(super) fn enter_event(
        &mut self,
        new: Handle<Event>,
        event: EventObject,
    ) -> Result<(), CuResult> {
        let event = Arc::new(event);
        let entered = self.objects.events.enter(new, Arc::clone(&event));
        entered.inspect_err(|_| _ = event.device.destroy_event(event.raw))
    }
}

impl Serve<StreamDestroy> for Session {
    fn serve(&mut self, _: &Call, message: &StreamDestroy) -> Outcome<()> {
        let stream = self.objects.streams.remove(message.stream)?;
        self.chains.forget(&stream);
        self.placements.stream_ends(&stream);
        let destroyed = self.objects.reclaim.destroy_stream(&self.watcher, stream);
        self.done(destroyed).map(Served::Done)
    }
}

impl Serve<StreamQuery> for Session {
    fn serve(&mut self, call: &Call, message: &StreamQuery) -> Outcome<()> {
        let stream = self.objects.stream(call, message.stream)?;
        self.finished(stream.device.query_stream(stream.raw))
            .map(Served::Done)
    }
}

impl Session {
    /// Converts a query's result. "Not ready" is an answer and does not count as a failure.
    pub(super) fn finished(&self, result: wormhole_device::Result<bool>) -> Result<(), CuResult> {
        match result {
            Ok(true) => Ok(()),
            Ok(false) | Err(CuResult::NOT_READY) => Err(CuResult::NOT_READY),
            Err(error) => Err(self.failed(error)),
        }
    }
}

impl Serve<StreamWaitEvent> for Session {
    /// Makes the stream wait for the event, which may be of another device.
    fn serve(&mut self, call: &Call, message: &StreamWaitEvent) -> Outcome<()> {
        let stream = self.objects.stream(call, message.stream)?;
        let event = self.objects.events.get(message.event)?.raw;
        let waits = stream.device.wait_event(stream.raw, event, message.flags);
        self.done(waits).map(Served::Done)
    }
}

impl Session {
    /// Returns the index of a fence and its address for the device.
    fn place_of_fence(&self, fence: Fence) -> Result<(FenceIndex, u64), CuResult> {
        // Decoding checks the same bound, so the index is valid.
        match FenceIndex::new(fence.index()) {
            Some(index) => Ok((index, self.base + index.address_offset() as u64)),
            None => Err(self.addresses.refused()),
        }
    }

    pub(super) fn write_fence(
        &self,
        stream: &StreamObject,
        fence: Fence,
        value: u64,
    ) -> Result<(), CuResult> {
        let (index, address) = self.place_of_fence(fence)?;
        self.counters.add(Counter::Fences, 1);
        self.done(stream.device.write_fence(stream.raw, address, value))?;
        self.watcher.expect(index, value, stream);
        Ok(())
    }
}

impl Serve<FenceWrite> for Session {
    fn serve(&mut self, call: &Call, message: &FenceWrite) -> Outcome<()> {
        let stream = self.objects.stream(call, message.stream)?;
        let (index, address) = self.place_of_fence(message.fence)?;
        if self.lanes.fence(stream, address, message.value) {
            self.counters.add(Counter::Fences, 1);
            self.watcher.expect(index, message.value, stream);
            return Ok(Served::Done(()));
        }
        self.write_fence(stream, message.fence, message.value)
            .map(Served::Done)
    }
}

impl Serve<Synchronize> for Session {
    fn serve<'s>(
        &'s mut self,
        call: &Call,
        message: &Synchronize,
    ) -> Outcome<SynchronizeReply<'s>> {
        let stream = message
            .stream
            .map(|handle| self.objects.stream(call, handle).cloned());
        let stream = stream.transpose()?;
        self.recycled.clear();
        let devices = self.devices.clone();
        self.defer(call, self.here(call), move |device: &dyn Device| {
            let result = match &stream {
                Some(stream) => stream.device.synchronize_stream(stream.raw),
                None => device.synchronize(),
            };
            drop(stream);
            let text = devices.take_output();
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
    fn serve(&mut self, call: &Call, message: &EventCreate) -> Outcome<()> {
        let (new, flags) = (message.new, message.flags);
        // Creating an event for sharing may block on the device, so it has a message of its own.
        if flags & INTERPROCESS != 0 {
            return Err(CuResult::INVALID_VALUE);
        }
        let here = self.here(call);
        let raw = self.done(here.create_event(flags))?;
        let event = EventObject {
            device: here,
            raw,
            of_launches: flags & DISABLE_TIMING != 0,
            shared: false,
        };
        self.enter_event(new, event).map(Served::Done)
    }
}

impl Serve<EventRecord> for Session {
    fn serve(&mut self, call: &Call, message: &EventRecord) -> Outcome<()> {
        let stream = self.objects.stream(call, message.stream)?;
        let (device, event) = (&stream.device, self.objects.events.get(message.event)?);
        let own = device.own(&event.device, event.raw);
        let recorded = own.and_then(|raw| device.record_event(raw, stream.raw, message.flags));
        self.done(recorded)?;
        if let Some(fence) = message.fence {
            self.write_fence(stream, fence, message.value)?;
        }
        Ok(Served::Done(()))
    }
}

impl Serve<EventQuery> for Session {
    fn serve(&mut self, _: &Call, message: &EventQuery) -> Outcome<()> {
        let event = self.objects.events.get(message.event)?;
        self.finished(event.device.query_event(event.raw))
            .map(Served::Done)
    }
}

impl Serve<EventSynchronize> for Session {
    fn serve(&mut self, call: &Call, message: &EventSynchronize) -> Outcome<()> {
        let handle = message.event;
        let event = Arc::clone(self.objects.events.get(handle)?);
        let devices = self.devices.clone();
        self.defer(call, event.device.clone(), move |device: &dyn Device| {
            let result = device.synchronize_event(event.raw);
            drop(event);
            let text = devices.take_output();
            Box::new(move |session: &mut Session| {
                session.output.append(&text);
                Answer::of(session.done(result))
            }) as Finish
        })
    }
}

impl Serve<EventElapsed> for Session {
    fn serve(&mut self, _: &Call, message: &EventElapsed) -> Outcome<EventElapsedReply> {
        let start = self.objects.events.get(message.start)?;
        let end = self.objects.events.get(message.end)?;
        // Shared events have no timing, and the device's handles of them may be no driver's.
        if start.shared || end.shared {
            return Err(CuResult::INVALID_HANDLE);
        }
        let own = start.device.own(&end.device, end.raw);
        match own.and_then(|end| start.device.event_elapsed(start.raw, end)) {
            Ok(milliseconds) => Ok(Served::Done(EventElapsedReply { milliseconds })),
            Err(CuResult::NOT_READY) => Err(CuResult::NOT_READY),
            Err(error) => Err(self.failed(error)),
        }
    }
}

impl Serve<EventDestroy> for Session {
    fn serve(&mut self, _: &Call, message: &EventDestroy) -> Outcome<()> {
        let handle = message.event;
        let event = self.objects.events.remove(handle)?;
        self.shares.unshare(Key::Event(handle), &self.registrar);
        let destroyed = self.objects.reclaim.destroy_event(event);
        self.done(destroyed).map(Served::Done)
    }
}
