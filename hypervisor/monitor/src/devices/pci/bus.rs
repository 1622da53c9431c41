//! Implements configuration mechanism 1 (ports 0xcf8 to 0xcff) of bus 0, and places the functions' BARs on the memory
//! bus.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use wormhole_lock::Mutex;

use super::config_space::{ConfigSpace, Identity};
use crate::bus::{Bus, BusDevice, Effect, SharedDevice};
use crate::devices::virtio::VirtioPciState;
use crate::memory::Range;

/// First port of configuration mechanism 1.
pub const CONFIG_PORTS: u16 = 0xcf8;
/// Number of ports of configuration mechanism 1.
pub const CONFIG_PORTS_LEN: u16 = 8;
/// Maximum number of functions beside the host bridge, one for each device number.
pub const MAX_FUNCTIONS: usize = 31;
/// Offset of the data register from the address register.
const DATA: u64 = 4;
const ENABLE: u32 = 1 << 31;

/// The bus has no free device number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the PCI bus has room for {MAX_FUNCTIONS} devices and no more")]
pub struct PciFull;

/// A function on the bus. As a [`BusDevice`] it handles accesses to its BARs that have no device of their own.
pub trait PciFunction: BusDevice {
    /// Reads configuration space.
    fn read_config(&self, offset: usize, data: &mut [u8]);
    /// Writes configuration space.
    fn write_config(&mut self, offset: usize, data: &[u8]);
    /// Returns the ranges of the BARs at their current addresses, if memory decoding is enabled, with their devices.
    fn ranges(&self) -> Vec<(Range, Option<SharedDevice>)>;
    /// Returns the state, if it can be saved. Nothing changes it meanwhile.
    fn save(&self) -> Option<VirtioPciState> {
        None
    }
    /// Takes a state, after a reset.
    ///
    /// # Errors
    /// The reason for which the state does not fit.
    fn restore(&mut self, _: &VirtioPciState) -> Result<(), &'static str> {
        Err("it is a device of the host")
    }
    /// Serves the driver that the restored state has, if it has one.
    ///
    /// # Errors
    /// The reason why the driver cannot be served.
    fn resume(&mut self) -> Result<(), &'static str> {
        Ok(())
    }
}

/// State of the bus and its functions.
#[derive(Debug, Serialize, Deserialize)]
pub struct PciBusState {
    address: u32,
    bridge: Vec<u8>,
    functions: Vec<VirtioPciState>,
}

/// A state does not fit the device that it is for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the snapshot does not fit the guest's {device}: {why}")]
pub struct Misfit {
    /// The device.
    pub device: String,
    /// The reason.
    pub why: &'static str,
}

#[derive(Debug)]
struct Slot {
    function: Arc<Mutex<dyn PciFunction>>,
    /// The function's ranges that are currently claimed on the memory bus.
    placed: Vec<Range>,
}

/// Bus 0. Device 0 is the host bridge, which Linux needs to detect the bus. As a [`BusDevice`] the bus
/// handles accesses to the ports of mechanism 1.
#[derive(Debug)]
pub struct PciBus {
    address: u32,
    bridge: ConfigSpace,
    slots: Vec<Slot>,
    memory: Arc<Bus>,
}

impl PciBus {
    /// Creates a bus without functions, whose BARs are placed in `memory`.
    pub fn new(memory: Arc<Bus>) -> Self {
        // Intel 440FX, a host bridge that every guest supports.
        let bridge = ConfigSpace::new(
            Identity {
                vendor: 0x8086,
                device: 0x1237,
                revision: 2,
                class: [6, 0, 0],
                subsystem: 0,
            },
            None,
        );
        Self {
            address: 0,
            bridge,
            slots: Vec::new(),
            memory,
        }
    }

    /// Adds a function with the next device number, from 1 on.
    ///
    /// # Errors
    /// All [`MAX_FUNCTIONS`] device numbers are taken.
    pub fn add(&mut self, function: Arc<Mutex<dyn PciFunction>>) -> Result<(), PciFull> {
        if self.slots.len() == MAX_FUNCTIONS {
            return Err(PciFull);
        }
        self.slots.push(Slot {
            function,
            placed: Vec::new(),
        });
        self.place_bars();
        Ok(())
    }

