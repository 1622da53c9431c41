//! Error codes of the driver API.

/// A code other than `CUDA_SUCCESS`.
pub use wormhole_api::CuResult as CuError;

/// Result of a driver function before its conversion to a `CUresult`.
pub type Result<T = ()> = std::result::Result<T, CuError>;
