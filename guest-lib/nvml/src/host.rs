//! Implements functions that return a value of the host's NVML, or a constant.

use std::ffi::c_void;

use nvml_wrapper_sys::bindings::nvmlDevice_t;
use wormhole_api::nvml::{HostFunction, Word};
use wormhole_ring::control::facts;

use crate::error::{NvmlError, Result};
use crate::library::{Age, library};

/// Maximum number of integers in the outputs of a call.
const WORDS: usize = 8;

/// Writes the answer of the host's NVML for these selectors to `outputs`. If there is no successful answer, writes
/// `otherwise`, or fails if that is `None`.
///
/// # Safety
/// Each of `outputs` is null or has room for the words of the function's output.
pub unsafe fn passed_on(
    function: &HostFunction,
    device: nvmlDevice_t,
    selectors: &[u32],
    outputs: &[*mut c_void],
    otherwise: Option<&[u64]>,
) -> Result {
    let library = library();
    let device = library.device(device)?;
    let call = function
        .call(selectors)
        .ok_or(NvmlError::INVALID_ARGUMENT)?;
    if outputs.iter().any(|output| output.is_null()) {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    let age = if function.live { Age::Recent } else { Age::Any };
    let view = library.view(device, age)?;
    let mut numbers = [0; WORDS];
    let numbers = &mut numbers[..function.words().min(WORDS)];
    let said = view
        .host(function.name, call)
        .and_then(|answer| facts::read_answer(answer, numbers));
    match (said, otherwise) {
        (Some(Ok(())), _) => {}
        (_, Some(otherwise)) => numbers.copy_from_slice(otherwise),
        (Some(Err(code)), None) => return Err(NvmlError(code)),
        (None, None) => return Err(NvmlError::NOT_SUPPORTED),
    }
    // SAFETY: the caller upholds the contract.
    unsafe { fill(function.outputs, outputs, numbers) };
    Ok(())
}

/// Writes constants to `outputs`, for any device.
///
/// # Safety
/// As [`passed_on`].
pub unsafe fn fixed(
    device: nvmlDevice_t,
    words: &[&[Word]],
    outputs: &[*mut c_void],
    values: &[u64],
) -> Result {
    library().device(device)?;
    if outputs.iter().any(|output| output.is_null()) {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    // SAFETY: the caller upholds the contract.
    unsafe { fill(words, outputs, values) };
    Ok(())
}

/// Writes integers to outputs with the layout `words`.
///
/// # Safety
/// Each output has room for its words.
unsafe fn fill(words: &[&[Word]], outputs: &[*mut c_void], numbers: &[u64]) {
    let mut numbers = numbers.iter().copied();
    for (words, output) in words.iter().zip(outputs) {
        let mut at = 0;
        for word in *words {
            let number = numbers.next().unwrap_or(0);
            let bytes = number.to_le_bytes();
            // SAFETY: inside the output, as the caller guarantees; the bytes are those of a little-endian integer.
            unsafe {
                output
                    .cast::<u8>()
                    .add(at)
                    .copy_from_nonoverlapping(bytes.as_ptr(), word.bytes());
            }
            at += word.bytes();
        }
    }
}
