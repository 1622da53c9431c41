//! Operations that are one call of the driver each, generated from the messages that they answer.
#![expect(
    clippy::undocumented_unsafe_blocks,
    reason = "generated code has no comments; `wormhole_idl::cuda_driver_calls` says why each block is sound"
)]

use wormhole_device::{CuError, DriverCalls, RawFunction, Result};

use super::{CudaDevice, pointer};

include!(concat!(env!("OUT_DIR"), "/driver_calls.rs"));

/// A number in another type; one that has no place there is no valid value.
fn number<T, U: TryFrom<T>>(value: T) -> Result<U> {
    U::try_from(value).map_err(|_| CuError::INVALID_VALUE)
}
