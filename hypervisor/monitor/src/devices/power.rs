//! Emulates the ports through which a guest ends: exit status, power-off, reset, panic. The power button asks it to.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::EventFd;
use wormhole_lock::Mutex;

use crate::bus::{BusDevice, Effect};

/// Port to which a guest writes its program's exit status, with any width. The write ends a payload;
/// a Linux guest continues and powers off. No PC device that Linux probes uses this port.
pub const EXIT_STATUS: u16 = 0xf4;
/// Port of the pvpanic device (`docs/specs/pvpanic.rst` of QEMU), one byte.
pub const PANIC: u16 = 0x505;
/// ACPI PM1a event block: two bytes of status, two of enabled events.
pub const PM1_EVENT: u16 = 0x600;
/// ACPI PM1a control block: two bytes.
pub const PM1_CONTROL: u16 = 0x604;
/// Number of ports from [`PM1_EVENT`] to the end of the control block.
pub const PM1_PORTS: u16 = PM1_CONTROL + 2 - PM1_EVENT;
/// First port of the 8042, its data port.
pub const I8042: u16 = 0x60;
/// The command port of the 8042, which resets the machine.
pub const I8042_COMMAND: u16 = 0x64;
/// Number of ports from [`I8042`] to the command port. KVM's timer has port 0x61, between the two.
pub const I8042_PORTS: u16 = I8042_COMMAND + 1 - I8042;
/// The 8042's command that pulses the reset line.
pub const I8042_RESET: u8 = 0xfe;
/// Interrupt line of ACPI events.
pub const SCI: u16 = 9;
/// `SLP_TYP` of S5, soft-off.
pub const SLEEP_TYPE_S5: u8 = 5;

/// `SCI_EN`: the machine is in ACPI mode.
const SCI_ENABLED: u16 = 1;
const SLEEP_ENABLE: u16 = 1 << 13;
/// `PWRBTN_STS` and `PWRBTN_EN`.
const POWER_BUTTON: u16 = 1 << 8;

/// The kernel panicked, and no other kernel takes over.
const PANICKED: u8 = 1;

/// Offset of the status register.
const STATUS: u64 = 0;
/// Offset of the enable register, the event block's second half.
const ENABLE: u64 = 2;
/// Offset of the control block.
const CONTROL: u64 = (PM1_CONTROL - PM1_EVENT) as u64;
/// Offset of the command port.
const COMMAND: u64 = (I8042_COMMAND - I8042) as u64;

/// Returns the exit status in a write to [`EXIT_STATUS`]: little-endian, missing bytes are 0.
pub fn status(data: &[u8]) -> u32 {
    u32::from_le_bytes(first_bytes(data))
}

fn first_bytes(data: &[u8]) -> [u8; 4] {
    let mut bytes = [0; 4];
    for (byte, value) in bytes.iter_mut().zip(data) {
        *byte = *value;
    }
    bytes
}

/// The port [`EXIT_STATUS`] of a Linux guest.
#[derive(Debug, Default)]
pub struct ExitStatusPort {
    /// Last status that the guest wrote.
    pub status: Option<u32>,
}

impl BusDevice for ExitStatusPort {
    fn read(&mut self, _: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&mut self, _: u64, data: &[u8]) -> Effect {
        self.status = Some(status(data));
        Effect::Continue
    }
}

/// The 8042 keyboard controller, reduced to its reset line.
#[derive(Debug, Default)]
pub struct I8042Ports;

impl BusDevice for I8042Ports {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        // The input buffer is empty: the controller accepts commands.
        data.fill(if matches!(offset, 0 | COMMAND) {
            0
        } else {
            0xff
        });
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Effect {
        match (offset, data.first()) {
            (COMMAND, Some(&I8042_RESET)) => Effect::Reset,
            _ => Effect::Continue,
        }
    }
}

/// The pvpanic device: a guest with its driver writes to it when its kernel panics.
#[derive(Debug, Default)]
pub struct PanicPort;

impl BusDevice for PanicPort {
    fn read(&mut self, _: u64, data: &mut [u8]) {
        // The driver uses only the events that it reads here.
        data.fill(PANICKED);
    }

    fn write(&mut self, _: u64, data: &[u8]) -> Effect {
        match data.first() {
            Some(events) if events & PANICKED != 0 => Effect::Panicked,
            _ => Effect::Continue,
        }
    }
}

/// State of the ports [`Pm1Ports`].
#[derive(Debug, Serialize, Deserialize)]
pub struct Pm1State {
    status: u16,
    enabled_events: u16,
}

/// ACPI's PM1a event and control blocks, whose only event is the power button (ACPI 6.5, 4.8.3).
#[derive(Debug)]
pub struct Pm1Ports {
    status: u16,
    enabled_events: u16,
    /// Raises [`SCI`].
    interrupt: EventFd,
}

impl Pm1Ports {
    pub fn new(interrupt: EventFd) -> Self {
        Self {
            status: 0,
            enabled_events: 0,
            interrupt,
        }
    }

    /// Returns the state.
    pub fn save(&self) -> Pm1State {
        Pm1State {
            status: self.status,
            enabled_events: self.enabled_events,
        }
    }

    /// Takes a state, and raises the interrupt that it has.
    pub fn restore(&mut self, state: &Pm1State) {
        self.status = state.status;
        self.enabled_events = state.enabled_events;
        self.raise_if_pending();
    }

    fn raise_if_pending(&self) {
        if self.status & self.enabled_events != 0 {
            // Fails only if a great many interrupts wait for KVM.
            let _ = self.interrupt.write(1);
        }
    }
}

