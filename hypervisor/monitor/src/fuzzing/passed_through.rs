//! The PCI bus of a VM with a device of the host, whose accesses to the device are checked.

use std::sync::Arc;

use vfio_bindings::bindings::vfio::VFIO_PCI_CONFIG_REGION_INDEX;
use vfio_ioctls::VfioError;
use vmm_sys_util::eventfd::EventFd;
use wormhole_lock::Mutex;

use super::Nobody;
use crate::bus::Buses;
use crate::devices::pci::{BarSpace, CONFIG_PORTS, CONFIG_PORTS_LEN, PciBus};
use crate::devices::vfio::{Config, Hardware, VfioFunction};
use crate::memory::{PCI_HOLE_END, PCI_HOLE_START};
use crate::ram::PAGE;

/// Bytes of a configuration space.
pub const SPACE: usize = 256;
/// Most vectors of a device here, less one, since each takes descriptors.
const VECTORS: u8 = 7;
/// Addresses of wide BARs.
const WIDE: std::ops::Range<u64> = 1 << 40..1 << 47;

const COMMAND: usize = 4;
/// Bits of the command register that the device has always: memory decoding, no legacy interrupt. A guest sets that of DMA.
const COMMAND_FIXED: u16 = 1 << 1 | 1 << 10;
const COMMAND_DMA: u16 = 1 << 2;
const STATUS: usize = 6;
const HEADER_END: usize = 0x40;
const EXPRESS: u8 = 0x10;
const MSIX: u8 = 0x11;
/// Registers of PCI Express that a guest writes, with their bits: no report of errors, and no reset.
const EXPRESS_WRITABLE: [(usize, u16); 2] = [(8, 0x79f0), (0x28, 0x1f)];
/// Bytes of an entry of the MSI-X table.
const ENTRY: u64 = 16;

/// A VM's buses with one function, which is device 1.
#[derive(Debug)]
pub struct PassedThrough {
    /// Port and memory buses, as a vCPU accesses them.
    pub buses: Buses,
    /// Regions and offsets of the MSI-X table and of the pending bits.
    pub msix: [(u8, u64); 2],
}

impl PassedThrough {
    /// Passes a device through that has this configuration space, and regions whose sizes are powers of two with these
    /// exponents, less one. Returns none if the device is refused.
    pub fn new(space: &[u8; SPACE], sizes: &[u8; 6]) -> Option<Self> {
        let mut space = *space;
        let msix = capabilities(&space).find(|&at| space[at] == MSIX);
        if let Some(at) = msix {
            let control = space.get_mut(at + 2..at + 4)?;
            control.copy_from_slice(&[control[0] & VECTORS, control[1] & !7]);
        }
        let sizes = sizes.map(|size| match size {
            0 => 0,
            size => 1 << ((size - 1) % 48),
        });
        let device = Device {
            first: space,
            config: Mutex::new(space),
            sizes,
            vectors: 0,
            msix: Vec::new(),
        };
        let mut config = Config::new(&device, |region| device.size_of(region)).ok()?;
        let capability = config.msix();
        let vectors = capability.vectors as u64;
        let places = [
            (capability.table, ENTRY * vectors),
            (capability.pending, 8 * vectors.div_ceil(64)),
        ];
        let device = Arc::new(Device {
            vectors: capability.vectors,
            msix: places
                .map(|(place, len)| (place.bar, place.offset..place.offset + len))
                .into(),
            ..device
        });
        let mut narrow = BarSpace::new(PCI_HOLE_START..PCI_HOLE_END);
        let mut wide = BarSpace::new(WIDE);
        for bar in config.bars().to_vec() {
            let size = bar.size.max(PAGE);
            let address = match (bar.wide, u32::try_from(size)) {
                (false, Ok(size)) => narrow.allocate(size).ok()?.into(),
                _ => wide.allocate_wide(size).ok()?,
            };
            config.set_address(bar, address);
        }
        let function = VfioFunction::new(device, config, Vec::new(), Arc::new(Nobody));
        let buses = Buses::default();
        let mut pci = PciBus::new(Arc::clone(&buses.memory));
        let function = Arc::new(Mutex::new(function.expect("eventfds")));
        pci.add(function).expect("room");
        let (start, len) = (CONFIG_PORTS.into(), CONFIG_PORTS_LEN.into());
        let pci = Arc::new(Mutex::new(pci));
        buses.ports.insert(start, len, pci).expect("free");
        let msix = places.map(|(place, _)| (place.bar.to_le_bytes()[0], place.offset));
        Some(Self { buses, msix })
    }
}

