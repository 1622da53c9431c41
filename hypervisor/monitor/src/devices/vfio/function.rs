//! A device that is passed through, as a function on the guest's PCI bus.

use std::fmt;
use std::sync::Arc;

use wormhole_lock::Mutex;

use super::Hardware;
use super::bars::BarAccess;
use super::config::{BarRegister, Config};
use crate::bus::{BusDevice, Effect, SharedDevice};
use crate::devices::pci::{Msix, PciFunction};
use crate::irq::{IrqError, MsiController};
use crate::memory::Range;
use crate::ram::AlignedMapping;

/// A function behind VFIO. On drop the device is reset.
pub(crate) struct VfioFunction {
    device: Arc<dyn Hardware>,
    config: Config,
    bars: Vec<(BarRegister, SharedDevice)>,
    msix: Arc<Msix>,
    /// Whether the log says that interrupts could not be changed. A guest can try without end.
    has_said: bool,
    /// Parts of BARs, to which memory slots refer.
    _mappings: Vec<AlignedMapping>,
}

impl fmt::Debug for VfioFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VfioFunction")
            .field("device", &self.device)
            .field("bars", &self.config.bars())
            .finish_non_exhaustive()
    }
}

impl VfioFunction {
    /// Creates the function of a device. `config` has the addresses of its BARs. `mappings` are the mapped parts of these BARs,
    /// over which the VM has memory slots.
    pub fn new(
        device: Arc<dyn Hardware>,
        config: Config,
        mappings: Vec<AlignedMapping>,
        controller: Arc<dyn MsiController>,
    ) -> Result<Self, IrqError> {
        let capability = config.msix();
        let msix = Arc::new(Msix::of_hardware(controller, capability.vectors)?);
        let bars = config.bars().iter().map(|&bar| {
            let access = BarAccess::new(Arc::clone(&device), bar, capability, Arc::clone(&msix));
            (bar, Arc::new(Mutex::new(access)) as SharedDevice)
        });
        Ok(Self {
            bars: bars.collect(),
            device,
            config,
            msix,
            has_said: false,
            _mappings: mappings,
        })
    }

    /// Lets the device raise its vectors if the guest has enabled MSI-X, and stops it otherwise.
    fn set_vectors(&mut self) {
        let set = self
            .msix
            .with_events(|events| match self.msix_is_enabled() {
                true => self.device.set_vectors(events),
                false => self.device.set_vectors(Vec::new()),
            });
        if let Err(error) = set
            && !std::mem::replace(&mut self.has_said, true)
        {
            tracing::warn!(device = ?self.device, %error, "the device's interrupts cannot be changed");
        }
    }

    fn msix_is_enabled(&self) -> bool {
        self.config.msix_control() & Msix::ENABLED != 0
    }
}

impl Drop for VfioFunction {
    fn drop(&mut self) {
        self.device.reset();
    }
}

impl PciFunction for VfioFunction {
    fn read_config(&self, offset: usize, data: &mut [u8]) {
        self.config.read(&*self.device, offset, data);
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) {
        let was_enabled = self.msix_is_enabled();
        let before = self.config.msix_control();
        self.config.write(&*self.device, offset, data);
        if self.msix_is_enabled() != was_enabled {
            self.set_vectors();
        }
        if self.config.msix_control() != before {
            self.msix.set_control(self.config.msix_control());
        }
    }

    fn ranges(&self) -> Vec<(Range, Option<SharedDevice>)> {
        if !self.config.decodes() {
            return Vec::new();
        }
        let ranges = self.bars.iter().map(|(bar, access)| {
            let range = Range {
                start: self.config.address(*bar),
                len: bar.size,
            };
            (range, Some(Arc::clone(access)))
        });
        ranges.collect()
    }
}

