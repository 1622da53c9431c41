//! Configuration mechanism 1 (ports 0xcf8 to 0xcff) and the dispatch of memory accesses.

use std::fmt::Debug;
use std::ops::RangeInclusive;

use super::config_space::{Bar, ConfigSpace, Identity};

/// The ports of configuration mechanism 1.
pub const CONFIG_PORTS: RangeInclusive<u16> = 0xcf8..=0xcff;
const ADDRESS: u16 = 0xcf8;
const DATA: u16 = 0xcfc;
const ENABLE: u32 = 1 << 31;

/// A function on the bus.
pub trait PciFunction: Debug + Send {
    /// Reads configuration space.
    fn read_config(&self, offset: usize, data: &mut [u8]);
    /// Writes configuration space.
    fn write_config(&mut self, offset: usize, data: &[u8]);
    /// Where the BAR is, if it decodes.
    fn bar(&self) -> Option<Bar>;
    /// Reads the BAR.
    fn read_bar(&mut self, offset: u64, data: &mut [u8]);
    /// Writes the BAR.
    fn write_bar(&mut self, offset: u64, data: &[u8]);
}

/// Bus 0: device 0 is the host bridge, without which Linux finds no bus.
#[derive(Debug)]
pub struct PciBus {
    address: u32,
    bridge: ConfigSpace,
    functions: Vec<Box<dyn PciFunction>>,
}

impl PciBus {
    /// A bus with these functions, which become devices 1, 2, …
    pub fn new(functions: Vec<Box<dyn PciFunction>>) -> Self {
        // Intel 440FX: the host bridge that every guest knows.
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
            functions,
        }
    }

    /// A read of one of [`CONFIG_PORTS`].
    pub fn read_port(&self, port: u16, data: &mut [u8]) {
        data.fill(0xff);
        if port < DATA {
            if port == ADDRESS && data.len() == 4 {
                data.copy_from_slice(&self.address.to_le_bytes());
            }
            return;
        }
        let Some((device, offset)) = self.selected(port, data.len()) else {
            return;
        };
        match device.checked_sub(1) {
            None => self.bridge.read(offset, data),
            Some(index) => {
                if let Some(function) = self.functions.get(index) {
                    function.read_config(offset, data);
                }
            }
        }
    }

    /// A write to one of [`CONFIG_PORTS`].
    pub fn write_port(&mut self, port: u16, data: &[u8]) {
        if port < DATA {
            if let (ADDRESS, Ok(bytes)) = (port, data.try_into()) {
                self.address = u32::from_le_bytes(bytes);
            }
            return;
        }
        let Some((device, offset)) = self.selected(port, data.len()) else {
            return;
        };
        match device.checked_sub(1) {
            None => self.bridge.write(offset, data),
            Some(index) => {
                if let Some(function) = self.functions.get_mut(index) {
                    function.write_config(offset, data);
                }
            }
        }
    }

    /// A read of guest physical memory that no memslot backs; `false` if no BAR is there.
    pub fn read_memory(&mut self, address: u64, data: &mut [u8]) -> bool {
        let Some((function, offset)) = self.decode(address, data.len()) else {
            return false;
        };
        function.read_bar(offset, data);
        true
    }

    /// A write; `false` if no BAR is there.
    pub fn write_memory(&mut self, address: u64, data: &[u8]) -> bool {
        let Some((function, offset)) = self.decode(address, data.len()) else {
            return false;
        };
        function.write_bar(offset, data);
        true
    }

    fn decode(
        &mut self,
        address: u64,
        len: usize,
    ) -> Option<(&mut (dyn PciFunction + 'static), u64)> {
        let end = address.checked_add(len as u64)?;
        self.functions.iter_mut().find_map(|function| {
            let bar = function.bar()?;
            let start = u64::from(bar.address);
            (address >= start && end <= start + u64::from(bar.size))
                .then(|| (function.as_mut(), address - start))
        })
    }

    /// The device and offset that the address register selects for an access to `port`.
    fn selected(&self, port: u16, len: usize) -> Option<(usize, usize)> {
        let low = usize::from(port - DATA);
        let [register, function, bus, _] = self.address.to_le_bytes();
        // Device and function share a byte; there are no functions but 0, and only bus 0.
        let present = self.address & ENABLE != 0 && bus == 0 && function & 7 == 0;
        (present && low + len <= 4).then(|| {
            (
                usize::from(function >> 3),
                usize::from(register & 0xfc) + low,
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug)]
    struct Probe {
        config: ConfigSpace,
        last: (u64, Vec<u8>),
    }

    impl PciFunction for Probe {
        fn read_config(&self, offset: usize, data: &mut [u8]) {
            self.config.read(offset, data);
        }
        fn write_config(&mut self, offset: usize, data: &[u8]) {
            self.config.write(offset, data);
        }
        fn bar(&self) -> Option<Bar> {
            self.config.bar()
        }
        fn read_bar(&mut self, offset: u64, data: &mut [u8]) {
            data.fill(offset.to_le_bytes()[0]);
        }
        fn write_bar(&mut self, offset: u64, data: &[u8]) {
            self.last = (offset, data.to_vec());
        }
    }

    fn bus() -> PciBus {
        let identity = Identity {
            vendor: 0x1af4,
            device: 0x1053,
            revision: 1,
            class: [7, 0x80, 0],
            subsystem: 0,
        };
        let bar = Bar {
            address: 0xc000_0000,
            size: 0x1000,
        };
        PciBus::new(vec![Box::new(Probe {
            config: ConfigSpace::new(identity, Some(bar)),
            last: (0, Vec::new()),
        })])
    }

    fn config(bus: &mut PciBus, device: u32, register: u32) -> u32 {
        bus.write_port(ADDRESS, &(ENABLE | device << 11 | register).to_le_bytes());
        let mut data = [0; 4];
        bus.read_port(DATA, &mut data);
        u32::from_le_bytes(data)
    }

    #[test]
    fn bridge_device_and_nothing_are_told_apart() {
        let mut bus = bus();
        assert_eq!(config(&mut bus, 0, 0), 0x1237_8086);
        assert_eq!(config(&mut bus, 1, 0), 0x1053_1af4);
        assert_eq!(config(&mut bus, 2, 0), u32::MAX);
        // Linux looks for a bridge by its class at offset 10.
        assert_eq!(config(&mut bus, 0, 8) >> 16, 0x0600);
    }

    #[test]
    fn memory_accesses_reach_the_bar_and_only_it() {
        let mut bus = bus();
        let mut data = [0; 2];
        assert!(bus.read_memory(0xc000_0010, &mut data));
        assert_eq!(data, [0x10; 2]);
        assert!(!bus.read_memory(0xc000_0fff, &mut data));
        assert!(!bus.write_memory(u64::MAX, &data));
    }

    proptest! {
        #[test]
        fn no_port_access_panics(
            accesses in proptest::collection::vec((CONFIG_PORTS, proptest::collection::vec(any::<u8>(), 0..9), any::<bool>()), 0..100)
        ) {
            let mut bus = bus();
            for (port, mut data, write) in accesses {
                if write {
                    bus.write_port(port, &data);
                } else {
                    bus.read_port(port, &mut data);
                }
            }
        }
    }
}
