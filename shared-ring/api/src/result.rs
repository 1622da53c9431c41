//! Result codes of the CUDA driver API, from `results.idl`.

use core::ffi::CStr;
use core::fmt;

/// A `CUresult`, success included.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct CuResult(pub u32);

macro_rules! results {
    ($($constant:ident = $code:literal, $name:literal, $text:literal;)*) => {
        impl CuResult {
            $(pub const $constant: Self = Self($code);)*

            /// Every code of CUDA 13.0.
            pub const ALL: &'static [Self] = &[$(Self::$constant),*];

            /// Name that `cuGetErrorName` returns; `None` where it returns `CUDA_ERROR_INVALID_VALUE`.
            #[must_use]
            pub const fn name(self) -> Option<&'static CStr> {
                match self.0 {
                    $($code => Some($name),)*
                    _ => None,
                }
            }

            /// Text that `cuGetErrorString` returns, word for word as the native driver.
            #[must_use]
            pub const fn text(self) -> Option<&'static CStr> {
                match self.0 {
                    $($code => Some($text),)*
                    _ => None,
                }
            }
        }
    };
}

include!(concat!(env!("OUT_DIR"), "/results.rs"));

impl fmt::Debug for CuResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name().map(CStr::to_str) {
            Some(Ok(name)) => write!(f, "{name} ({})", self.0),
            _ => write!(f, "CUresult {}", self.0),
        }
    }
}

impl fmt::Display for CuResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl core::error::Error for CuResult {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_texts_are_what_the_native_driver_says() {
        assert_eq!(
            CuResult::INVALID_VALUE.name(),
            Some(c"CUDA_ERROR_INVALID_VALUE")
        );
        assert_eq!(CuResult::INVALID_VALUE.text(), Some(c"invalid argument"));
        assert_eq!(CuResult::SUCCESS.name(), Some(c"CUDA_SUCCESS"));
        assert_eq!(CuResult::SUCCESS.text(), Some(c"no error"));
        assert_eq!(
            CuResult::ILLEGAL_ADDRESS.text(),
            Some(c"an illegal memory access was encountered")
        );
        assert_eq!(CuResult(35).name(), None);
        assert_eq!(CuResult(35).text(), None);
    }
}
