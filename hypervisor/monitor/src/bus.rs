//! Dispatches port and MMIO accesses to devices by address.
//!
//! A device claims ranges of a [`Bus`]; an access goes to the device whose range contains its first
//! byte. Unclaimed reads return all ones, unclaimed writes are dropped, and both are counted. Each
//! device has its own lock, so that two vCPUs contend only for the same device.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use wormhole_lock::{Mutex, RwLock};

/// Error from claiming a range.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BusError {
    /// Another device claims a part of the range.
    #[error("addresses {start:#x} + {len:#x} overlap those of another device at {other:#x}")]
    Overlap {
        /// First address.
        start: u64,
        /// Number of addresses.
        len: u64,
        /// First address of the other device's range.
        other: u64,
    },
    /// The range is empty or leaves the address space.
    #[error("addresses {start:#x} + {len:#x} are no range")]
    Range {
        /// First address.
        start: u64,
        /// Number of addresses.
        len: u64,
    },
}

/// Consequence of a write for the vCPU that made it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// The vCPU continues.
    Continue,
    /// The vCPU's payload ended with this status.
    Exited(u32),
    /// The guest powered off.
    PowerOff,
    /// The guest reset itself.
    Reset,
    /// The guest's kernel panicked.
    Panicked,
    /// A payload's exception handler ran; the handler's stack holds the exception frame.
    Exception,
}

/// A device that handles accesses to a range of addresses. Called on vCPU threads, so it must not
/// block.
///
/// `data` holds the access's bytes. A string instruction (`rep outsb`) combines several accesses to one
/// port, so that `data` may be longer than the range.
pub trait BusDevice: Debug + Send {
    /// Reads at `offset` from the range's start; fills all of `data`.
    fn read(&mut self, offset: u64, data: &mut [u8]);
    /// Writes at `offset` from the range's start.
    fn write(&mut self, offset: u64, data: &[u8]) -> Effect;
}

/// A device that several buses and threads share.
pub type SharedDevice = Arc<Mutex<dyn BusDevice>>;

#[derive(Debug)]
struct Claim {
    len: u64,
    device: SharedDevice,
}

/// An address space (ports or physical memory) and the devices in it.
#[derive(Debug, Default)]
pub struct Bus {
    /// Claimed ranges by first address, without overlaps.
    claims: RwLock<BTreeMap<u64, Claim>>,
    unclaimed: AtomicU64,
}

impl Bus {
    /// Claims the `len` addresses from `start` on for `device`.
    ///
    /// # Errors
    /// The range is empty, leaves the address space or overlaps another one.
    pub fn insert(&self, start: u64, len: u64, device: SharedDevice) -> Result<(), BusError> {
        let last = len
            .checked_sub(1)
            .and_then(|len| start.checked_add(len))
            .ok_or(BusError::Range { start, len })?;
        let mut claims = self.claims.write();
        // Ranges are disjoint, so only the last one that begins at or before `last` can reach `start`.
        if let Some((&other, claim)) = claims.range(..=last).next_back()
            && start - start.min(other) < claim.len
        {
            return Err(BusError::Overlap { start, len, other });
        }
        claims.insert(start, Claim { len, device });
        Ok(())
    }

    /// Releases the range that begins at `start`.
    pub fn remove(&self, start: u64) {
        let mut claims = self.claims.write();
        claims.remove(&start);
    }

    /// Reads from the device at `address`; all ones if there is none.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        match self.find(address) {
            Some((device, offset)) => device.lock().read(offset, data),
            None => data.fill(0xff),
        }
    }

    /// Writes to the device at `address`; no effect if there is none.
    pub fn write(&self, address: u64, data: &[u8]) -> Effect {
        match self.find(address) {
            Some((device, offset)) => device.lock().write(offset, data),
            None => Effect::Continue,
        }
    }

    /// Returns the number of unclaimed accesses so far.
    pub fn unclaimed(&self) -> u64 {
        self.unclaimed.load(Ordering::Relaxed)
    }

    /// Returns the device at `address` and the offset in its range. Releases the bus lock: a device may
    /// change the bus while it handles an access.
    fn find(&self, address: u64) -> Option<(SharedDevice, u64)> {
        let claims = self.claims.read();
        let found = claims
            .range(..=address)
            .next_back()
            .map(|(start, claim)| (claim, address - start))
            .filter(|(claim, offset)| *offset < claim.len)
            .map(|(claim, offset)| (Arc::clone(&claim.device), offset));
        if found.is_none() {
            self.unclaimed.fetch_add(1, Ordering::Relaxed);
            tracing::trace!(address, "an access that no device claims");
        }
        found
    }
}