    /// Moves the ranges on the memory bus to the current addresses of the BARs. A BAR that overlaps another
    /// range is not reachable until one of the two moves.
    fn place_bars(&mut self) {
        let wanted: Vec<_> = self
            .slots
            .iter()
            .map(|slot| slot.function.lock().ranges())
            .collect();
        for (slot, wanted) in self.slots.iter_mut().zip(&wanted) {
            slot.placed.retain(|old| {
                let stays = wanted.iter().any(|(range, _)| range == old);
                if !stays {
                    self.memory.remove(old.start);
                }
                stays
            });
        }
        for (slot, wanted) in self.slots.iter_mut().zip(wanted) {
            for (range, device) in wanted {
                if slot.placed.contains(&range) {
                    continue;
                }
                let device = device.unwrap_or_else(|| Arc::clone(&slot.function) as SharedDevice);
                match self.memory.insert(range.start, range.len, device) {
                    Ok(()) => slot.placed.push(range),
                    Err(error) => {
                        tracing::debug!(%error, "the guest placed a BAR where it cannot be");
                    }
                }
            }
        }
    }

    /// Returns the state of the bus and its functions.
    pub fn save(&self) -> PciBusState {
        let functions = self.slots.iter();
        PciBusState {
            address: self.address,
            bridge: self.bridge.bytes().to_vec(),
            functions: functions
                .filter_map(|slot| slot.function.lock().save())
                .collect(),
        }
    }

    /// Takes a state. The functions must be those that it was saved of.
    ///
    /// # Errors
    /// A state does not fit. Others may have been taken by then.
    pub fn restore(&mut self, state: &PciBusState) -> Result<(), Misfit> {
        if state.functions.len() != self.slots.len() {
            return Err(misfit("PCI bus", "it has another number of devices"));
        }
        if !self.bridge.restore(&state.bridge) {
            return Err(misfit("PCI bridge", "it is another one"));
        }
        self.address = state.address;
        for (number, (slot, saved)) in (1..).zip(self.slots.iter().zip(&state.functions)) {
            let restored = slot.function.lock().restore(saved);
            restored.map_err(|why| misfit(&format!("PCI device {number}"), why))?;
        }
        self.place_bars();
        Ok(())
    }

    /// Lets the restored functions serve their drivers.
    ///
    /// # Errors
    /// A function cannot serve its driver.
    pub fn resume(&mut self) -> Result<(), Misfit> {
        for (number, slot) in (1..).zip(&self.slots) {
            let resumed = slot.function.lock().resume();
            resumed.map_err(|why| misfit(&format!("PCI device {number}"), why))?;
        }
        Ok(())
    }

    /// Returns the device and offset that the address register selects for an access to `offset` of the
    /// ports.
    fn selected(&self, offset: u64, len: usize) -> Option<(usize, usize)> {
        let low = usize::try_from(offset.checked_sub(DATA)?).ok()?;
        let [register, function, bus, _] = self.address.to_le_bytes();
        // Device and function share a byte. Only function 0 and bus 0 exist.
        let present = self.address & ENABLE != 0 && bus == 0 && function & 7 == 0;
        (present && low + len <= 4).then(|| {
            (
                usize::from(function >> 3),
                usize::from(register & 0xfc) + low,
            )
        })
    }
}

fn misfit(device: &str, why: &'static str) -> Misfit {
    Misfit {
        device: device.to_owned(),
        why,
    }
}

impl BusDevice for PciBus {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        if offset == 0 && data.len() == 4 {
            data.copy_from_slice(&self.address.to_le_bytes());
            return;
        }
        let Some((device, offset)) = self.selected(offset, data.len()) else {
            return;
        };
        match device.checked_sub(1) {
            None => self.bridge.read(offset, data),
            Some(index) => {
                if let Some(slot) = self.slots.get(index) {
                    slot.function.lock().read_config(offset, data);
                }
            }
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Effect {
        if let (0, Ok(bytes)) = (offset, data.try_into()) {
            self.address = u32::from_le_bytes(bytes);
        }
        let Some((device, offset)) = self.selected(offset, data.len()) else {
            return Effect::Continue;
        };
        match device.checked_sub(1) {
            None => self.bridge.write(offset, data),
            Some(index) => {
                if let Some(slot) = self.slots.get(index) {
                    slot.function.lock().write_config(offset, data);
                    self.place_bars();
                }
            }
        }
        Effect::Continue
    }
}

#[cfg(test)]
mod tests {
    use super::super::config_space::Bar;
    use super::*;
    use crate::bus::Buses;
    use proptest::prelude::*;

