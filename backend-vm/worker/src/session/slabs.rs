//! Slabs: device memory that the guest divides itself. It writes a record for each part that it allocates or frees, and
//! only parts may be named.

use std::collections::{BTreeMap, BTreeSet};

use wormhole_api::{
    CuResult, DevicePtr, Outcome, PartAlloc, PartFree, Serve, Served, SlabAlloc, SlabAllocReply,
    SlabFree,
};
use wormhole_link::device::MOST;

use super::addresses::{Addresses, admitted};
use super::sharing::Key;
use super::{Answer, Call, Session};
use crate::devices::SessionDevice;

/// The slabs of a session.
#[derive(Debug, Default)]
pub(super) struct Slabs {
    /// Slabs by address. None overlap.
    slabs: BTreeMap<u64, Slab>,
    /// Bytes of slabs that are in no part, by device.
    unused: [u64; MOST],
}

#[derive(Debug)]
struct Slab {
    /// Device that holds the memory.
    device: SessionDevice,
    bytes: u64,
    /// Addresses of the parts.
    parts: BTreeSet<u64>,
    /// Addresses of the parts that are shared with other processes, by the token of the slab.
    shared: BTreeSet<u64>,
}

impl Slabs {
    /// Returns the slab that holds an address.
    fn around(&mut self, address: u64) -> Option<(u64, &mut Slab)> {
        let (&start, slab) = self.slabs.range_mut(..=address).next_back()?;
        (address - start < slab.bytes).then_some((start, slab))
    }

    /// Returns the bytes of a device's slabs that are in no part.
    pub fn unused_of(&self, device: usize) -> u64 {
        self.unused.get(device).copied().unwrap_or(0)
    }

    pub fn holds(&self, slab: u64) -> bool {
        self.slabs.contains_key(&slab)
    }

    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

impl Addresses {
    /// Adds a slab. A guest may name no address of it before a part is added there.
    ///
    /// # Errors
    /// `CUDA_ERROR_UNKNOWN`: the range overlaps another slab.
    fn enter_slab(
        &mut self,
        device: SessionDevice,
        address: u64,
        bytes: u64,
    ) -> Result<(), CuResult> {
        let slabs = &mut self.slabs;
        let end = address.saturating_add(bytes);
        let before = slabs.slabs.range(..end).next_back();
        if before.is_some_and(|(start, slab)| start + slab.bytes > address) {
            tracing::error!("the device gave out {bytes} bytes at {address:#x} twice");
            return Err(CuResult::UNKNOWN);
        }
        slabs.unused[device.number()] += bytes;
        let slab = Slab {
            device,
            bytes,
            parts: BTreeSet::new(),
            shared: BTreeSet::new(),
        };
        slabs.slabs.insert(address, slab);
        Ok(())
    }

    /// Removes a slab and its parts, so that they may not be named any more, and returns its device.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`: no slab starts at the address.
    fn leave_slab(&mut self, address: u64) -> Result<SessionDevice, CuResult> {
        let Some(slab) = self.slabs.slabs.remove(&address) else {
            return Err(self.refused());
        };
        let parts = slab
            .parts
            .iter()
            .filter_map(|part| self.device.remove(*part));
        let used: u64 = parts.map(|(bytes, _)| bytes).sum();
        self.slabs.unused[slab.device.number()] -= slab.bytes - used;
        Ok(slab.device)
    }

    /// Adds a part, and returns its device.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`: the range does not lie in one slab, or overlaps another part.
    fn enter_part(&mut self, address: u64, bytes: u64) -> Result<SessionDevice, CuResult> {
        let entered = self.slabs.around(address).and_then(|(start, slab)| {
            let inside = bytes <= slab.bytes && address - start <= slab.bytes - bytes;
            let number = slab.device.number();
            let fits = inside && self.device.insert_of(number, address, bytes);
            fits.then(|| {
                slab.parts.insert(address);
                slab.device.clone()
            })
        });
        let device = entered.ok_or_else(|| self.refused())?;
        self.slabs.unused[device.number()] -= bytes;
        Ok(device)
    }

    /// Removes a part, so that it may not be named any more. Returns its device, and the slab if none of its parts is
    /// shared any more.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`: no part starts at the address.
    fn leave_part(&mut self, address: u64) -> Result<(SessionDevice, Option<u64>), CuResult> {
        let left = self.slabs.around(address).and_then(|(start, slab)| {
            let known = slab.parts.remove(&address);
            let last = slab.shared.remove(&address) && slab.shared.is_empty();
            known.then(|| (slab.device.clone(), last.then_some(start)))
        });
        let left = left.ok_or_else(|| self.refused())?;
        let bytes = self.device.remove(address).map_or(0, |(bytes, _)| bytes);
        self.slabs.unused[left.0.number()] += bytes;
        Ok(left)
    }

    /// Returns the slab of a part that is going to be shared, and its device. `None` if no part starts at the address.
    pub(super) fn share_part(&mut self, address: u64) -> Option<(u64, SessionDevice)> {
        let (start, slab) = self.slabs.around(address)?;
        let known = slab.parts.contains(&address);
        known.then(|| {
            slab.shared.insert(address);
            (start, slab.device.clone())
        })
    }
}

impl Serve<SlabAlloc> for Session {
    fn serve(&mut self, call: &Call, message: &SlabAlloc) -> Outcome<SlabAllocReply> {
        let bytes = message.bytes;
        if bytes == 0 {
            return Err(CuResult::INVALID_VALUE);
        }
        let here = self.here(call);
        self.ask_for_memory(
            &call.brief_if(self.takes_little(bytes)),
            here.clone(),
            move |device| {
                let address = device.slab_alloc(bytes)?;
                admitted(address, bytes, |address| device.slab_free(address))
            },
            move |session, address| match session.addresses.enter_slab(here, address, bytes) {
                Ok(()) => Answer::reply(&SlabAllocReply {
                    address: DevicePtr(address),
                }),
                Err(error) => Answer::failed(error),
            },
        )
    }
}

impl Serve<SlabFree> for Session {
    fn serve(&mut self, call: &Call, message: &SlabFree) -> Outcome<()> {
        let address = message.address.0;
        let owner = self.addresses.leave_slab(address)?;
        self.shares
            .unshare(Key::Allocation(address), &self.registrar);
        self.free(call, owner, move |device| device.slab_free(address))
    }
}

impl Serve<PartAlloc> for Session {
    fn serve(&mut self, _: &Call, message: &PartAlloc) -> Outcome<()> {
        let (address, bytes) = (message.address.0, message.bytes);
        let device = self.addresses.enter_part(address, bytes)?;
        let noted = device.part_alloc(address, bytes);
        self.done(noted).map(Served::Done)
    }
}

impl Serve<PartFree> for Session {
    fn serve(&mut self, _: &Call, message: &PartFree) -> Outcome<()> {
        let address = message.address.0;
        let (device, unshared) = self.addresses.leave_part(address)?;
        if let Some(slab) = unshared {
            self.shares.unshare(Key::Allocation(slab), &self.registrar);
        }
        self.done(device.part_free(address)).map(Served::Done)
    }
}
