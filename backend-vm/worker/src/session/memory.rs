//! Allocations, copies and fills.

use std::sync::Arc;

use wormhole_api::{
    CuResult, DevicePtr, Element, MemAlloc, MemAllocReply, MemCopy, MemFree, MemGetInfo,
    MemGetInfoReply, MemSet, MemWrite, Outcome, Serve, Served,
};
use wormhole_device::Fill;
use wormhole_link::counters::Counter;

use super::addresses::{Place, Source, admitted};
use super::sharing::Key;
use super::{Answer, Call, Session};

impl Serve<MemGetInfo> for Session {
    fn serve(&mut self, call: &Call, _: &MemGetInfo) -> Outcome<MemGetInfoReply> {
        let here = self.here(call);
        let counters = Arc::clone(&self.counters);
        self.ask(
            &call.brief(),
            here.clone(),
            move |device| {
                // Asked around the driver's call: the answer may be made much later.
                let had_neighbours = counters.has_neighbours();
                let (free, total) = device.mem_get_info()?;
                Ok((free, total, had_neighbours || counters.has_neighbours()))
            },
            move |session, (free, total, is_shared)| {
                // The device's free memory would reveal the neighbours' allocations and their
                // times.
                let free = if is_shared {
                    total.saturating_sub(session.held_on(&here))
                } else {
                    free
                };
                Answer::reply(&MemGetInfoReply { free, total })
            },
        )
    }
}

impl Serve<MemAlloc> for Session {
    fn serve(&mut self, call: &Call, message: &MemAlloc) -> Outcome<MemAllocReply> {
        let bytes = message.bytes;
        if bytes == 0 {
            return Err(CuResult::INVALID_VALUE);
        }
        let here = self.here(call);
        self.ask_for_memory(
            &call.brief_if(self.takes_little(bytes)),
            here.clone(),
            move |device| {
                let address = device.mem_alloc(bytes)?;
                admitted(address, bytes, |address| device.mem_free(address))
            },
            move |session, address| {
                let entered = session
                    .addresses
                    .enter(Source::Context, here, address, bytes);
                match entered {
                    Ok(()) => Answer::reply(&MemAllocReply {
                        address: DevicePtr(address),
                    }),
                    Err(error) => Answer::failed(error),
                }
            },
        )
    }
}

/// Removes the allocation, so that it may not be named any more. The device frees it, and may wait for its work, on the
/// caller's job thread.
impl Serve<MemFree> for Session {
    fn serve(&mut self, call: &Call, message: &MemFree) -> Outcome<()> {
        let address = message.address.0;
        let (owner, bytes) = self.addresses.free(address)?;
        for key in [Key::Allocation(address), Key::Pointer(address)] {
            self.shares.unshare(key, &self.registrar);
        }
        let call = call.brief_if(self.takes_little(bytes) && self.waits_for_nothing(&owner));
        self.free(&call, owner, move |device| device.mem_free(address))
    }
}

impl Serve<MemCopy> for Session {
    fn serve(&mut self, call: &Call, message: &MemCopy) -> Outcome<()> {
        let stream = self.objects.stream(call, message.stream)?;
        if message.bytes == 0 {
            return Ok(Served::Done(()));
        }
        let to = self.addresses.place(message.destination.0, message.bytes)?;
        let from = self.addresses.place(message.source.0, message.bytes)?;
        self.count_copy(from, to, message.bytes)?;
        self.done(stream.device.mem_copy(
            message.destination.0,
            message.source.0,
            message.bytes,
            stream.raw,
        ))
        .map(Served::Done)
    }
}

impl Session {
    /// Counts the bytes of a copy. Refuses copies from arena to arena.
    pub(super) fn count_copy(&self, from: Place, to: Place, bytes: u64) -> Result<(), CuResult> {
        let counter = match (from, to) {
            (Place::Arena, Place::Device) => Counter::BytesToDevice,
            (Place::Device, Place::Arena) => Counter::BytesToHost,
            (Place::Device, Place::Device) => Counter::BytesOnDevice,
            // The driver waits for such a copy (CUDA driver API, "API synchronization behavior").
            (Place::Arena, Place::Arena) => return Err(CuResult::NOT_SUPPORTED),
        };
        self.counters.add(counter, bytes);
        Ok(())
    }
}

impl Serve<MemWrite<'_>> for Session {
    fn serve(&mut self, call: &Call, message: &MemWrite<'_>) -> Outcome<()> {
        let stream = self.objects.stream(call, message.stream)?;
        if message.data.is_empty() {
            return Ok(Served::Done(()));
        }
        let bytes = message.data.len() as u64;
        if self.addresses.place(message.destination.0, bytes)? == Place::Arena {
            // Refused for the same reason as a copy from arena to arena.
            return Err(CuResult::NOT_SUPPORTED);
        }
        self.counters.add(Counter::BytesToDevice, bytes);
        let (address, data) = (message.destination.0, message.data);
        self.done(stream.device.write(address, data, stream.raw))
            .map(Served::Done)
    }
}

impl Serve<MemSet> for Session {
    fn serve(&mut self, call: &Call, message: &MemSet) -> Outcome<()> {
        let stream = self.objects.stream(call, message.stream)?;
        let (place, pitch) = (message.destination, message.pitch);
        let size = [message.width, message.height];
        let Some(fill) = self.fill(place, pitch, size, message.value, message.element)? else {
            return Ok(Served::Done(()));
        };
        self.done(stream.device.fill(fill, stream.raw))
            .map(Served::Done)
    }
}

impl Session {
    /// Returns the fill that a message describes, if it is not empty. It must be aligned, and the session must be
    /// permitted to name its memory.
    pub(super) fn fill(
        &self,
        DevicePtr(destination): DevicePtr,
        pitch: u64,
        [width, height]: [u64; 2],
        value: u32,
        element: Element,
    ) -> Result<Option<Fill>, CuResult> {
        if width == 0 || height == 0 {
            return Ok(None);
        }
        let element = match element {
            Element::Byte => 1,
            Element::Half => 2,
            Element::Word => 4,
        };
        let aligned = |value: u64| value.is_multiple_of(u64::from(element));
        let row = width.checked_mul(u64::from(element));
        let rows = (height - 1).checked_mul(pitch);
        let span = row
            .zip(rows)
            .filter(|(row, _)| height == 1 || (*row <= pitch && aligned(pitch)))
            .and_then(|(row, rows)| rows.checked_add(row))
            .filter(|_| aligned(destination))
            .ok_or_else(|| self.addresses.refused())?;
        self.addresses.place(destination, span)?;
        Ok(Some(Fill {
            destination,
            pitch,
            width,
            height,
            value,
            element,
        }))
    }
}
