//! Error codes of the driver API.

/// A code other than `CUDA_SUCCESS`.
pub use wormhole_api::CuResult as CuError;

/// What a driver function returns before it becomes a `CUresult`.
pub type Result<T = ()> = std::result::Result<T, CuError>;
