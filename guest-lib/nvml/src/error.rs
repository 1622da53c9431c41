//! Defines the error codes of calls.

use nvml_wrapper_sys::bindings::*;

/// An `nvmlReturn_t` other than `NVML_SUCCESS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvmlError(pub nvmlReturn_t);

pub type Result<T = ()> = std::result::Result<T, NvmlError>;

impl NvmlError {
    pub const UNINITIALIZED: Self = Self(nvmlReturn_enum_NVML_ERROR_UNINITIALIZED);
    pub const INVALID_ARGUMENT: Self = Self(nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT);
    pub const NOT_SUPPORTED: Self = Self(nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED);
    pub const NO_PERMISSION: Self = Self(nvmlReturn_enum_NVML_ERROR_NO_PERMISSION);
    pub const NOT_FOUND: Self = Self(nvmlReturn_enum_NVML_ERROR_NOT_FOUND);
    pub const INSUFFICIENT_SIZE: Self = Self(nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE);
    pub const DRIVER_NOT_LOADED: Self = Self(nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED);
    pub const TIMEOUT: Self = Self(nvmlReturn_enum_NVML_ERROR_TIMEOUT);
    pub const FUNCTION_NOT_FOUND: Self = Self(nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND);
    pub const GPU_IS_LOST: Self = Self(nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST);
    pub const VERSION_MISMATCH: Self = Self(nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
}
