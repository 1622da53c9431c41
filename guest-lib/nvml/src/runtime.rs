//! What every export does besides its call: tracing, and saying what is not supported.

use nvml_wrapper_sys::bindings::nvmlReturn_t;
use wormhole_api::nvml::{Class, FUNCTIONS};
use wormhole_connect::log::{self, Level};

use crate::error::{NvmlError, Result};
use crate::library::library;

/// The code of a call of the function with this index in the table.
pub fn answer(index: usize, call: impl FnOnce() -> Result) -> nvmlReturn_t {
    let code = call().map_or_else(|error| error.0, |()| 0);
    log::write(
        Level::Trace,
        format_args!("{} = {code}", FUNCTIONS[index].name),
    );
    code
}

/// A function that is not served.
pub fn unsupported(index: usize) -> nvmlReturn_t {
    not_served(index, NvmlError::NOT_SUPPORTED)
}

/// A function that would change what is not the tenant's.
pub fn refused(index: usize) -> nvmlReturn_t {
    not_served(index, NvmlError::NO_PERMISSION)
}

#[cold]
fn not_served(index: usize, error: NvmlError) -> nvmlReturn_t {
    let function = &FUNCTIONS[index];
    if let Class::Unsupported(reason) | Class::Refused(reason) = function.class {
        log::debug!("{} is not served: {reason}", function.name);
    }
    answer(index, || library().check().and(Err(error)))
}
