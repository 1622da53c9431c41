//! The BARs of a device that is passed through: parts as memory slots, and accesses to the other parts.

use std::ops::Range;
use std::sync::Arc;

use kvm_ioctls::VmFd;

use super::Hardware;
use super::config::{BarRegister, MsixCapability, Place};
use super::error::PassthroughError;
use super::open::Device;
use crate::bus::{BusDevice, Effect};
use crate::devices::pci::Msix;
use crate::memory::set_memslot;
use crate::ram::{AlignedMapping, PAGE};
use crate::vm::VmError;

/// Bytes of an entry of the MSI-X table.
const ENTRY: u64 = 16;

/// Returns the parts of a BAR that may be mapped: whole pages of `areas` without the MSI-X table and its pending bits.
pub(crate) fn mapped(
    bar: BarRegister,
    areas: &[Range<u64>],
    msix: MsixCapability,
) -> Vec<Range<u64>> {
    let up = |at: u64| at.next_multiple_of(PAGE);
    let down = |at: u64| at - at % PAGE;
    let areas = areas
        .iter()
        .map(|area| up(area.start.min(bar.size))..down(area.end.min(bar.size)));
    let mut parts: Vec<Range<u64>> = areas.collect();
    for range in [table(bar.index, msix), pending(bar.index, msix)]
        .into_iter()
        .flatten()
    {
        let hole = down(range.start)..up(range.end);
        let without = parts.into_iter().flat_map(|part| {
            [
                part.start..part.end.min(hole.start),
                part.start.max(hole.end)..part.end,
            ]
        });
        parts = without.collect();
    }
    parts.retain(|part| part.start < part.end);
    parts
}

fn table(bar: u32, msix: MsixCapability) -> Option<Range<u64>> {
    within(bar, msix.table, ENTRY * msix.vectors as u64)
}

fn pending(bar: u32, msix: MsixCapability) -> Option<Range<u64>> {
    // A bit for each vector, in words of 64.
    within(bar, msix.pending, 8 * (msix.vectors as u64).div_ceil(64))
}

fn within(bar: u32, place: Place, len: u64) -> Option<Range<u64>> {
    (place.bar == bar).then_some(place.offset..place.offset + len)
}

/// Accesses to a BAR that exit to the monitor: to the MSI-X table, to registers that are not mapped, and to all registers of a
/// BAR that the guest has moved.
#[derive(Debug)]
pub(super) struct BarAccess {
    device: Arc<dyn Hardware>,
    region: u32,
    msix: Arc<Msix>,
    table: Range<u64>,
    pending: Range<u64>,
}

impl BarAccess {
    pub fn new(
        device: Arc<dyn Hardware>,
        bar: BarRegister,
        capability: MsixCapability,
        msix: Arc<Msix>,
    ) -> Self {
        Self {
            device,
            region: bar.index,
            msix,
            table: table(bar.index, capability).unwrap_or_default(),
            pending: pending(bar.index, capability).unwrap_or_default(),
        }
    }

    /// Returns the number of bytes that an access to the device has in front of the table and of the pending bits. Accesses
    /// need not be aligned, and both lie in one region with the device's own.
    fn before(&self, offset: u64, len: usize) -> usize {
        let starts = [&self.table, &self.pending].map(|range| range.start.checked_sub(offset));
        let starts = starts
            .into_iter()
            .flatten()
            .filter(|&distance| distance > 0);
        let least = starts
            .min()
            .and_then(|distance| usize::try_from(distance).ok());
        least.map_or(len, |least| least.min(len))
    }

    /// Returns the offset in a range.
    fn at(range: &Range<u64>, offset: u64) -> Option<usize> {
        let at = range.contains(&offset).then(|| offset - range.start)?;
        usize::try_from(at).ok()
    }
}

impl BusDevice for BarAccess {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        if let Some(at) = Self::at(&self.table, offset) {
            self.msix.read_table(at, data);
        } else if let Some(at) = Self::at(&self.pending, offset) {
            self.msix.read_pending(at, data);
        } else {
            let (data, behind) = data.split_at_mut(self.before(offset, data.len()));
            self.device.read(self.region, offset, data);
            behind.fill(0xff);
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Effect {
        if let Some(at) = Self::at(&self.table, offset) {
            self.msix.write_table(at, data);
        } else if Self::at(&self.pending, offset).is_none() {
            let len = self.before(offset, data.len());
            self.device.write(self.region, offset, &data[..len]);
        }
        Effect::Continue
    }
}

/// Maps parts of a BAR at `address`, each as the memory slot of the next number.
pub(crate) fn map(
    vm: &VmFd,
    device: &Device,
    bar: BarRegister,
    parts: Vec<Range<u64>>,
    address: u64,
    slot: &mut u32,
) -> Result<Vec<AlignedMapping>, VmError> {
    let failed = |source| PassthroughError::Bar {
        address: device.address().clone(),
        bar: bar.index,
        source,
    };
    let mut mappings = Vec::new();
    for part in parts {
        let len = part.end - part.start;
        let size = usize::try_from(len).map_err(|error| failed(std::io::Error::other(error)))?;
        let mapping = AlignedMapping::new(size, libc::PROT_NONE).map_err(failed)?;
        let from = device.offset_of(bar.index) + part.start;
        mapping.place(device, from, 0, size).map_err(failed)?;
        set_memslot(vm, *slot, address + part.start, len, mapping.start() as u64)?;
        *slot += 1;
        mappings.push(mapping);
    }
    Ok(mappings)
}

#[cfg(test)]
#[expect(clippy::single_range_in_vec_init, reason = "the elements are ranges")]
mod tests {
    use super::*;

    const BAR: BarRegister = BarRegister {
        index: 0,
        size: 0x10_0000,
        wide: true,
    };

    fn msix(vectors: usize, table: (u32, u64), pending: (u32, u64)) -> MsixCapability {
        let place = |(bar, offset)| Place { bar, offset };
        MsixCapability {
            vectors,
            table: place(table),
            pending: place(pending),
            control: 0,
        }
    }

    #[test]
    fn pages_of_the_msix_table_and_of_its_pending_bits_are_not_mapped() {
        let whole = [0..BAR.size];
        let elsewhere = msix(8, (2, 0), (2, 0x800));
        assert_eq!(mapped(BAR, &whole, elsewhere), [0..0x10_0000]);
        let inside = msix(8, (0, 0x2000), (0, 0x3000));
        assert_eq!(mapped(BAR, &whole, inside), [0..0x2000, 0x4000..0x10_0000]);
        // A table that is not aligned takes each page in which it has a byte.
        let across = msix(8, (0, 0xff_fc0), (0, 0x10));
        assert_eq!(mapped(BAR, &whole, across), [0x1000..0xff_000]);
        let large = msix(2048, (0, 0), (2, 0));
        assert_eq!(mapped(BAR, &whole, large), [0x8000..0x10_0000]);
    }

    #[test]
    fn of_areas_whole_pages_within_the_bar_are_mapped() {
        let elsewhere = msix(1, (2, 0), (2, 0x800));
        let areas = [0x10..0x2fff, 0x8000..0x9000, 0xff_000..u64::MAX];
        assert_eq!(
            mapped(BAR, &areas, elsewhere),
            [0x1000..0x2000, 0x8000..0x9000, 0xff_000..0x10_0000]
        );
        let small = BarRegister { size: 256, ..BAR };
        assert!(mapped(small, &[0..256], elsewhere).is_empty());
        assert!(mapped(BAR, &[], elsewhere).is_empty());
    }
}