/// A device that asserts what reaches it.
#[derive(Debug)]
struct Device {
    first: [u8; SPACE],
    config: Mutex<[u8; SPACE]>,
    sizes: [u64; 6],
    vectors: usize,
    /// Regions and places of the MSI-X table and of the pending bits, once they are known.
    msix: Vec<(u32, std::ops::Range<u64>)>,
}

impl Device {
    fn size_of(&self, region: u32) -> u64 {
        self.sizes.get(region as usize).copied().unwrap_or(0)
    }

    /// Asserts that an access begins in a region, and touches neither the MSI-X table nor the pending bits.
    fn check(&self, region: u32, offset: u64, len: usize) {
        let size = self.size_of(region);
        assert!(offset < size, "region {region} at {offset:#x} of {size:#x}");
        for (other, place) in &self.msix {
            let is_apart = offset + len as u64 <= place.start || offset >= place.end;
            assert!(*other != region || is_apart, "{offset:#x} of {place:?}");
        }
    }

    /// Returns the bits of a byte of configuration space that a guest changes at most.
    fn writable(&self, at: usize) -> u8 {
        if (COMMAND..COMMAND + 2).contains(&at) || (STATUS..STATUS + 2).contains(&at) {
            return 0xff;
        }
        let express = capabilities(&self.first).filter(|&place| self.first[place] == EXPRESS);
        let bits = express.flat_map(|place| {
            EXPRESS_WRITABLE
                .into_iter()
                .flat_map(move |(register, bits)| (place + register..).zip(bits.to_le_bytes()))
        });
        let bits = bits.filter(|&(place, _)| place == at && at >= HEADER_END);
        bits.fold(0, |all, (_, bits)| all | bits)
    }
}

impl Hardware for Device {
    fn read(&self, region: u32, offset: u64, data: &mut [u8]) {
        if region == VFIO_PCI_CONFIG_REGION_INDEX {
            let at = usize::try_from(offset).expect("a place in the space");
            data.copy_from_slice(&self.config.lock()[at..at + data.len()]);
        } else {
            self.check(region, offset, data.len());
            data.fill(offset.to_le_bytes()[0]);
        }
    }

    fn write(&self, region: u32, offset: u64, data: &[u8]) {
        if region != VFIO_PCI_CONFIG_REGION_INDEX {
            return self.check(region, offset, data.len());
        }
        let mut config = self.config.lock();
        let start = usize::try_from(offset).expect("a place in the space");
        for (at, byte) in (start..).zip(data) {
            let changed = config[at] ^ byte;
            assert_eq!(changed & !self.writable(at), 0, "{at:#x} becomes {byte:#x}");
            config[at] = *byte;
        }
        let command = u16::from_le_bytes([config[COMMAND], config[COMMAND + 1]]);
        assert_eq!(command & !COMMAND_DMA, COMMAND_FIXED, "{command:#x}");
    }

    fn set_vectors(&self, events: Vec<&EventFd>) -> Result<(), VfioError> {
        assert!(events.is_empty() || events.len() == self.vectors);
        Ok(())
    }

    fn reset(&self) {}
}

/// Returns the offsets of capabilities, in the order of their list.
fn capabilities(space: &[u8; SPACE]) -> impl Iterator<Item = usize> {
    let place = |pointer: u8| Some(usize::from(pointer & !3)).filter(|&at| at >= HEADER_END);
    let first = place(space[0x34]);
    std::iter::successors(first, move |&at| place(space[at + 1])).take(SPACE / 4)
}