impl BusDevice for Pm1Ports {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        let value = match offset {
            CONTROL => SCI_ENABLED,
            // Linux verifies that its write is there.
            ENABLE => self.enabled_events,
            STATUS => self.status,
            _ => 0,
        };
        data.fill(0);
        for (byte, value) in data.iter_mut().zip(value.to_le_bytes()) {
            *byte = value;
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Effect {
        let [b0, b1, ..] = first_bytes(data);
        let word = u16::from_le_bytes([b0, b1]);
        let sleeps = word & SLEEP_ENABLE != 0;
        match offset {
            CONTROL if sleeps && word >> 10 & 7 == u16::from(SLEEP_TYPE_S5) => {
                return Effect::PowerOff;
            }
            // A one clears its bit.
            STATUS => self.status &= !word,
            ENABLE => {
                self.enabled_events = word;
                self.raise_if_pending();
            }
            _ => {}
        }
        Effect::Continue
    }
}

/// Presses a guest's power button from any thread.
#[derive(Debug, Clone)]
pub struct PowerButton(Arc<Mutex<Pm1Ports>>);

impl PowerButton {
    pub(crate) fn new(ports: Arc<Mutex<Pm1Ports>>) -> Self {
        Self(ports)
    }

    /// Presses the button. A guest whose driver or whose system is not ready for it misses that, as it would on other
    /// machines: press again.
    pub fn press(&self) {
        let mut ports = self.0.lock();
        ports.status |= POWER_BUTTON;
        ports.raise_if_pending();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pm1() -> Pm1Ports {
        Pm1Ports::new(EventFd::new(libc::EFD_NONBLOCK).expect("an eventfd"))
    }

    fn word(ports: &mut Pm1Ports, offset: u64) -> u16 {
        let mut data = [0; 2];
        ports.read(offset, &mut data);
        u16::from_le_bytes(data)
    }

    #[test]
    fn only_s5_switches_off() {
        let control = |value: u16| pm1().write(CONTROL, &value.to_le_bytes());
        assert_eq!(control(SLEEP_ENABLE | 5 << 10), Effect::PowerOff);
        assert_eq!(control(SLEEP_ENABLE | 3 << 10), Effect::Continue);
        assert_eq!(control(5 << 10), Effect::Continue);
    }

    #[test]
    fn statuses_of_all_widths_are_taken() {
        for (data, status) in [
            (&[7][..], 7),
            (&0x1234_5678u32.to_le_bytes(), 0x1234_5678),
            (&[], 0),
        ] {
            let mut port = ExitStatusPort::default();
            assert_eq!(port.write(0, data), Effect::Continue);
            assert_eq!(port.status, Some(status));
        }
    }

    #[test]
    fn the_button_interrupts_once_its_event_is_enabled() {
        let ports = Arc::new(Mutex::new(pm1()));
        let button = PowerButton::new(Arc::clone(&ports));
        let interrupts = || ports.lock().interrupt.read().unwrap_or(0);
        button.press();
        assert_eq!(interrupts(), 0);
        ports.lock().write(ENABLE, &POWER_BUTTON.to_le_bytes());
        assert_eq!(word(&mut ports.lock(), ENABLE), POWER_BUTTON);
        assert_eq!(interrupts(), 1);
        assert_eq!(word(&mut ports.lock(), STATUS), POWER_BUTTON);
        // Other bits leave it set.
        ports.lock().write(STATUS, &1u16.to_le_bytes());
        assert_eq!(word(&mut ports.lock(), STATUS), POWER_BUTTON);
        ports.lock().write(STATUS, &POWER_BUTTON.to_le_bytes());
        assert_eq!(word(&mut ports.lock(), STATUS), 0);
        assert_eq!(interrupts(), 0);
        button.press();
        assert_eq!(interrupts(), 1);
    }

    #[test]
    fn a_restored_button_interrupts_if_it_was_pressed() {
        let mut saved = pm1();
        saved.write(ENABLE, &POWER_BUTTON.to_le_bytes());
        let mut restored = pm1();
        restored.restore(&saved.save());
        assert!(restored.interrupt.read().is_err());
        saved.status = POWER_BUTTON;
        restored.restore(&saved.save());
        assert_eq!(restored.interrupt.read().ok(), Some(1));
        let words = [STATUS, ENABLE].map(|register| word(&mut restored, register));
        assert_eq!(words, [POWER_BUTTON; 2]);
    }

    #[test]
    fn only_a_panic_that_no_other_kernel_handles_ends_the_guest() {
        let mut data = [0];
        PanicPort.read(0, &mut data);
        assert_eq!(data, [PANICKED]);
        assert_eq!(PanicPort.write(0, &[PANICKED]), Effect::Panicked);
        for other in [&[][..], &[0], &[2]] {
            assert_eq!(PanicPort.write(0, other), Effect::Continue);
        }
    }

    #[test]
    fn only_the_reset_command_resets() {
        let command = |offset, byte| I8042Ports.write(offset, &[byte]);
        assert_eq!(command(COMMAND, I8042_RESET), Effect::Reset);
        assert_eq!(command(COMMAND, 0xd1), Effect::Continue);
        assert_eq!(command(0, I8042_RESET), Effect::Continue);
        assert_eq!(I8042Ports.write(COMMAND, &[]), Effect::Continue);
    }

    #[test]
    fn the_8042_is_ready_and_the_ports_between_are_empty() {
        for (offset, byte) in [(0, 0), (1, 0xff), (3, 0xff), (COMMAND, 0)] {
            let mut data = [7];
            I8042Ports.read(offset, &mut data);
            assert_eq!(data, [byte]);
        }
    }
}
