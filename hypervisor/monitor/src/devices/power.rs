//! The ports through which a guest ends: exit status, power-off, reset.

/// A guest writes its program's exit status here (any width; a payload ends with it at once, a
/// Linux guest goes on to power off). Not used by any PC device that Linux probes.
pub const EXIT_STATUS: u16 = 0xf4;
/// ACPI PM1a event block: four bytes, never an event.
pub const PM1_EVENT: u16 = 0x600;
/// ACPI PM1a control block: two bytes.
pub const PM1_CONTROL: u16 = 0x604;
/// The command port of the 8042, which resets the machine.
pub const I8042_COMMAND: u16 = 0x64;
/// The 8042's command that pulses the reset line.
pub const I8042_RESET: u8 = 0xfe;
/// `SLP_TYP` that means S5, soft-off.
pub const SLEEP_TYPE_S5: u8 = 5;

/// `SCI_EN`: the machine is in ACPI mode already.
const SCI_ENABLED: u16 = 1;
const SLEEP_ENABLE: u16 = 1 << 13;

/// What a write to a port means for the VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Nothing.
    None,
    /// The guest told its exit status.
    ExitStatus(u32),
    /// The guest switched itself off.
    PowerOff,
    /// The guest reset itself.
    Reset,
}

/// The event block's second half: which events are enabled.
const PM1_ENABLE: u16 = PM1_EVENT + 2;

/// Whether the ports of this device include `port`.
pub fn owns(port: u16) -> bool {
    matches!(port, EXIT_STATUS | 0x60 | I8042_COMMAND)
        || (PM1_EVENT..PM1_CONTROL + 2).contains(&port)
}

/// The exit status in a write to [`EXIT_STATUS`]: little-endian, missing bytes are 0.
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

/// The ports.
#[derive(Debug, Default)]
pub struct PowerPorts {
    /// Reads as written: Linux checks that it took effect.
    enabled_events: u16,
}

impl PowerPorts {
    /// What a write does; every byte sequence has a meaning.
    pub fn write(&mut self, port: u16, data: &[u8]) -> Effect {
        let [b0, b1, ..] = first_bytes(data);
        let word = u16::from_le_bytes([b0, b1]);
        match port {
            EXIT_STATUS => Effect::ExitStatus(status(data)),
            I8042_COMMAND if b0 == I8042_RESET => Effect::Reset,
            PM1_CONTROL
                if word & SLEEP_ENABLE != 0 && word >> 10 & 7 == u16::from(SLEEP_TYPE_S5) =>
            {
                Effect::PowerOff
            }
            PM1_ENABLE => {
                self.enabled_events = word;
                Effect::None
            }
            _ => Effect::None,
        }
    }

    /// What a read answers.
    pub fn read(&self, port: u16, data: &mut [u8]) {
        let value = match port {
            PM1_CONTROL => SCI_ENABLED,
            PM1_ENABLE => self.enabled_events,
            _ => 0,
        };
        data.fill(0);
        for (byte, value) in data.iter_mut().zip(value.to_le_bytes()) {
            *byte = value;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_s5_switches_off() {
        let control = |value: u16| PowerPorts::default().write(PM1_CONTROL, &value.to_le_bytes());
        assert_eq!(control(SLEEP_ENABLE | 5 << 10), Effect::PowerOff);
        assert_eq!(control(SLEEP_ENABLE | 3 << 10), Effect::None);
        assert_eq!(control(5 << 10), Effect::None);
    }

    #[test]
    fn statuses_of_all_widths_are_taken() {
        assert_eq!(
            PowerPorts::default().write(EXIT_STATUS, &[7]),
            Effect::ExitStatus(7)
        );
        assert_eq!(
            PowerPorts::default().write(EXIT_STATUS, &0x1234_5678u32.to_le_bytes()),
            Effect::ExitStatus(0x1234_5678)
        );
        assert_eq!(
            PowerPorts::default().write(EXIT_STATUS, &[]),
            Effect::ExitStatus(0)
        );
    }

    #[test]
    fn enabled_events_read_back() {
        let mut ports = PowerPorts::default();
        ports.write(PM1_ENABLE, &0x20u16.to_le_bytes());
        let mut data = [0; 2];
        ports.read(PM1_ENABLE, &mut data);
        assert_eq!(u16::from_le_bytes(data), 0x20);
    }

    #[test]
    fn only_the_reset_command_resets() {
        assert_eq!(
            PowerPorts::default().write(I8042_COMMAND, &[I8042_RESET]),
            Effect::Reset
        );
        assert_eq!(
            PowerPorts::default().write(I8042_COMMAND, &[0xd1]),
            Effect::None
        );
    }
}