/// The two address spaces of accesses that exit to the monitor.
#[derive(Debug, Default)]
pub struct Buses {
    /// I/O ports.
    pub ports: Bus,
    /// Physical memory that no memslot backs.
    pub memory: Arc<Bus>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Device that reads as `value` and records writes.
    #[derive(Debug, Default)]
    struct Register {
        value: u8,
        written: Vec<(u64, Vec<u8>)>,
    }

    impl BusDevice for Register {
        fn read(&mut self, _: u64, data: &mut [u8]) {
            data.fill(self.value);
        }
        fn write(&mut self, offset: u64, data: &[u8]) -> Effect {
            self.written.push((offset, data.to_vec()));
            Effect::Continue
        }
    }

    fn register(value: u8) -> Arc<Mutex<Register>> {
        Arc::new(Mutex::new(Register {
            value,
            ..Register::default()
        }))
    }

    fn read(bus: &Bus, address: u64) -> u8 {
        let mut data = [0; 4];
        bus.read(address, &mut data);
        assert!(data.iter().all(|byte| *byte == data[0]));
        data[0]
    }

    #[test]
    fn an_access_reaches_the_device_that_claims_its_first_byte() {
        let bus = Bus::default();
        let (low, high) = (register(1), register(2));
        bus.insert(0x10, 8, low.clone()).expect("free");
        bus.insert(0x18, 1, high.clone()).expect("free");
        assert_eq!([0x10, 0x17, 0x18].map(|at| read(&bus, at)), [1, 1, 2]);
        // A string instruction's bytes all go to the first port.
        bus.write(0x17, &[7; 64]);
        assert_eq!(low.lock().written, [(7, vec![7; 64])]);
        assert!(high.lock().written.is_empty());
    }

    #[test]
    fn unclaimed_accesses_read_all_ones_and_are_counted() {
        let bus = Bus::default();
        bus.insert(0x10, 1, register(1)).expect("free");
        assert_eq!([0, 0xf, 0x11, u64::MAX].map(|at| read(&bus, at)), [0xff; 4]);
        assert_eq!(bus.write(0x11, &[1]), Effect::Continue);
        assert_eq!(bus.unclaimed(), 5);
        assert_eq!(read(&bus, 0x10), 1);
        assert_eq!(bus.unclaimed(), 5);
    }

    #[test]
    fn a_removed_range_is_free_again() {
        let bus = Bus::default();
        bus.insert(0x10, 4, register(1)).expect("free");
        bus.remove(0x11);
        assert_eq!(read(&bus, 0x10), 1);
        bus.remove(0x10);
        assert_eq!(read(&bus, 0x10), 0xff);
        bus.insert(0x12, 1, register(2)).expect("free");
    }

    #[test]
    fn a_range_must_have_addresses_that_exist() {
        let bus = Bus::default();
        for (start, len) in [(0x10, 0), (u64::MAX, 2)] {
            let refused = bus.insert(start, len, register(0));
            assert_eq!(refused, Err(BusError::Range { start, len }));
        }
        bus.insert(u64::MAX, 1, register(3)).expect("one address");
        assert_eq!(read(&bus, u64::MAX), 3);
    }

    proptest! {
        /// Each address belongs to the first device that claimed it, for any order of claims.
        #[test]
        fn claims_never_overlap(ranges in proptest::collection::vec((0u64..64, 1u64..16), 1..20)) {
            let bus = Bus::default();
            let mut owners = [0xff; 80];
            for (value, (start, len)) in (0u8..).zip(ranges) {
                let range = usize::try_from(start).expect("small")..usize::try_from(start + len).expect("small");
                let free = owners[range.clone()].iter().all(|owner| *owner == 0xff);
                prop_assert_eq!(bus.insert(start, len, register(value)).is_ok(), free);
                if free {
                    owners[range].fill(value);
                }
            }
            for (address, owner) in (0u64..).zip(owners) {
                prop_assert_eq!(read(&bus, address), owner);
            }
        }
    }
}
