//! A device for tests, and tests of configuration space.

use proptest::prelude::*;
use vfio_ioctls::VfioError;
use vmm_sys_util::eventfd::EventFd;
use wormhole_lock::Mutex;

use super::*;

/// A device with a configuration space and nothing else. It takes all that is written.
#[derive(Debug)]
pub(in super::super) struct Registers {
    pub config: Mutex<[u8; SIZE]>,
    pub accesses: Mutex<Vec<(u32, u64, Vec<u8>)>>,
    pub vectors: Mutex<usize>,
}

impl Hardware for Registers {
    fn read(&self, region: u32, offset: u64, data: &mut [u8]) {
        match usize::try_from(offset) {
            Ok(at) if region == VFIO_PCI_CONFIG_REGION_INDEX => {
                data.copy_from_slice(&self.config.lock()[at..at + data.len()]);
            }
            _ => data.fill(offset.to_le_bytes()[0]),
        }
    }

    fn write(&self, region: u32, offset: u64, data: &[u8]) {
        if region == VFIO_PCI_CONFIG_REGION_INDEX {
            let at = usize::try_from(offset).expect("in the space");
            self.config.lock()[at..at + data.len()].copy_from_slice(data);
        }
        self.accesses.lock().push((region, offset, data.to_vec()));
    }

    fn set_vectors(&self, events: Vec<&EventFd>) -> Result<(), VfioError> {
        *self.vectors.lock() = events.len();
        Ok(())
    }

    fn reset(&self) {}
}

const POWER: usize = 0x40;
const MSI: usize = 0x50;
const OWN: usize = 0x60;
const MSIX_AT: usize = 0x70;
const EXPRESS_AT: usize = 0x80;

/// A function with a BAR of 64 bits and 16 KiB, one of 32 bits and 4 KiB, one of ports, and five capabilities.
pub(in super::super) fn function() -> Registers {
    let mut config = [0xa5; SIZE];
    config[0..4].copy_from_slice(&[0x36, 0x1b, 0x10, 0]);
    config[COMMAND..8].copy_from_slice(&[0, 0, STATUS_CAPABILITIES, 0]);
    config[HEADER_TYPE] = 0x80;
    config[FIRST_BAR..FIRST_BAR + 24].fill(0);
    config[FIRST_BAR] = 0xc;
    config[FIRST_BAR + 12] = 1;
    config[CAPABILITIES] = 0x40;
    for (at, id, next) in [
        (POWER, 1, MSI),
        (MSI, 5, OWN),
        (OWN, VENDOR, MSIX_AT),
        (MSIX_AT, MSIX, EXPRESS_AT),
        (EXPRESS_AT, EXPRESS, 0),
    ] {
        config[at] = id;
        config[at + 1] = next.to_le_bytes()[0];
    }
    config[OWN + 2] = 8;
    // Three vectors, table and pending bits in BAR 0.
    config[MSIX_AT + 2..MSIX_AT + 12].copy_from_slice(&[2, 0, 0, 0x20, 0, 0, 0, 0x30, 0, 0]);
    config[EXPRESS_AT + 2] = 2;
    Registers {
        config: Mutex::new(config),
        accesses: Mutex::default(),
        vectors: Mutex::default(),
    }
}

pub(in super::super) fn size_of(region: u32) -> u64 {
    match region {
        0 => 16 << 10,
        2 => 4 << 10,
        3 => 256,
        _ => 0,
    }
}

fn dword(config: &Config, device: &Registers, offset: usize) -> u32 {
    let mut data = [0; 4];
    config.read(device, offset, &mut data);
    u32::from_le_bytes(data)
}