    const BAR: u64 = 0xc000_0000;
    const COMMAND: u32 = 0x04;
    const BAR_REGISTER: u32 = 0x10;

    #[derive(Debug)]
    struct Probe(ConfigSpace);

    impl BusDevice for Probe {
        fn read(&mut self, offset: u64, data: &mut [u8]) {
            data.fill(offset.to_le_bytes()[0]);
        }
        fn write(&mut self, _: u64, _: &[u8]) -> Effect {
            Effect::Continue
        }
    }

    impl PciFunction for Probe {
        fn read_config(&self, offset: usize, data: &mut [u8]) {
            self.0.read(offset, data);
        }
        fn write_config(&mut self, offset: usize, data: &[u8]) {
            self.0.write(offset, data);
        }
        fn ranges(&self) -> Vec<(Range, Option<SharedDevice>)> {
            let range = self.0.bar().map(Bar::range);
            range.into_iter().map(|range| (range, None)).collect()
        }
        fn save(&self) -> Option<VirtioPciState> {
            Some(VirtioPciState::of_config(self.0.bytes()))
        }
        fn restore(&mut self, state: &VirtioPciState) -> Result<(), &'static str> {
            self.0.restore(&state.config).then_some(()).ok_or("another")
        }
        fn resume(&mut self) -> Result<(), &'static str> {
            Ok(())
        }
    }

    fn probe(address: u32) -> Arc<Mutex<dyn PciFunction>> {
        let identity = Identity {
            vendor: 0x1af4,
            device: 0x1053,
            revision: 1,
            class: [7, 0x80, 0],
            subsystem: 0,
        };
        let bar = Bar {
            address,
            size: 0x1000,
        };
        Arc::new(Mutex::new(Probe(ConfigSpace::new(identity, Some(bar)))))
    }

    /// Creates a bus with functions whose BARs are adjacent, from [`BAR`] on.
    fn bus(functions: u32) -> (Arc<Bus>, PciBus) {
        let memory = Arc::new(Bus::default());
        let mut bus = PciBus::new(Arc::clone(&memory));
        for index in 0..functions {
            bus.add(probe(0xc000_0000 + 0x1000 * index)).expect("room");
        }
        (memory, bus)
    }

    fn select(bus: &mut PciBus, device: u32, register: u32) {
        bus.write(0, &(ENABLE | device << 11 | register).to_le_bytes());
    }

    fn config(bus: &mut PciBus, device: u32, register: u32) -> u32 {
        select(bus, device, register);
        let mut data = [0; 4];
        bus.read(DATA, &mut data);
        u32::from_le_bytes(data)
    }

    fn set_config(bus: &mut PciBus, device: u32, register: u32, value: u32) {
        select(bus, device, register);
        bus.write(DATA, &value.to_le_bytes());
    }

    fn read(memory: &Bus, address: u64) -> u8 {
        let mut data = [0];
        memory.read(address, &mut data);
        data[0]
    }

    #[test]
    fn bridge_device_and_nothing_are_distinguished() {
        let (_, mut bus) = bus(1);
        assert_eq!(config(&mut bus, 0, 0), 0x1237_8086);
        assert_eq!(config(&mut bus, 1, 0), 0x1053_1af4);
        assert_eq!(config(&mut bus, 2, 0), u32::MAX);
        // Linux looks for a bridge by its class at offset 10.
        assert_eq!(config(&mut bus, 0, 8) >> 16, 0x0600);
    }

    #[test]
    fn memory_accesses_reach_the_bar_and_only_it() {
        let (memory, _bus) = bus(1);
        assert_eq!(read(&memory, BAR + 0x10), 0x10);
        assert_eq!(read(&memory, BAR + 0x1000), 0xff);
        assert_eq!(read(&memory, BAR - 1), 0xff);
    }

    #[test]
    fn a_bar_is_where_the_guest_moved_it_and_nowhere_without_decoding() {
        let (memory, mut bus) = bus(1);
        set_config(&mut bus, 1, BAR_REGISTER, 0xd000_0000);
        assert_eq!(read(&memory, BAR + 0x10), 0xff);
        assert_eq!(read(&memory, 0xd000_0010), 0x10);
        set_config(&mut bus, 1, COMMAND, 0);
        assert_eq!(read(&memory, 0xd000_0010), 0xff);
        set_config(&mut bus, 1, COMMAND, 2);
        assert_eq!(read(&memory, 0xd000_0010), 0x10);
    }

    #[test]
    fn a_bar_that_was_covered_is_reached_when_the_other_one_leaves() {
        let (memory, mut bus) = bus(2);
        set_config(&mut bus, 1, BAR_REGISTER, 0xc000_1000);
        assert_eq!(read(&memory, BAR), 0xff);
        set_config(&mut bus, 2, BAR_REGISTER, 0xe000_0000);
        assert_eq!(read(&memory, 0xc000_1010), 0x10);
        assert_eq!(read(&memory, 0xe000_0010), 0x10);
    }

    #[test]
    fn functions_end_with_the_buses() {
        let buses = Buses::default();
        let mut pci = PciBus::new(Arc::clone(&buses.memory));
        let function = probe(0xc000_0000);
        let alive = Arc::downgrade(&function);
        pci.add(function).expect("room");
        let (start, len) = (CONFIG_PORTS.into(), CONFIG_PORTS_LEN.into());
        let pci = Arc::new(Mutex::new(pci));
        buses.ports.insert(start, len, pci).expect("free");
        drop(buses);
        assert!(alive.upgrade().is_none());
    }

    #[test]
    fn a_restored_bus_has_its_bars_where_the_guest_moved_them() {
        let (_, mut saved) = bus(2);
        set_config(&mut saved, 1, BAR_REGISTER, 0xd000_0000);
        select(&mut saved, 2, 0);
        let state = saved.save();
        let (memory, mut restored) = bus(2);
        restored.restore(&state).expect("it fits");
        assert_eq!(
            (read(&memory, BAR + 0x10), read(&memory, 0xd000_0010)),
            (0xff, 0x10)
        );
        // The selected register is the one that the guest selected.
        let mut data = [0; 4];
        restored.read(DATA, &mut data);
        assert_eq!(u32::from_le_bytes(data), 0x1053_1af4);
    }

    #[test]
    fn a_state_of_other_functions_is_refused_by_name() {
        let refusal = |functions, change: fn(&mut PciBusState)| {
            let (_, saved) = bus(2);
            let mut state = saved.save();
            change(&mut state);
            let (_, mut restored) = bus(functions);
            let misfit = restored.restore(&state).expect_err("another");
            misfit.to_string()
        };
        assert!(refusal(1, |_| {}).contains("number of devices"));
        assert!(refusal(2, |state| state.bridge[0] ^= 1).contains("PCI bridge"));
        let other = |state: &mut PciBusState| state.functions[1].config[2] ^= 1;
        assert!(refusal(2, other).contains("PCI device 2"));
    }

    #[test]
    fn a_full_bus_takes_no_function() {
        let (_, mut bus) = bus(31);
        assert_eq!(bus.add(probe(0xd000_0000)), Err(PciFull));
        assert_eq!(config(&mut bus, 31, 0), 0x1053_1af4);
    }

    proptest! {
        #[test]
        fn no_port_access_panics(
            accesses in proptest::collection::vec((0..u64::from(CONFIG_PORTS_LEN), proptest::collection::vec(any::<u8>(), 0..9), any::<bool>()), 0..100)
        ) {
            let (_, mut bus) = bus(2);
            for (port, mut data, write) in accesses {
                if write {
                    bus.write(port, &data);
                } else {
                    bus.read(port, &mut data);
                }
            }
        }

        /// After arbitrary moves of two BARs, an address reaches a device exactly if a BAR lies there.
        #[test]
        fn bars_are_found_where_they_lie_after_any_moves(
            moves in proptest::collection::vec((1u32..3, 0u32..4, any::<bool>()), 0..30)
        ) {
            let (memory, mut bus) = bus(2);
            for (device, page, decode) in moves {
                set_config(&mut bus, device, BAR_REGISTER, 0xc000_0000 + 0x1000 * page);
                set_config(&mut bus, device, COMMAND, u32::from(decode) << 1);
            }
            let bars: Vec<_> = bus.slots.iter().flat_map(|slot| slot.function.lock().ranges()).collect();
            for page in 0..4 {
                let address = BAR + 0x1000 * page;
                let there = bars.iter().any(|(range, _)| range.start == address);
                prop_assert_eq!(read(&memory, address + 0x10) == 0x10, there);
            }
        }
    }
}
