//! The configuration space of a device that is passed through.
//!
//! Each byte is the device's or the monitor's. The device's are read from it, and written to it where the guest may write.
//! The monitor's are in this module: the BARs, whose addresses are the guest's, the list of capabilities, which contains
//! [a few](SHOWN), and message control of MSI-X. VFIO filters writes once more.

use vfio_bindings::bindings::vfio::VFIO_PCI_CONFIG_REGION_INDEX;

use super::Hardware;

/// Size of the space that mechanism 1 reaches.
const SIZE: usize = 256;
const COMMAND: usize = 0x04;
/// Bits of the command register that the guest sets: memory decoding, bus master, parity and system errors. The device gets
/// none of the last two, since the errors that it would report are the host's.
const COMMAND_WRITABLE: u16 = COMMAND_MEMORY | COMMAND_MASTER | 1 << 6 | 1 << 8;
const COMMAND_MEMORY: u16 = 1 << 1;
const COMMAND_MASTER: u16 = 1 << 2;
/// Bit of the command register: no legacy interrupt.
const COMMAND_NO_INTX: u16 = 1 << 10;
const STATUS: usize = 0x06;
const STATUS_CAPABILITIES: u8 = 1 << 4;
const CACHE_LINE: usize = 0x0c;
const HEADER_TYPE: usize = 0x0e;
const SELF_TEST: usize = 0x0f;
const FIRST_BAR: usize = 0x10;
const BARS: usize = 6;
/// Size of the largest BAR.
const LARGEST: u64 = 1 << 46;
const ROM: usize = 0x30;
const CAPABILITIES: usize = 0x34;
const INTERRUPT_LINE: usize = 0x3c;
const INTERRUPT_PIN: usize = 0x3d;
const HEADER_END: usize = 0x40;

const VENDOR: u8 = 0x09;
const EXPRESS: u8 = 0x10;
const MSIX: u8 = 0x11;

/// Offsets in the PCI Express capability: the byte with the bit that announces a function-level reset, Device Control and its
/// second register.
const EXPRESS_RESET: usize = 7;
const EXPRESS_HAS_RESET: u8 = 1 << 4;
const EXPRESS_CONTROL: usize = 8;
const EXPRESS_CONTROL_2: usize = 0x28;
/// Bits of Device Control that the guest sets: order, snoops, tags, and sizes of packets. Reports of errors are none of them, which
/// could end the host, nor is the reset, for which the thread that asks would wait.
const EXPRESS_WRITABLE: u16 = 0x79f0;
/// Bits of the second register that the guest sets: the time after which a completion is missed.
const EXPRESS_WRITABLE_2: u16 = 0x1f;

/// Capabilities that the guest sees. Power management is left out, since a device that sleeps has no registers behind
/// its mapped BARs. Nor is MSI, whose place MSI-X takes, nor vital product data, which a guest could change for good. It reads
/// capabilities of vendors and writes none, since some lead to the device's firmware.
pub(super) const SHOWN: [u8; 3] = [VENDOR, EXPRESS, MSIX];

/// A memory BAR as the device has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BarRegister {
    /// Number of the BAR, and of its region.
    pub index: u32,
    /// Size in bytes, a power of two.
    pub size: u64,
    /// Whether the address has 64 bits.
    pub wide: bool,
}

/// Place of the MSI-X table or of its pending bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub bar: u32,
    pub offset: u64,
}

/// The MSI-X capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MsixCapability {
    /// Number of vectors.
    pub vectors: usize,
    pub table: Place,
    pub pending: Place,
    /// Offset of message control's high byte.
    pub control: usize,
}

/// Whose a byte is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    /// The monitor's, with a mask of the bits that the guest may write.
    Monitor(u8),
    /// The device's, with a mask of the bits that the guest may write.
    Device(u8),
}

/// A byte of the device that the guest does not write.
const READ_ONLY: Owner = Owner::Device(0);

/// A configuration space.
#[derive(Debug)]
pub(crate) struct Config {
    bytes: [u8; SIZE],
    owners: [Owner; SIZE],
    bars: Vec<BarRegister>,
    msix: MsixCapability,
}

