//! Defines the kernels that images support.

use std::fmt;
use std::str::FromStr;

use crate::disk::Suite;

/// A long-term series of Linux in Debian's cloud build.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kernel {
    /// Kernel of Debian 12.
    #[default]
    V6_1,
    /// Kernel of Debian 13.
    V6_12,
}

impl Kernel {
    pub const ALL: [Self; 2] = [Self::V6_1, Self::V6_12];

    /// Returns the version of the series.
    pub fn series(self) -> &'static str {
        match self {
            Self::V6_1 => "6.1",
            Self::V6_12 => "6.12",
        }
    }

    /// Returns the Debian release that ships this kernel.
    pub(crate) fn suite(self) -> Suite {
        match self {
            Self::V6_1 => Suite::Bookworm,
            Self::V6_12 => Suite::Trixie,
        }
    }

    /// Returns whether a release of the series is that of [`Self::suite`], and not its backport to an earlier one.
    pub(crate) fn is_original(self, release: &str) -> bool {
        match self {
            Self::V6_1 => true,
            Self::V6_12 => release.contains("+deb13-"),
        }
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.series())
    }
}

/// Error for a text that is not a supported series.
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
