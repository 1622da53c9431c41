//! Properties that follow from the values of messages, for both ends of a ring and for devices.

use crate::message::{GraphBranch, LaunchAttribute};

impl GraphBranch {
    /// Returns whether a node of this kind may have that many bodies.
    #[must_use]
    pub const fn allows(self, bodies: u32) -> bool {
        match self {
            Self::If => matches!(bodies, 1 | 2),
            Self::While => bodies == 1,
            Self::Switch => bodies > 0,
        }
    }
}

impl LaunchAttribute {
    #[must_use]
    pub const fn new(id: u32, value: [u8; 64]) -> Self {
        Self {
            id,
            reserved: 0,
            value,
        }
    }
}

// Devices pass it to the driver as a `CUlaunchAttribute`.
const _: () = assert!(size_of::<LaunchAttribute>() == 72 && align_of::<LaunchAttribute>() == 8);
