//! Order of the executor's calls behind those that lanes have still to make.

use wormhole_api::{Handle, Request, Stream};

use super::{Call, Session};

impl Session {
    /// Waits until the lanes have made the calls that come before the message. Launches and fences that have no answer
    /// go to a lane themselves, or wait where they are executed.
    #[inline]
    pub fn keep_order(&mut self, call: &Call, request: &Request<'_>) {
        if !self.lanes.are_planned() {
            return;
        }
        let stream = match request {
            Request::LaunchKernel(_) if call.slot.is_none() => return,
            Request::FenceWrite(_) => return,
            Request::EventRecord(message) => Some(message.stream),
            Request::StreamWaitEvent(message) => Some(message.stream),
            Request::MemCopy(message) => Some(message.stream),
            Request::MemCopy3d(message) => Some(message.stream),
            Request::MemSet(message) => Some(message.stream),
            Request::MemWrite(message) => Some(message.stream),
            _ => None,
        };
        self.lanes.other();
        match stream {
            Some(stream) => self.settle_stream(call, stream),
            None => self.lanes.settle_all(),
        }
    }

    /// Waits for the calls that come before work on the stream. A handle that names no stream is refused later.
    fn settle_stream(&mut self, call: &Call, stream: Handle<Stream>) {
        let stream = match stream.is_legacy() {
            true => self.objects.legacy().get(call.device),
            false => self.objects.streams.find(stream),
        };
        if let Some(stream) = stream {
            self.lanes.settle(stream, call.thread);
        }
    }

    /// Waits until the lanes have made all their calls.
    #[inline]
    pub fn settle(&mut self) {
        self.lanes.settle_all();
    }

    /// Notes that the ring is empty.
    #[inline]
    pub fn idle(&mut self) {
        self.lanes.idle();
    }
}
