//! Parses and formats the choice of devices that a backend serves: one file for each kind.

mod cpu;
mod cuda;

use std::fmt;
use std::str::FromStr;

use wormhole_ring::layout::MOST_DEVICES;

pub use self::cpu::CpuChoice;
pub use self::cuda::CudaChoice;

/// Devices that workers execute on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum DeviceChoice {
    Cpu(CpuChoice),
    Cuda(CudaChoice),
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

    /// Reads a choice of this kind of device.
    fn read(self, text: &str) -> Option<DeviceChoice> {
        match self {
            Self::Cpu => CpuChoice::read(text).map(DeviceChoice::Cpu),
            Self::Cuda => CudaChoice::read(text).map(DeviceChoice::Cuda),
        }
    }
}

/// Most devices of a tenant.
pub const MOST: usize = MOST_DEVICES;

impl DeviceChoice {
    pub fn kind(&self) -> DeviceKind {
        match self {
            Self::Cpu(_) => DeviceKind::Cpu,
            Self::Cuda(_) => DeviceKind::Cuda,
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu(choice) => choice.fmt(f),
            Self::Cuda(choice) => choice.fmt(f),
        }
    }
}

/// Error of a text that names no device.
#[derive(Debug, thiserror::Error)]
#[error(
    "\"{text}\" is no device: say {}, or {}; {MOST} at most",
    cpu::FORM,
    cuda::FORM
)]
pub struct UnknownDevice {
    text: String,
}

impl FromStr for DeviceChoice {
    type Err = UnknownDevice;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let read = DeviceKind::ALL.iter().find_map(|kind| kind.read(text));
        read.ok_or_else(|| UnknownDevice {
            text: text.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpu(count: u8, check: bool) -> DeviceChoice {
        DeviceChoice::Cpu(CpuChoice { count, check })
    }

    #[test]
    fn a_device_is_read_as_it_is_written() {
        for device in [
            cpu(1, false),
            cpu(2, false),
            cpu(1, true),
            cpu(3, true),
            DeviceChoice::Cuda(CudaChoice(vec![0])),
            DeviceChoice::Cuda(CudaChoice(vec![7, 0, 3])),
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
