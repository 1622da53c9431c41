//! Parses and formats the choice of devices that a backend serves.

use std::fmt;
use std::str::FromStr;

use wormhole_ring::layout::MOST_DEVICES;

/// Devices that workers execute on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum DeviceChoice {
    /// CPU devices, which execute PTX.
    Cpu {
        /// Number of devices, from 1 to [`MOST`].
        count: u8,
        /// Whether kernels are checked for races and uninitialised shared memory.
        check: bool,
    },
    /// Ordinals of devices of the NVIDIA driver, without repetition, from 1 to [`MOST`] of them, in the order in which
    /// programs see them.
    Cuda(Vec<u32>),
}

/// Kind of device, which decides the needs of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// Devices that execute PTX on processors.
    Cpu,
    /// Devices of the NVIDIA driver.
    Cuda,
}

impl DeviceKind {
    pub const ALL: [Self; 2] = [Self::Cpu, Self::Cuda];
}

/// Most devices of a tenant.
pub const MOST: usize = MOST_DEVICES;

impl DeviceChoice {
    pub fn kind(&self) -> DeviceKind {
        match self {
            Self::Cpu { .. } => DeviceKind::Cpu,
            Self::Cuda(_) => DeviceKind::Cuda,
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu { count, check } => {
                f.write_str("cpu")?;
                if *count != 1 {
                    write!(f, ":{count}")?;
                }
                f.write_str(if *check { ",check" } else { "" })
            }
            Self::Cuda(ordinals) => {
                for (at, ordinal) in ordinals.iter().enumerate() {
                    let comma = if at > 0 { "," } else { "" };
                    write!(f, "{comma}cuda:{ordinal}")?;
                }
                Ok(())
            }
        }
    }
}

/// Error of a text that names no device.
#[derive(Debug, thiserror::Error)]
#[error(
    "\"{0}\" is no device: say cpu, cpu:N for N devices of the CPU, either with ,check to have kernels checked, or \
     cuda:N with the number of a GPU, several with \
     commas between them; {MOST} at most"
)]
pub struct UnknownDevice(String);

impl FromStr for DeviceChoice {
    type Err = UnknownDevice;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let unknown = || UnknownDevice(text.to_owned());
        if let Some(rest) = text.strip_prefix("cpu") {
            let (rest, check) = match rest.strip_suffix(",check") {
                Some(rest) => (rest, true),
                None => (rest, false),
            };
            let count = match rest.strip_prefix(':') {
                Some(count) => count.parse().map_err(|_| unknown())?,
                None if rest.is_empty() => 1,
                None => return Err(unknown()),
            };
            let known = (1..=MOST).contains(&usize::from(count));
            return known
                .then_some(Self::Cpu { count, check })
                .ok_or_else(unknown);
        }
        let mut ordinals = Vec::new();
        for name in text.split(',') {
            let ordinal = match name.split_once(':') {
                None if name == "cuda" => 0,
                Some(("cuda", ordinal)) => ordinal.parse().map_err(|_| unknown())?,
                _ => return Err(unknown()),
            };
            if ordinals.contains(&ordinal) || ordinals.len() == MOST {
                return Err(unknown());
            }
            ordinals.push(ordinal);
        }
        Ok(Self::Cuda(ordinals))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpu(count: u8, check: bool) -> DeviceChoice {
        DeviceChoice::Cpu { count, check }
    }

    #[test]
    fn a_device_is_read_as_it_is_written() {
        for device in [
            cpu(1, false),
            cpu(2, false),
            cpu(1, true),
            cpu(3, true),
            DeviceChoice::Cuda(vec![0]),
            DeviceChoice::Cuda(vec![7, 0, 3]),
        ] {
            assert_eq!(device.to_string().parse::<DeviceChoice>().unwrap(), device);
        }
        assert_eq!(
            "cuda".parse::<DeviceChoice>().unwrap().to_string(),
            "cuda:0"
        );
        let wrong = [
            "gpu",
            "cuda:",
            "cuda:-1",
            "cpu:0",
            "cpu:17",
            "cpu2",
            "cpu,cpu",
            "cpu,cuda:0",
            "cuda:0,cuda:0",
            "cuda:0,",
            "",
        ];
        for wrong in wrong {
            assert!(wrong.parse::<DeviceChoice>().is_err(), "{wrong}");
        }
    }
}
