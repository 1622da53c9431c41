//! Result codes of the CUDA driver API ("Data types used by CUDA driver", `CUresult`).

use core::fmt;

/// A `CUresult`, success included.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct CuResult(pub u32);

impl CuResult {
    pub const SUCCESS: Self = Self(0);
    pub const INVALID_VALUE: Self = Self(1);
    pub const OUT_OF_MEMORY: Self = Self(2);
    pub const INVALID_HANDLE: Self = Self(400);
    pub const NOT_SUPPORTED: Self = Self(801);
}

impl fmt::Debug for CuResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CuResult({})", self.0)
    }
}
