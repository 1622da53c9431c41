//! Allocations, copies and fills.

use wormhole_api::{CuResult, Element, MemAllocReply, MemCopy, MemSet, MemWrite, Outcome};
use wormhole_device::{CuError, Fill};
use wormhole_ring::layout::{APERTURE_HIGH, APERTURE_LOW};

use super::sharing::Key;
use super::{Answer, Call, Session, to_result};
use wormhole_link::counters::Counter;

/// What an address belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Device,
    /// Memory that host and device share: arena, and files of the guest.
    Arena,
}

/// Whether a range lies in the bands that the guest keeps free for the device.
pub(super) fn in_bands(address: u64, bytes: u64) -> bool {
    [APERTURE_HIGH, APERTURE_LOW]
        .into_iter()
        .any(|(base, size)| address >= base && bytes <= size && address - base <= size - bytes)
}

impl Session {
    pub(super) fn allocate(&mut self, call: &Call, bytes: u64) -> Outcome<MemAllocReply> {
        if bytes == 0 {
            return Outcome::Failed(CuResult::INVALID_VALUE);
        }
        self.ask(
            call,
            move |device| {
                let address = device.allocate(bytes)?;
                if in_bands(address, bytes) {
                    return Ok(address);
                }
                tracing::error!("the device gave out {address:#x}, which a guest may use itself");
                device.free(address)?;
                Err(CuError::OUT_OF_MEMORY)
            },
            move |session, address| {
                if !session.device_memory.insert_of(session.on, address, bytes) {
                    tracing::error!("the device gave out {bytes} bytes at {address:#x} twice");
                    return Answer::failed(to_result(CuError::UNKNOWN));
                }
                session.allocations.insert(address);
                Answer::reply(&MemAllocReply {
                    address: wormhole_api::DevicePtr(address),
                })
            },
        )
    }

    /// The allocation may not be named from here on; the device's own wait happens on the caller's thread.
    pub(super) fn free(&mut self, call: &Call, address: u64) -> Outcome<()> {
        if !self.allocations.remove(&address) && self.pool_allocations.remove(&address).is_none() {
            return Outcome::Failed(self.invalid_address());
        }
        self.unshare(Key::Allocation(address));
        self.unshare(Key::Pointer(address));
        self.device_memory.remove(address);
        self.ask(
            call,
            move |device| device.free(address),
            |_, ()| Answer::done(),
        )
    }

    pub(super) fn copy(&mut self, message: &MemCopy) -> Result<(), CuResult> {
        let stream = self.stream(message.stream)?.raw;
        if message.bytes == 0 {
            return Ok(());
        }
        let to = self.place(message.destination.0, message.bytes)?;
        let from = self.place(message.source.0, message.bytes)?;
        self.count_copy(from, to, message.bytes)?;
        self.done(self.device.copy(
            message.destination.0,
            message.source.0,
            message.bytes,
            stream,
        ))
    }

    /// Counts the bytes of a copy, if it is one.
    pub(super) fn count_copy(&self, from: Place, to: Place, bytes: u64) -> Result<(), CuResult> {
        let counter = match (from, to) {
            (Place::Arena, Place::Device) => Counter::BytesToDevice,
            (Place::Device, Place::Arena) => Counter::BytesToHost,
            (Place::Device, Place::Device) => Counter::BytesOnDevice,
            // The driver waits for such a copy (CUDA driver API, "API synchronization behavior").
            (Place::Arena, Place::Arena) => return Err(to_result(CuError::NOT_SUPPORTED)),
        };
        self.counters.add(counter, bytes);
        Ok(())
    }

    pub(super) fn write(&mut self, message: &MemWrite<'_>) -> Result<(), CuResult> {
        let stream = self.stream(message.stream)?.raw;
        if message.data.is_empty() {
            return Ok(());
        }
        let bytes = message.data.len() as u64;
        if self.place(message.destination.0, bytes)? == Place::Arena {
            // As such a copy.
            return Err(to_result(CuError::NOT_SUPPORTED));
        }
        self.counters.add(Counter::BytesToDevice, bytes);
        self.done(
            self.device
                .write(message.destination.0, message.data, stream),
        )
    }

    pub(super) fn fill(&mut self, message: &MemSet) -> Result<(), CuResult> {
        let stream = self.stream(message.stream)?.raw;
        let element: u32 = match message.element {
            Element::Byte => 1,
            Element::Half => 2,
            Element::Word => 4,
        };
        if message.width == 0 || message.height == 0 {
            return Ok(());
        }
        let aligned = |value: u64| value.is_multiple_of(u64::from(element));
        let row = message.width.checked_mul(u64::from(element));
        let rows = (message.height - 1).checked_mul(message.pitch);
        let span = row.zip(rows).and_then(|(row, rows)| rows.checked_add(row));
        let tall = message.height > 1;
        let fits = row.is_some_and(|row| !tall || row <= message.pitch);
        let Some(span) = span.filter(|_| {
            fits && aligned(message.destination.0) && (!tall || aligned(message.pitch))
        }) else {
            return Err(self.invalid_address());
        };
        self.place(message.destination.0, span)?;
        self.done(self.device.fill(
            Fill {
                destination: message.destination.0,
                pitch: message.pitch,
                width: message.width,
                height: message.height,
                value: message.value,
                element,
            },
            stream,
        ))
    }

    /// What the range lies in, if it lies in one thing that the session holds.
    pub(super) fn place(&self, address: u64, bytes: u64) -> Result<Place, CuResult> {
        if self.device_memory.contains(address, bytes) {
            Ok(Place::Device)
        } else if self.extents.contains(address, bytes) || self.files.contains(address, bytes) {
            Ok(Place::Arena)
        } else if self.opened.contains(address, bytes) || self.virtual_memory.maps(address, bytes) {
            Ok(Place::Device)
        } else {
            Err(self.invalid_address())
        }
    }
}
