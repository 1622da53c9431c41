//! The kernels that images can have.

use std::fmt;
use std::str::FromStr;

/// A long-term series of Linux, as Debian builds it for clouds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kernel {
    /// Debian 12's own.
    #[default]
    V6_1,
    /// From Debian 12's backports.
    V6_12,
}

impl Kernel {
    pub const ALL: [Self; 2] = [Self::V6_1, Self::V6_12];

    /// The series as it is written everywhere.
    pub fn series(self) -> &'static str {
        match self {
            Self::V6_1 => "6.1",
            Self::V6_12 => "6.12",
        }
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.series())
    }
}

/// A text that names no kernel.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("there are images of the kernels 6.1 and 6.12, not of {0:?}")]
pub struct UnknownKernel(String);

impl FromStr for Kernel {
    type Err = UnknownKernel;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|kernel| kernel.series() == text)
            .ok_or_else(|| UnknownKernel(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_is_found_by_its_name() {
        for kernel in Kernel::ALL {
            assert_eq!(kernel.to_string().parse(), Ok(kernel));
        }
        assert!("6".parse::<Kernel>().is_err());
    }
}
