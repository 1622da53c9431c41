//! Reserved address ranges, and memory that is mapped there.
//!
//! The driver checks all of this too, but it trusts calls from its own process more than a guest's
//! numbers deserve; so every range is checked here against the session's reservations and mappings.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use wormhole_api::{
    AddressFree, AddressReserve, AddressReserveReply, CuResult, DevicePtr, MemCreate,
    MemGranularity, MemGranularityReply, MemMap, MemRelease, MemRename, MemSetAccess, MemUnmap,
    Outcome, Serve, Served,
};
use wormhole_device::{Device, RawMemory};
use wormhole_link::device::MOST;

use super::addresses::{admitted, in_bands};
use super::closed;
use super::{Answer, Call, OBJECTS, Session};
use crate::devices::SessionDevice;
use crate::registrar::Task;

/// Mappable memory. Each mapping holds a reference, and memory with mappings is not released.
#[derive(Debug)]
pub(super) struct MemoryObject {
    /// Device that holds the memory.
    device: SessionDevice,
    raw: RawMemory,
    bytes: u64,
    /// Bytes of all mappable memory of the session, by device.
    totals: Arc<Totals>,
}

type Totals = [AtomicU64; MOST];

impl MemoryObject {
    pub fn device(&self) -> &SessionDevice {
        &self.device
    }