/// Accesses go to the devices of the BARs.
impl BusDevice for VfioFunction {
    fn read(&mut self, _: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn write(&mut self, _: u64, _: &[u8]) -> Effect {
        Effect::Continue
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::tests::{Registers, function, size_of};
    use super::*;
    use crate::bus::Bus;
    use crate::devices::pci::PciBus;
    use crate::devices::pci::tests::FakeController;

    const WIDE: u64 = 0x80_0000_0000;
    const NARROW: u64 = 0xc000_0000;
    /// Offset of message control in the test's function.
    const CONTROL: u32 = 0x70;

    struct Guest {
        memory: Arc<Bus>,
        bus: PciBus,
        device: Arc<Registers>,
        controller: Arc<FakeController>,
    }

    impl Guest {
        fn new() -> Self {
            let device = Arc::new(function());
            let mut config = Config::new(&*device, size_of).expect("a function");
            for bar in config.bars().to_vec() {
                config.set_address(bar, if bar.wide { WIDE } else { NARROW });
            }
            let controller = Arc::new(FakeController::default());
            let function = VfioFunction::new(
                Arc::clone(&device) as Arc<dyn Hardware>,
                config,
                Vec::new(),
                Arc::clone(&controller) as Arc<dyn MsiController>,
            );
            let memory = Arc::new(Bus::default());
            let mut bus = PciBus::new(Arc::clone(&memory));
            let function = function.expect("eventfds");
            bus.add(Arc::new(Mutex::new(function))).expect("room");
            device.accesses.lock().clear();
            Self {
                memory,
                bus,
                device,
                controller,
            }
        }

        fn set_config(&mut self, register: u32, value: u32) {
            self.bus
                .write(0, &(1 << 31 | 1 << 11 | register).to_le_bytes());
            self.bus.write(4, &value.to_le_bytes());
        }

        fn read(&self, address: u64) -> u32 {
            let mut data = [0; 4];
            self.memory.read(address, &mut data);
            u32::from_le_bytes(data)
        }
    }

    #[test]
    fn accesses_to_bars_reach_the_device_but_for_the_msix_table() {
        let guest = Guest::new();
        // The test's device reads as the offset's low byte.
        assert_eq!(guest.read(WIDE + 0x14), 0x1414_1414);
        assert_eq!(guest.read(NARROW + 0xffc), 0xfcfc_fcfc);
        assert_eq!(guest.read(WIDE + 0x4000), u32::MAX, "behind the BAR");
        guest.memory.write(WIDE + 0x1000, &7u32.to_le_bytes());
        let written = std::mem::take(&mut *guest.device.accesses.lock());
        assert_eq!(written, [(0, 0x1000, vec![7, 0, 0, 0])]);
        // The second vector's mask, message and pending bits.
        assert_eq!(guest.read(WIDE + 0x201c), 1);
        guest.memory.write(WIDE + 0x2018, &0x41u32.to_le_bytes());
        assert_eq!(guest.read(WIDE + 0x2018), 0x41);
        assert_eq!(guest.read(WIDE + 0x3000), 0);
        guest.memory.write(WIDE + 0x3000, &1u32.to_le_bytes());
        assert!(guest.device.accesses.lock().is_empty());
    }

    #[test]
    fn an_access_that_begins_before_the_msix_table_ends_there() {
        let guest = Guest::new();
        let mut data = [0; 8];
        guest.memory.read(WIDE + 0x1ffc, &mut data);
        assert_eq!(data, [0xfc, 0xfc, 0xfc, 0xfc, 0xff, 0xff, 0xff, 0xff]);
        guest.memory.write(WIDE + 0x1ffe, &[7; 8]);
        guest.memory.write(WIDE + 0x2fff, &[8; 4]);
        let written = std::mem::take(&mut *guest.device.accesses.lock());
        let expected = [(0, 0x1ffe, vec![7; 2]), (0, 0x2fff, vec![8])];
        assert_eq!(written, expected);
    }

    #[test]
    fn bars_are_where_the_guest_moved_them() {
        let mut guest = Guest::new();
        guest.set_config(0x10, 0x1000_0000);
        guest.set_config(0x14, 0x90);
        assert_eq!(guest.read(WIDE + 0x14), u32::MAX);
        assert_eq!(guest.read(0x90_1000_0014), 0x1414_1414);
        guest.set_config(0x04, 0);
        assert_eq!(guest.read(0x90_1000_0014), u32::MAX);
        guest.set_config(0x04, 6);
        assert_eq!(guest.read(0x90_1000_0014), 0x1414_1414);
    }

    #[test]
    fn the_device_raises_vectors_while_the_guest_has_them_enabled() {
        let mut guest = Guest::new();
        let given = |guest: &Guest| *guest.device.vectors.lock();
        assert_eq!(
            (given(&guest), guest.controller.is_connected(0)),
            (0, false)
        );
        guest.set_config(CONTROL, 0xc000_0000);
        assert_eq!(
            (given(&guest), guest.controller.is_connected(0)),
            (3, false)
        );
        guest
            .memory
            .write(WIDE + 0x2000, &0xfee0_0000u64.to_le_bytes());
        guest.memory.write(WIDE + 0x200c, &0u32.to_le_bytes());
        guest.set_config(CONTROL, 0x8000_0000);
        assert_eq!(
            [0, 1].map(|at| guest.controller.is_connected(at)),
            [true, false]
        );
        guest.set_config(CONTROL, 0);
        assert_eq!(
            (given(&guest), guest.controller.is_connected(0)),
            (0, false)
        );
    }
}
