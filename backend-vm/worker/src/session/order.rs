//! Order of the executor's calls behind launches that are collected, and behind calls that lanes have still to make.

use wormhole_api::{Handle, LaunchKernel, Message, Request, Stream};

use super::{Call, Session};

impl Session {
    /// Waits until the lanes have made the calls that come before the message. Launches and fences that have no answer
    /// go to a lane themselves, or wait where they are executed.
    #[inline]
    pub fn keep_order(&mut self, call: &Call, request: &Request<'_>) {
        let is_launch = matches!(request, Request::LaunchKernel(_)) && call.slot.is_none();
        match request {
            _ if is_launch => {}
            Request::FenceWrite(message) => self.flush_stream(call, message.stream),
            _ => self.flush_chains(),
        }
        if !self.lanes.are_planned() {
            return;
        }
        let stream = match request {
            _ if is_launch => return,
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
        if let Some(stream) = self.objects.find_stream(call, stream) {
            self.lanes.settle(stream, call.thread);
        }
    }

    /// Launches the collected kernels that a fence of the stream must come behind. An unknown stream is ignored: the fence's own
    /// call refuses it.
    #[inline]
    fn flush_stream(&mut self, call: &Call, stream: Handle<Stream>) {
        if let Some(stream) = self.objects.find_stream(call, stream) {
            let flushed = self.chains.flush_before(stream, call.thread);
            self.flushed(flushed);
        }
    }

    /// Launches what has been collected for chains.
    #[inline]
    fn flush_chains(&mut self) {
        let flushed = self.chains.flush();
        self.flushed(flushed);
    }

    #[inline]
    fn flushed(&self, flushed: wormhole_device::Result<()>) {
        if let Err(error) = self.done(flushed) {
            self.fail(LaunchKernel::NAME, error);
        }
    }

    /// Launches what has been collected, and waits until the lanes have made all their calls.
    #[inline]
    pub fn settle(&mut self) {
        self.flush_chains();
        self.lanes.settle_all();
    }

    /// Notes that the ring is empty.
    #[inline]
    pub fn idle(&mut self) {
        self.flush_chains();
        self.lanes.idle();
    }
}