    pub fn raw(&self) -> RawMemory {
        self.raw
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for MemoryObject {
    fn drop(&mut self) {
        self.totals[self.device.number()].fetch_sub(self.bytes, Ordering::Relaxed);
        if let Err(error) = self.device.mem_release(self.raw) {
            tracing::debug!("releasing mappable memory: {error}");
        }
    }
}

#[derive(Debug)]
struct Mapping {
    memory: Arc<MemoryObject>,
    /// Whether copies may name the mapping: no unmap has begun.
    visible: bool,
    /// Whether a job is changing the mapping.
    changing: bool,
}

/// Reserved ranges and mappings of a session.
#[derive(Debug, Default)]
pub(super) struct VirtualMemory {
    /// Start → bytes.
    reserved: BTreeMap<u64, u64>,
    mappings: BTreeMap<u64, Mapping>,
    /// Bytes of mappable memory, mapped or not, by device.
    totals: Arc<Totals>,
}

impl VirtualMemory {
    pub fn bytes_of(&self, device: usize) -> u64 {
        let total = self.totals.get(device);
        total.map_or(0, |total| total.load(Ordering::Relaxed))
    }

    /// Returns whether copies may name a range: mappings fill it without a gap. Access rights are
    /// left to the device, which faults.
    pub fn maps(&self, address: u64, bytes: u64) -> bool {
        let Some((&first, _)) = self.mappings.range(..=address).next_back() else {
            return false;
        };
        let mut at = first;
        for (&start, mapping) in self.mappings.range(first..) {
            if start != at || !mapping.visible {
                return false;
            }
            at += mapping.memory.bytes;
            if at > address && at - address >= bytes {
                return true;
            }
        }
        false
    }

    /// Returns start and bytes of the mapping that holds an address and that copies may name.
    pub fn around(&self, address: u64) -> Option<(u64, u64)> {
        let (&start, mapping) = self.mappings.range(..=address).next_back()?;
        let bytes = mapping.memory.bytes;
        (mapping.visible && address - start < bytes).then_some((start, bytes))
    }

    /// Returns the starts of the mappings that fill a range without a gap.
    fn filled(&self, address: u64, bytes: u64) -> Option<Vec<u64>> {
        let end = address.checked_add(bytes)?;
        let mut at = address;
        let mut starts = Vec::new();
        for (&start, mapping) in self.mappings.range(address..end) {
            if start != at || mapping.changing {
                return None;
            }
            starts.push(start);
            at += mapping.memory.bytes;
        }
        (bytes != 0 && at == end).then_some(starts)
    }

    fn is_mapped(&self, address: u64, end: u64) -> bool {
        let before = self.mappings.range(..end).next_back();
        before.is_some_and(|(start, mapping)| start + mapping.memory.bytes > address)
    }

    /// Counts memory as the session's until it is released.
    pub fn memory_object(
        &self,
        device: SessionDevice,
        raw: RawMemory,
        bytes: u64,
    ) -> Arc<MemoryObject> {
        let totals = Arc::clone(&self.totals);
        totals[device.number()].fetch_add(bytes, Ordering::Relaxed);
        Arc::new(MemoryObject {
            device,
            raw,
            bytes,
            totals,
        })
    }

    fn can_reserve(&self) -> bool {
        self.reserved.len() < OBJECTS as usize
    }

    fn reserve(&mut self, address: u64, bytes: u64) {
        self.reserved.insert(address, bytes);
    }

    /// Removes a reserved range. Returns false if the range is not a whole reservation, or if memory is mapped in it.
    fn unreserve(&mut self, address: u64, bytes: u64) -> bool {
        let known = self.reserved.get(&address) == Some(&bytes);
        let removable = known && !self.is_mapped(address, address + bytes);
        if removable {
            self.reserved.remove(&address);
        }
        removable
    }

    fn can_map(&self) -> bool {
        self.mappings.len() < OBJECTS as usize
    }

    /// Returns whether a range is reserved, and nothing is mapped there.
    fn is_free(&self, address: u64, bytes: u64) -> bool {
        let reserved = self.reserved.range(..=address).next_back();
        address.checked_add(bytes).is_some_and(|end| {
            reserved.is_some_and(|(start, bytes)| end <= start + bytes)
                && !self.is_mapped(address, end)
        })
    }

    /// Adds a mapping, which copies may name from now on.
    fn map(&mut self, address: u64, memory: Arc<MemoryObject>) {
        let mapping = Mapping {
            memory,
            visible: true,
            changing: false,
        };
        self.mappings.insert(address, mapping);
    }

    fn remove(&mut self, starts: &[u64]) {
        for start in starts {
            self.mappings.remove(start);
        }
    }

    /// Marks the mappings that fill a range, so that no other job changes them meanwhile, and returns their starts.
    fn begin_change(&mut self, address: u64, bytes: u64) -> Option<Vec<u64>> {
        let starts = self.filled(address, bytes)?;
        self.each(&starts, |mapping| mapping.changing = true);
        Some(starts)
    }

    fn end_change(&mut self, starts: &[u64]) {
        self.each(starts, |mapping| mapping.changing = false);
    }

    /// Lets no copy name the mappings any more.
    fn hide(&mut self, starts: &[u64]) {
        self.each(starts, |mapping| mapping.visible = false);
    }

    fn each(&mut self, starts: &[u64], mut change: impl FnMut(&mut Mapping)) {
        for start in starts {
            if let Some(mapping) = self.mappings.get_mut(start) {
                change(mapping);
            }
        }
    }
}

impl Serve<MemGranularity> for Session {
    fn serve(&mut self, call: &Call, _: &MemGranularity) -> Outcome<MemGranularityReply> {
        self.ask(
            call,
            self.here(call),
            |device| device.granularity(),
            |_, found| {
                Answer::reply(&MemGranularityReply {
                    minimum: found.minimum,
                    recommended: found.recommended,
                })
            },
        )
    }
}

// Reservations and mappings are made on the executor: the driver only notes them, and waits for nothing.

impl Serve<AddressReserve> for Session {
    fn serve(&mut self, call: &Call, message: &AddressReserve) -> Outcome<AddressReserveReply> {
        let (bytes, alignment) = (message.bytes, message.alignment);
        if bytes == 0 || (alignment != 0 && !alignment.is_power_of_two()) {
            return Err(CuResult::INVALID_VALUE);
        }
        if !self.addresses.virtual_memory.can_reserve() {
            return Err(CuResult::OUT_OF_MEMORY);
        }
        let hint = if in_bands(message.hint, bytes) {
            message.hint
        } else {
            0
        };
        let device = self.here(call);
        let address = self.done(device.address_reserve(bytes, alignment, hint))?;
        let admitted = admitted(address, bytes, |address| {
            device.address_free(address, bytes)
        });
        let address = self.done(admitted)?;
        self.addresses.virtual_memory.reserve(address, bytes);
        Ok(Served::Done(AddressReserveReply {
            address: DevicePtr(address),
        }))
    }
}

/// Addresses that a job may give to the device stay reserved there until it is done, and are no longer the guest's.
impl Serve<AddressFree> for Session {
    fn serve(&mut self, call: &Call, message: &AddressFree) -> Outcome<()> {
        let bytes = message.bytes;
        let address = message.address.0;
        if !self.addresses.virtual_memory.unreserve(address, bytes) {
            return Err(self.addresses.refused());
        }
        let device = self.here(call);
        if !self.addresses.has_users() {
            return self
                .done(device.address_free(address, bytes))
                .map(Served::Done);
        }
        if call.slot.is_some() {
            return self.free(call, device, move |device| {
                device.address_free(address, bytes)
            });
        }
        let freed = Task::new(move |_| {
            if let Err(error) = device.address_free(address, bytes) {
                tracing::debug!("freeing addresses: {error}");
            }
        });
        self.addresses.once_unused(freed, &self.registrar);
        Ok(Served::Done(()))
    }
}

impl Serve<MemCreate> for Session {
    fn serve(&mut self, call: &Call, message: &MemCreate) -> Outcome<()> {
        let (new, bytes, handle_types) = (message.new, message.bytes, message.handle_types);
        closed::HANDLE_TYPES.check(handle_types)?;
        let device = self.here(call);
        self.ask_for_memory(
            &call.brief_if(self.takes_little(bytes)),
            device.clone(),
            move |device| device.create_memory(bytes, handle_types),
            move |session, raw| {
                let memory = session
                    .addresses
                    .virtual_memory
                    .memory_object(device, raw, bytes);
                Answer::of(session.objects.memories.enter(new, memory))
            },
        )
    }
}

/// Names memory by another handle. It must be neither mapped nor shared, as for its release.
impl Serve<MemRename> for Session {
    fn serve(&mut self, _: &Call, message: &MemRename) -> Outcome<()> {
        let is_used = Arc::strong_count(self.objects.memories.get(message.memory)?) != 1;
        if is_used || self.shares.shares_memory(message.memory) {
            return Err(CuResult::INVALID_VALUE);
        }
        let memory = self.objects.memories.remove(message.memory)?;
        self.objects.memories.enter(message.new, memory)?;
        Ok(Served::Done(()))
    }
}

/// Releases memory that is not mapped. The guest sends this once it has no mapping left.
impl Serve<MemRelease> for Session {
    fn serve(&mut self, call: &Call, message: &MemRelease) -> Outcome<()> {
        let handle = message.memory;
        if Arc::strong_count(self.objects.memories.get(handle)?) != 1 {
            return Err(CuResult::INVALID_VALUE);
        }
        let unshare = self.shares.unsharing(handle);
        let memory = self.objects.memories.remove(handle)?;
        let here = self.here(call);
        let Some(unshare) = unshare else {
            return self.order(
                &call.brief_if(self.takes_little(memory.bytes)),
                here,
                move |_| {
                    drop(memory);
                    Ok(())
                },
            );
        };
        self.order(call, here, move |_| {
            unshare();
            drop(memory);
            Ok(())
        })
    }
}

impl Serve<MemMap> for Session {
    fn serve(&mut self, _: &Call, message: &MemMap) -> Outcome<()> {
        let handle = message.memory;
        let address = message.address.0;
        let memory = Arc::clone(self.objects.memories.get(handle)?);
        let virtual_memory = &self.addresses.virtual_memory;
        if !virtual_memory.can_map() {
            return Err(CuResult::OUT_OF_MEMORY);
        }
        if !virtual_memory.is_free(address, memory.bytes) {
            return Err(self.addresses.refused());
        }
        self.done(memory.device.map(address, memory.bytes, memory.raw))?;
        self.addresses.virtual_memory.map(address, memory);
        Ok(Served::Done(()))
    }
}

impl Session {
    /// Calls [`VirtualMemory::begin_change`], and counts a range that the session may not change.
    fn begin_change(&mut self, address: u64, bytes: u64) -> Result<Vec<u64>, CuResult> {
        let starts = self.addresses.virtual_memory.begin_change(address, bytes);
        starts.ok_or_else(|| self.addresses.refused())
    }
}

impl Serve<MemUnmap> for Session {
    fn serve(&mut self, call: &Call, message: &MemUnmap) -> Outcome<()> {
        let bytes = message.bytes;
        let address = message.address.0;
        let starts = self.begin_change(address, bytes)?;
        // However the job ends, no copy may name the range from here on.
        self.addresses.virtual_memory.hide(&starts);
        let marked = starts.clone();
        let outcome = self.free_and_finish(
            &call.brief_if(self.takes_little(bytes)),
            self.here(call),
            move |device| device.mem_unmap(address, bytes),
            move |session, unmapped| {
                let virtual_memory = &mut session.addresses.virtual_memory;
                match unmapped {
                    Ok(()) => virtual_memory.remove(&starts),
                    Err(_) => virtual_memory.end_change(&starts),
                }
                unmapped
            },
        );
        if !matches!(outcome, Ok(Served::Deferred)) {
            self.addresses.virtual_memory.end_change(&marked);
        }
        outcome
    }
}

impl Serve<MemSetAccess> for Session {
    fn serve(&mut self, call: &Call, message: &MemSetAccess) -> Outcome<()> {
        let (address, bytes) = (message.address.0, message.bytes);
        let access = message.access;
        let starts = self.begin_change(address, bytes)?;
        let marked = starts.clone();
        let changes = call.brief_if(self.takes_little(bytes));
        let outcome = self.defer(&changes, self.here(call), move |device: &dyn Device| {
            let set = device.set_access(address, bytes, access);
            Box::new(move |session: &mut Session| {
                session.addresses.virtual_memory.end_change(&starts);
                Answer::of(session.done(set))
            })
        });
        if !matches!(outcome, Ok(Served::Deferred)) {
            self.addresses.virtual_memory.end_change(&marked);
        }
        outcome
    }
}
