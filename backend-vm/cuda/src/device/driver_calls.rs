//! Operations that are one driver call each, generated from their messages.
#![expect(
    clippy::undocumented_unsafe_blocks,
    reason = "generated code has no comments; `wormhole_idl::cuda_driver_calls` says why each block is sound"
)]

use wormhole_device::{
    CuError, DriverCalls, RawArray, RawEvent, RawFunction, RawMemory, RawMipmap, RawPool,
    RawStream, Result,
};

use super::{CudaDevice, handle, pointer};

include!(concat!(env!("OUT_DIR"), "/driver_calls.rs"));

/// Converts a number to another type. Fails with `INVALID_VALUE` if it does not fit.
fn number<T, U: TryFrom<T>>(value: T) -> Result<U> {
    U::try_from(value).map_err(|_| CuError::INVALID_VALUE)
}