impl Config {
    /// Reads the space of a device whose regions have these sizes.
    ///
    /// # Errors
    /// The reason why the device cannot be passed through.
    pub fn new(device: &dyn Hardware, size_of: impl Fn(u32) -> u64) -> Result<Self, &'static str> {
        let mut found = [0; SIZE];
        device.read(VFIO_PCI_CONFIG_REGION_INDEX, 0, &mut found);
        if found[HEADER_TYPE] & 0x7f != 0 {
            return Err("it is a bridge");
        }
        let mut space = Self {
            bytes: [0; SIZE],
            owners: [Owner::Monitor(0); SIZE],
            bars: Vec::new(),
            msix: msix(&found)
                .ok_or("it has no MSI-X, the only kind of interrupts that is passed on")?,
        };
        space.owners[..HEADER_END].fill(READ_ONLY);
        // A write clears bits.
        space.owners[STATUS..STATUS + 2].fill(Owner::Device(0xff));
        space.own(CACHE_LINE, &found[CACHE_LINE..CACHE_LINE + 2], &[0xff; 2]);
        // It is alone behind its device number.
        space.own(HEADER_TYPE, &[0], &[0]);
        space.own(SELF_TEST, &[0], &[0]);
        space.own(FIRST_BAR, &[0; 4 * BARS], &[0; 4 * BARS]);
        space.own(ROM, &[0; 4], &[0; 4]);
        space.own(INTERRUPT_LINE, &[0], &[0xff]);
        space.own(INTERRUPT_PIN, &[0], &[0]);
        space.own(
            COMMAND,
            &COMMAND_MEMORY.to_le_bytes(),
            &COMMAND_WRITABLE.to_le_bytes(),
        );
        space.add_bars(&found, size_of)?;
        space.add_capabilities(&found);
        space.write_command(device);
        Ok(space)
    }

    fn own(&mut self, at: usize, bytes: &[u8], writable: &[u8]) {
        for (at, (byte, mask)) in (at..).zip(bytes.iter().zip(writable)) {
            self.bytes[at] = *byte;
            self.owners[at] = Owner::Monitor(*mask);
        }
    }

    fn add_bars(
        &mut self,
        found: &[u8; SIZE],
        size_of: impl Fn(u32) -> u64,
    ) -> Result<(), &'static str> {
        let mut index = 0;
        while index < BARS {
            let at = FIRST_BAR + 4 * index;
            let flags = found[at] & 0xf;
            let (is_ports, wide) = (flags & 1 != 0, flags & 6 == 4);
            let number = u32::try_from(index).unwrap_or(0);
            let size = size_of(number);
            index += if wide && !is_ports { 2 } else { 1 };
            // A driver that needs ports does not find them.
            if is_ports || size == 0 {
                continue;
            }
            let most = if wide { LARGEST } else { 1 << 31 };
            let fits = size.is_power_of_two() && (16..=most).contains(&size);
            if !fits || wide && index > BARS {
                return Err("a BAR of it has an impossible size");
            }
            let mask = !(size - 1);
            let low = mask.to_le_bytes();
            self.own(
                at,
                &[flags, 0, 0, 0],
                &[low[0] & 0xf0, low[1], low[2], low[3]],
            );
            if wide {
                self.own(at + 4, &[0; 4], &low[4..]);
            }
            self.bars.push(BarRegister {
                index: number,
                size,
                wide,
            });
        }
        Ok(())
    }

    fn add_capabilities(&mut self, found: &[u8; SIZE]) {
        let all: Vec<usize> = capabilities(found).collect();
        let mut pointer = CAPABILITIES;
        self.own(pointer, &[0], &[0]);
        for &at in all.iter().filter(|&&at| SHOWN.contains(&found[at])) {
            self.own(pointer, &[at.to_le_bytes()[0]], &[0]);
            self.own(at, &[found[at], 0], &[0, 0]);
            pointer = at + 1;
            let length = match found[at] {
                MSIX => 12,
                // The first version of an endpoint has no second set of registers.
                EXPRESS if found[at + 2] & 0xf < 2 => 0x14,
                EXPRESS => 0x3c,
                _ => usize::from(found[at + 2]),
            };
            let next = all.iter().copied().filter(|&other| other > at).min();
            let end = (at + length).min(next.unwrap_or(SIZE)).max(at + 2);
            self.owners[at + 2..end].fill(READ_ONLY);
            if found[at] == EXPRESS {
                self.let_write(at + EXPRESS_CONTROL, EXPRESS_WRITABLE, end);
                self.let_write(at + EXPRESS_CONTROL_2, EXPRESS_WRITABLE_2, end);
                if let Some(byte) = found[..end].get(at + EXPRESS_RESET) {
                    self.own(at + EXPRESS_RESET, &[byte & !EXPRESS_HAS_RESET], &[0]);
                }
            }
        }
        let control = self.msix.control;
        self.own(control, &[found[control] & 0x3f], &[0xc0]);
    }

    /// Lets the guest write these bits of a register of the device that lies before `end`.
    fn let_write(&mut self, at: usize, bits: u16, end: usize) {
        if let Some(owners) = self.owners[..end].get_mut(at..at + 2) {
            let masks = bits.to_le_bytes().map(Owner::Device);
            owners.copy_from_slice(&masks);
        }
    }

    /// Returns the BARs.
    pub fn bars(&self) -> &[BarRegister] {
        &self.bars
    }

    /// Returns the MSI-X capability.
    pub fn msix(&self) -> MsixCapability {
        self.msix
    }

    /// Returns the high byte of MSI-X's message control.
    pub fn msix_control(&self) -> u8 {
        self.bytes[self.msix.control]
    }

    /// Returns whether the guest has memory decoding enabled.
    pub fn decodes(&self) -> bool {
        self.command() & COMMAND_MEMORY != 0
    }

    /// Returns the guest physical address of a BAR.
    pub fn address(&self, bar: BarRegister) -> u64 {
        let at = FIRST_BAR + 4 * usize::try_from(bar.index).unwrap_or(0);
        let word = |at: usize| {
            u64::from(u32::from_le_bytes(
                [0, 1, 2, 3].map(|byte| self.bytes[at + byte]),
            ))
        };
        let high = if bar.wide { word(at + 4) << 32 } else { 0 };
        high | word(at) & !0xf
    }

    /// Sets the guest physical address of a BAR.
    pub fn set_address(&mut self, bar: BarRegister, address: u64) {
        let at = FIRST_BAR + 4 * usize::try_from(bar.index).unwrap_or(0);
        let count = if bar.wide { 8 } else { 4 };
        self.write_own(at, &address.to_le_bytes()[..count]);
    }

    /// Reads the space. Bytes past the end are all ones.
    pub fn read(&self, device: &dyn Hardware, offset: usize, data: &mut [u8]) {
        data.fill(0xff);
        let Some(owners) = self.owners.get(offset..offset.saturating_add(data.len())) else {
            return;
        };
        if owners.iter().any(|owner| matches!(owner, Owner::Device(_))) {
            device.read(VFIO_PCI_CONFIG_REGION_INDEX, offset as u64, data);
        }
        for ((at, byte), owner) in (offset..).zip(data).zip(owners) {
            if let Owner::Monitor(_) = owner {
                *byte = self.bytes[at];
            }
            if at == STATUS {
                *byte |= STATUS_CAPABILITIES;
            }
        }
    }

    /// Writes what the guest may write.
    pub fn write(&mut self, device: &dyn Hardware, offset: usize, data: &[u8]) {
        let Some(owners) = self.owners.get(offset..offset.saturating_add(data.len())) else {
            return;
        };
        for ((at, byte), owner) in (offset..).zip(data).zip(owners) {
            let Owner::Device(mask @ 1..) = *owner else {
                continue;
            };
            let mut now = [0];
            if mask != 0xff {
                device.read(VFIO_PCI_CONFIG_REGION_INDEX, at as u64, &mut now);
            }
            let value = now[0] & !mask | byte & mask;
            device.write(VFIO_PCI_CONFIG_REGION_INDEX, at as u64, &[value]);
        }
        self.write_own(offset, data);
        if offset < COMMAND + 2 && offset + data.len() > COMMAND {
            self.write_command(device);
        }
    }

    fn write_own(&mut self, offset: usize, data: &[u8]) {
        for (at, byte) in (offset..).zip(data) {
            if let Owner::Monitor(mask) = self.owners[at] {
                self.bytes[at] = self.bytes[at] & !mask | byte & mask;
            }
        }
    }

    fn command(&self) -> u16 {
        u16::from_le_bytes([self.bytes[COMMAND], self.bytes[COMMAND + 1]])
    }

    /// Gives the device the guest's command register. Its own registers stay reachable: where they are not, an access to a
    /// mapped BAR would end the VM.
    fn write_command(&self, device: &dyn Hardware) {
        let command = self.command() & COMMAND_MASTER | COMMAND_MEMORY | COMMAND_NO_INTX;
        device.write(
            VFIO_PCI_CONFIG_REGION_INDEX,
            COMMAND as u64,
            &command.to_le_bytes(),
        );
    }
}

/// Returns the offsets of a device's capabilities, in the order of their list.
fn capabilities(found: &[u8; SIZE]) -> impl Iterator<Item = usize> {
    let has = found[STATUS] & STATUS_CAPABILITIES != 0;
    let place = |pointer: u8| Some(usize::from(pointer & !3)).filter(|&at| at >= HEADER_END);
    let first = place(found[CAPABILITIES]).filter(|_| has);
    // No list has more, unless it is a ring.
    std::iter::successors(first, move |&at| place(found[at + 1])).take((SIZE - HEADER_END) / 4)
}

fn msix(found: &[u8; SIZE]) -> Option<MsixCapability> {
    let at = capabilities(found).find(|&at| found[at] == MSIX)?;
    let word = |offset: usize| {
        let bytes = found.get(at + offset..at + offset + 4)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?))
    };
    let place = |word: u32| Place {
        bar: word & 7,
        offset: u64::from(word & !7),
    };
    let vectors = usize::try_from(word(0)? >> 16 & 0x7ff).ok()? + 1;
    Some(MsixCapability {
        vectors,
        table: place(word(4)?),
        pending: place(word(8)?),
        control: at + 3,
    })
}

#[cfg(test)]
pub(super) mod tests;
