//! Implements the 256-byte configuration space of a type 0 function.

use crate::memory::Range;

/// Offset of the command register.
const COMMAND: usize = 0x04;
/// Offset of the status register.
pub(crate) const STATUS: usize = 0x06;
/// Bit of the status register: the function reports an interrupt by its pin, not by MSI-X.
pub(crate) const STATUS_INTERRUPT: u8 = 1 << 3;
const STATUS_CAPABILITIES: u8 = 1 << 4;
/// Writable bits of the command register: memory decode, bus master, INTx disable.
const COMMAND_WRITABLE: u16 = 1 << 1 | 1 << 2 | 1 << 10;
const COMMAND_MEMORY: u8 = 1 << 1;
const FIRST_BAR: usize = 0x10;
const CAPABILITIES: usize = 0x34;
const FIRST_CAPABILITY: usize = 0x40;
const INTERRUPT_LINE: usize = 0x3c;

/// Identification registers of a function.
#[derive(Debug, Clone, Copy)]
pub struct Identity {
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// Revision id.
    pub revision: u8,
    /// Class, subclass and programming interface, in this order.
    pub class: [u8; 3],
    /// Subsystem id.
    pub subsystem: u16,
}

/// A 32-bit memory BAR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bar {
    /// Guest physical address.
    pub address: u32,
    /// Size in bytes, a power of two of at least 4 KiB.
    pub size: u32,
}

impl Bar {
    /// Returns the BAR's range of guest physical addresses.
    pub fn range(self) -> Range {
        Range {
            start: self.address.into(),
            len: self.size.into(),
        }
    }
}

/// Configuration space: its bytes, and a mask of the bits that the guest may write.
#[derive(Debug, Clone)]
pub struct ConfigSpace {
    bytes: [u8; 256],
    writable: [u8; 256],
    bar: Option<Bar>,
    last_capability: Option<usize>,
    next_capability: usize,
}

impl ConfigSpace {
    /// Creates the space of a function with at most one BAR (BAR 0).
    pub fn new(identity: Identity, bar: Option<Bar>) -> Self {
        let mut space = Self {
            bytes: [0; 256],
            writable: [0; 256],
            bar,
            last_capability: None,
            next_capability: FIRST_CAPABILITY,
        };
        space.put(0x00, &identity.vendor.to_le_bytes());
        space.put(0x02, &identity.device.to_le_bytes());
        let [class, subclass, interface] = identity.class;
        space.put(0x08, &[identity.revision, interface, subclass, class]);
        space.put(0x2c, &identity.vendor.to_le_bytes());
        space.put(0x2e, &identity.subsystem.to_le_bytes());
        space.allow(COMMAND, &COMMAND_WRITABLE.to_le_bytes());
        space.allow(INTERRUPT_LINE, &[0xff]);
        if let Some(bar) = bar {
            space.put(FIRST_BAR, &bar.address.to_le_bytes());
            // Address bits below the size read as zero, from which a guest determines the size.
            space.allow(FIRST_BAR, &(!(bar.size - 1)).to_le_bytes());
            space.put(COMMAND, &[COMMAND_MEMORY]);
        }
        space
    }

    /// Adds a capability with this id, this body (the bytes after the next pointer) and this mask of the
    /// body's writable bits. Returns the offset of the body.
    ///
    /// # Panics
    /// If the capabilities do not fit into the space. The monitor chooses them, not the guest.
    pub fn add_capability(&mut self, id: u8, body: &[u8], writable: &[u8]) -> usize {
        let at = self.next_capability;
        assert!(
            at + 2 + body.len() <= 256,
            "PCI capabilities outgrow configuration space"
        );
        let pointer = self.last_capability.map_or(CAPABILITIES, |last| last + 1);
        self.put(pointer, &[at.to_le_bytes()[0]]);
        self.put(at, &[id, 0]);
        self.put(at + 2, body);
        self.allow(at + 2, writable);
        self.bytes[STATUS] |= STATUS_CAPABILITIES;
        self.last_capability = Some(at);
        self.next_capability = (at + 2 + body.len()).next_multiple_of(4);
        at + 2
    }

    /// Reads the space. Bytes past the end are all ones, as for an absent device.
    pub fn read(&self, offset: usize, data: &mut [u8]) {
        for (index, byte) in data.iter_mut().enumerate() {
            *byte = offset
                .checked_add(index)
                .and_then(|at| self.bytes.get(at))
                .copied()
                .unwrap_or(0xff);
        }
    }

