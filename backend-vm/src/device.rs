//! Which device a backend serves.

use std::fmt;
use std::str::FromStr;

use crate::sandbox::Profile;

/// What workers execute on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceChoice {
    /// PTX on the CPU.
    Cpu,
    /// A device of the NVIDIA driver, by its number.
    Cuda(u32),
}

impl DeviceChoice {
    /// The system calls that a worker on this device needs.
    pub fn profile(self) -> Profile {
        match self {
            Self::Cpu => Profile::Cpu,
            Self::Cuda(_) => Profile::Cuda,
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// A text that names no device.
#[derive(Debug, thiserror::Error)]
#[error("\"{0}\" is no device: say cpu, or cuda:N with the number of a GPU")]
pub struct UnknownDevice(String);

impl FromStr for DeviceChoice {
    type Err = UnknownDevice;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once(':') {
            None if text == "cpu" => Ok(Self::Cpu),
            None if text == "cuda" => Ok(Self::Cuda(0)),
            Some(("cuda", ordinal)) => ordinal
                .parse()
                .map(Self::Cuda)
                .map_err(|_| UnknownDevice(text.to_owned())),
            _ => Err(UnknownDevice(text.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_read_as_it_is_written() {
        for device in [
            DeviceChoice::Cpu,
            DeviceChoice::Cuda(0),
            DeviceChoice::Cuda(7),
        ] {
            assert_eq!(device.to_string().parse::<DeviceChoice>().unwrap(), device);
        }
        for wrong in ["gpu", "cuda:", "cuda:-1", "cpu:0", ""] {
            assert!(wrong.parse::<DeviceChoice>().is_err(), "{wrong}");
        }
    }
}
