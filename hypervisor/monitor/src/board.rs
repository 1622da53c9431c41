//! What a Linux guest's port and memory accesses reach.

use std::sync::{Mutex, MutexGuard, PoisonError};

use vm_superio::Serial;
use vm_superio::serial::NoEvents;

use crate::devices::pci::{CONFIG_PORTS, PciBus};
use crate::devices::power::{self, Effect, PowerPorts};
use crate::devices::serial::{self, IrqTrigger, Tee};
use crate::exit_accounting::{self, ExitAccounting};
use crate::vcpu::{Board, PortEffect};

/// What a Linux guest's accesses reach.
#[derive(Debug)]
pub(crate) struct LinuxBoard {
    serial: Mutex<Serial<IrqTrigger, NoEvents, Tee>>,
    pci: Mutex<PciBus>,
    power: Mutex<PowerPorts>,
    status: Mutex<Option<u32>>,
    accounts: ExitAccounting,
}

impl LinuxBoard {
    pub fn new(
        serial: Serial<IrqTrigger, NoEvents, Tee>,
        pci: PciBus,
        accounts: ExitAccounting,
    ) -> Self {
        Self {
            serial: Mutex::new(serial),
            pci: Mutex::new(pci),
            power: Mutex::default(),
            status: Mutex::new(None),
            accounts,
        }
    }

    /// What the guest wrote to the exit-status port last.
    pub fn exit_status(&self) -> Option<u32> {
        *self.lock_status()
    }

    /// Exits by what the guest said it was doing.
    pub fn exit_accounts(&self) -> [u64; exit_accounting::COUNT] {
        self.accounts.read()
    }

    fn lock_power(&self) -> MutexGuard<'_, PowerPorts> {
        self.power.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_status(&self) -> MutexGuard<'_, Option<u32>> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_pci(&self) -> MutexGuard<'_, PciBus> {
        self.pci.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_serial(&self) -> MutexGuard<'_, Serial<IrqTrigger, NoEvents, Tee>> {
        self.serial.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The register of COM1 behind a port.
fn serial_register(port: u16) -> Option<u8> {
    port.checked_sub(serial::COM1)
        .filter(|register| *register < serial::PORTS)
        .and_then(|register| u8::try_from(register).ok())
}

impl Board for LinuxBoard {
    fn read_port(&self, port: u16, data: &mut [u8]) {
        if let Some(register) = serial_register(port) {
            let mut serial = self.lock_serial();
            for byte in data {
                *byte = serial.read(register);
            }
        } else if CONFIG_PORTS.contains(&port) {
            self.lock_pci().read_port(port, data);
        } else if power::owns(port) {
            self.lock_power().read(port, data);
        } else {
            // As on a bus where nobody answers.
            data.fill(0xff);
        }
    }

    fn write_port(&self, port: u16, data: &[u8]) -> PortEffect {
        if let Some(register) = serial_register(port) {
            let mut serial = self.lock_serial();
            for byte in data {
                if let Err(error) = serial.write(register, *byte) {
                    tracing::debug!(?error, "the serial port cannot take a byte");
                }
            }
        } else if CONFIG_PORTS.contains(&port) {
            self.lock_pci().write_port(port, data);
        } else if port == exit_accounting::PORT {
            if let Some(account) = data.first() {
                self.accounts.change(*account);
            }
        } else if power::owns(port) {
            match self.lock_power().write(port, data) {
                Effect::None => {}
                Effect::ExitStatus(status) => *self.lock_status() = Some(status),
                Effect::PowerOff => return PortEffect::PowerOff,
                Effect::Reset => return PortEffect::Reset,
            }
        }
        PortEffect::Continue
    }

    fn read_memory(&self, address: u64, data: &mut [u8]) {
        if !self.lock_pci().read_memory(address, data) {
            data.fill(0xff);
        }
    }

    fn write_memory(&self, address: u64, data: &[u8]) {
        if !self.lock_pci().write_memory(address, data) {
            tracing::trace!(address, "a write to where nothing is");
        }
    }
}