#[test]
fn the_guest_sees_the_devices_identity_and_three_capabilities() {
    let device = function();
    let config = Config::new(&device, size_of).expect("a function");
    assert_eq!(dword(&config, &device, 0), 0x0010_1b36);
    let read = |at| dword(&config, &device, at & !3).to_le_bytes()[at & 3];
    assert_eq!(read(HEADER_TYPE), 0, "one function");
    assert_eq!(read(INTERRUPT_PIN), 0);
    assert_eq!(dword(&config, &device, ROM), 0);
    let mut seen = Vec::new();
    let mut at = usize::from(read(CAPABILITIES));
    while at != 0 {
        seen.push((at, read(at)));
        at = usize::from(read(at + 1));
    }
    assert_eq!(
        seen,
        [(OWN, VENDOR), (MSIX_AT, MSIX), (EXPRESS_AT, EXPRESS)]
    );
    // Of hidden ones no byte shows.
    assert_eq!(
        [POWER, MSI, MSI + 4].map(|at| dword(&config, &device, at)),
        [0; 3]
    );
    assert_eq!(read(OWN + 7), 0xa5);
    assert_eq!(read(OWN + 8), 0, "behind the capability");
    let msix = config.msix();
    assert_eq!(
        (msix.vectors, msix.table.bar, msix.table.offset),
        (3, 0, 0x2000)
    );
    assert_eq!(msix.pending.offset, 0x3000);
}

#[test]
fn a_guest_finds_sizes_and_moves_bars_and_the_device_hears_nothing_of_it() {
    let device = function();
    let mut config = Config::new(&device, size_of).expect("a function");
    let bars = config.bars().to_vec();
    let bar = |index, size, wide| BarRegister { index, size, wide };
    assert_eq!(bars, [bar(0, 16 << 10, true), bar(2, 4 << 10, false)]);
    config.set_address(bars[0], 0x80_0000_4000);
    config.set_address(bars[1], 0xc000_1000);
    device.accesses.lock().clear();
    for at in (FIRST_BAR..FIRST_BAR + 24).step_by(4) {
        config.write(&device, at, &u32::MAX.to_le_bytes());
    }
    let sizes = [0, 1, 2, 3, 4, 5].map(|index| dword(&config, &device, FIRST_BAR + 4 * index));
    assert_eq!(sizes, [0xffff_c00c, u32::MAX, 0xffff_f000, 0, 0, 0]);
    config.write(&device, FIRST_BAR, &0x9000_4000u32.to_le_bytes());
    config.write(&device, FIRST_BAR + 4, &0x12u32.to_le_bytes());
    assert_eq!(config.address(bars[0]), 0x12_9000_4000);
    assert!(device.accesses.lock().is_empty());
}

#[test]
fn the_device_decodes_memory_and_has_no_legacy_interrupt_whatever_the_guest_writes() {
    let device = function();
    let mut config = Config::new(&device, size_of).expect("a function");
    let at_device = || {
        let config = device.config.lock();
        u16::from_le_bytes([config[COMMAND], config[COMMAND + 1]])
    };
    assert_eq!(at_device(), COMMAND_MEMORY | COMMAND_NO_INTX);
    assert!(config.decodes());
    config.write(&device, COMMAND, &COMMAND_MASTER.to_le_bytes());
    assert!(!config.decodes());
    assert_eq!(
        at_device(),
        COMMAND_MEMORY | COMMAND_MASTER | COMMAND_NO_INTX
    );
    config.write(&device, COMMAND, &[0xff]);
    assert_eq!(dword(&config, &device, COMMAND) & 0xffff, 0x46);
    config.write(&device, COMMAND, &0u16.to_le_bytes());
    assert_eq!(at_device(), COMMAND_MEMORY | COMMAND_NO_INTX, "no DMA");
}

