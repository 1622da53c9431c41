//! Implements the functions whose results the library computes itself, one module per subject.

#![allow(non_snake_case, reason = "NVML's own names")]

mod devices;
mod events;
mod fields;
mod internal;
mod links;
mod memory;
mod system;
mod topology;

use std::ffi::{CStr, c_char};

pub use self::devices::*;
pub use self::events::*;
pub use self::fields::*;
pub use self::internal::nvmlInternalGetExportTable;
pub use self::links::*;
pub use self::memory::*;
pub use self::system::*;
pub use self::topology::*;
use crate::error::{NvmlError, Result};

/// Writes a value to an output parameter.
///
/// # Safety
/// `place` is null or has room for a value.
unsafe fn put<T>(place: *mut T, value: T) -> Result {
    if place.is_null() {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    // SAFETY: not null, so it has room, as the caller guarantees.
    unsafe { place.write(value) };
    Ok(())
}

/// Writes a string with its terminator; fails if it does not fit.
///
/// # Safety
/// `place` is null or has room for `length` bytes.
unsafe fn put_text(place: *mut c_char, length: u32, text: &str) -> Result {
    if place.is_null() {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    if text.len() >= length as usize {
        return Err(NvmlError::INSUFFICIENT_SIZE);
    }
    // SAFETY: `text.len() + 1` is at most `length`.
    unsafe {
        place
            .cast::<u8>()
            .copy_from_nonoverlapping(text.as_ptr(), text.len());
        place.add(text.len()).write(0);
    }
    Ok(())
}

/// Borrows a string argument.
///
/// # Safety
/// `text` is null or a string that stays valid during the call.
unsafe fn text<'t>(text: *const c_char) -> Result<&'t str> {
    if text.is_null() {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    // SAFETY: the caller guarantees a string.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| NvmlError::NOT_FOUND)
}

/// Returns the value of a structure's `version` field: `NVML_STRUCT_VERSION`.
const fn version<T>(number: u32) -> u32 {
    #[expect(clippy::cast_possible_truncation, reason = "structures are small")]
    let bytes = size_of::<T>() as u32;
    bytes | number << 24
}

/// Copies a string into an array of characters, truncated if it does not fit.
fn characters<const N: usize>(text: &str) -> [c_char; N] {
    let mut characters = [0; N];
    for (place, byte) in characters.iter_mut().take(N - 1).zip(text.bytes()) {
        *place = byte.cast_signed();
    }
    characters
}