    /// Writes the writable bits.
    pub fn write(&mut self, offset: usize, data: &[u8]) {
        for (index, value) in data.iter().enumerate() {
            let Some(at) = offset.checked_add(index).filter(|at| *at < 256) else {
                return;
            };
            let mask = self.writable[at];
            self.bytes[at] = self.bytes[at] & !mask | value & mask;
        }
    }

    /// Returns BAR 0 at its current address, if memory decoding is enabled.
    pub fn bar(&self) -> Option<Bar> {
        let size = self.bar?.size;
        if self.bytes[COMMAND] & COMMAND_MEMORY == 0 {
            return None;
        }
        let mut address = [0; 4];
        self.read(FIRST_BAR, &mut address);
        let address = u32::from_le_bytes(address);
        Some(Bar { address, size })
    }

    /// Returns one byte; all ones past the end.
    pub fn byte(&self, offset: usize) -> u8 {
        self.bytes.get(offset).copied().unwrap_or(0xff)
    }

    /// Returns all bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Writes the writable bits of `bytes`. Returns false, and changes nothing, if the others are not those of this space.
    pub fn restore(&mut self, bytes: &[u8]) -> bool {
        let mut pairs = self.bytes.iter().zip(&self.writable).zip(bytes);
        let fits = bytes.len() == self.bytes.len()
            && pairs.all(|((own, writable), byte)| own & !writable == byte & !writable);
        if fits {
            self.write(0, bytes);
        }
        fits
    }

    fn put(&mut self, offset: usize, bytes: &[u8]) {
        self.bytes[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    fn allow(&mut self, offset: usize, mask: &[u8]) {
        self.writable[offset..offset + mask.len()].copy_from_slice(mask);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn space() -> ConfigSpace {
        let mut space = ConfigSpace::new(
            Identity {
                vendor: 0x1af4,
                device: 0x1053,
                revision: 1,
                class: [7, 0x80, 0],
                subsystem: 0x40,
            },
            Some(Bar {
                address: 0xc000_0000,
                size: 0x1_0000,
            }),
        );
        space.add_capability(0x11, &[1; 10], &[0, 0xc0]);
        space.add_capability(0x09, &[2; 14], &[]);
        space
    }

    fn dword(space: &ConfigSpace, offset: usize) -> u32 {
        let mut bytes = [0; 4];
        space.read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    #[test]
    fn a_guest_finds_the_size_of_the_bar() {
        let mut space = space();
        space.write(0x10, &u32::MAX.to_le_bytes());
        assert_eq!(dword(&space, 0x10), 0xffff_0000);
        space.write(0x14, &u32::MAX.to_le_bytes());
        assert_eq!(dword(&space, 0x14), 0);
    }

    #[test]
    fn the_bar_moves_and_disappears_with_memory_decoding() {
        let mut space = space();
        space.write(0x10, &0xd000_0000u32.to_le_bytes());
        assert_eq!(space.bar().map(|bar| bar.address), Some(0xd000_0000));
        space.write(COMMAND, &[0, 0]);
        assert!(space.bar().is_none());
    }

    #[test]
    fn capabilities_form_a_list() {
        let space = space();
        assert_eq!(
            space.byte(STATUS) & STATUS_CAPABILITIES,
            STATUS_CAPABILITIES
        );
        let first = usize::from(space.byte(CAPABILITIES));
        assert_eq!(space.byte(first), 0x11);
        let second = usize::from(space.byte(first + 1));
        assert_eq!((space.byte(second), space.byte(second + 1)), (0x09, 0));
    }

    #[test]
    fn a_space_takes_the_writable_bits_of_its_own_kind_alone() {
        let mut saved = space();
        saved.write(0x10, &0xd000_0000u32.to_le_bytes());
        saved.write(INTERRUPT_LINE, &[11]);
        let mut restored = space();
        assert!(restored.restore(saved.bytes()));
        assert_eq!(restored.bytes(), saved.bytes());
        let mut other = saved.bytes().to_vec();
        other[2] ^= 1;
        other[0x13] = 0xe0;
        assert!(!restored.restore(&other));
        assert!(!restored.restore(&saved.bytes()[1..]));
        assert_eq!(restored.bytes(), saved.bytes());
    }

    proptest! {
        #[test]
        fn no_access_panics_or_changes_identity(
            accesses in proptest::collection::vec((0usize..300, proptest::collection::vec(any::<u8>(), 0..5)), 0..50)
        ) {
            let mut space = space();
            for (offset, data) in accesses {
                space.write(offset, &data);
                let mut back = vec![0; data.len()];
                space.read(offset, &mut back);
            }
            prop_assert_eq!(dword(&space, 0), 0x1053_1af4);
        }
    }
}