#[test]
fn message_control_is_the_monitors_and_some_of_device_control_the_devices() {
    let device = function();
    let mut config = Config::new(&device, size_of).expect("a function");
    config.write(&device, MSIX_AT + 2, &[0xff, 0xff]);
    assert_eq!(config.msix_control(), 0xc0);
    assert_eq!(dword(&config, &device, MSIX_AT) >> 16, 0xc002);
    assert_eq!(device.config.lock()[MSIX_AT + 2..MSIX_AT + 4], [2, 0]);
    device.config.lock()[EXPRESS_AT + 8..EXPRESS_AT + 10].fill(0);
    config.write(&device, EXPRESS_AT + 8, &[0xff, 0xff]);
    // Neither the reset nor reports of errors.
    assert_eq!(
        device.config.lock()[EXPRESS_AT + 8..EXPRESS_AT + 10],
        [0xf0, 0x79]
    );
}

#[test]
fn the_device_reports_no_errors_to_the_host_and_its_reset_and_its_vendors_registers_are_hidden() {
    let device = function();
    device.config.lock()[EXPRESS_AT + 7] = 0xff;
    let mut config = Config::new(&device, size_of).expect("a function");
    let parity_and_system = 1u16 << 6 | 1 << 8;
    config.write(
        &device,
        COMMAND,
        &(parity_and_system | COMMAND_MASTER).to_le_bytes(),
    );
    let at_device = device.config.lock()[COMMAND..COMMAND + 2].to_vec();
    let expected = COMMAND_MEMORY | COMMAND_MASTER | COMMAND_NO_INTX;
    assert_eq!(at_device, expected.to_le_bytes());
    assert_eq!(dword(&config, &device, EXPRESS_AT + 4) >> 24, 0xef);
    config.write(&device, OWN + 4, &[0; 4]);
    assert_eq!(device.config.lock()[OWN + 4..OWN + 8], [0xa5; 4]);
}

#[test]
fn bridges_and_devices_without_msix_are_refused() {
    let refused = |change: fn(&mut [u8; SIZE])| {
        let device = function();
        change(&mut device.config.lock());
        Config::new(&device, size_of).expect_err("it is refused")
    };
    assert!(refused(|config| config[HEADER_TYPE] = 1).contains("bridge"));
    assert!(refused(|config| config[STATUS] = 0).contains("MSI-X"));
    assert!(refused(|config| config[MSIX_AT] = 5).contains("MSI-X"));
    let device = function();
    assert!(Config::new(&device, |_| 3 << 12).is_err());
}

#[test]
fn a_list_of_capabilities_that_is_a_ring_ends() {
    let device = function();
    device.config.lock()[EXPRESS_AT + 1] = 0x40;
    Config::new(&device, size_of).expect("a function");
}

proptest! {
    #[test]
    fn no_access_panics_or_changes_more_than_it_may(
        accesses in proptest::collection::vec((0usize..300, proptest::collection::vec(any::<u8>(), 0..5)), 0..50)
    ) {
        let device = function();
        let before = *device.config.lock();
        let mut config = Config::new(&device, size_of).expect("a function");
        for (offset, data) in accesses {
            config.write(&device, offset, &data);
            let mut back = vec![0; data.len()];
            config.read(&device, offset, &mut back);
        }
        let after = *device.config.lock();
        for at in 0..SIZE {
            let may = match at {
                COMMAND => 0x46,
                5 => 4,
                6 | 7 => 0xff,
                _ if at == EXPRESS_AT + EXPRESS_CONTROL => 0xf0,
                _ if at == EXPRESS_AT + EXPRESS_CONTROL + 1 => 0x79,
                _ if at == EXPRESS_AT + EXPRESS_CONTROL_2 => 0x1f,
                _ => 0,
            };
            prop_assert_eq!((before[at] ^ after[at]) & !may, 0, "{:#x}", at);
        }
    }

    /// The monitor reads the space of any device without a panic.
    #[test]
    fn no_device_panics(bytes in proptest::collection::vec(any::<u8>(), SIZE)) {
        let device = function();
        device.config.lock().copy_from_slice(&bytes);
        device.config.lock()[HEADER_TYPE] = 0;
        device.config.lock()[STATUS] |= STATUS_CAPABILITIES;
        let _ = Config::new(&device, size_of);
    }
}
