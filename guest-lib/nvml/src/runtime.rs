//! Wraps every export: traces calls, and answers functions that are not supported.

use nvml_wrapper_sys::bindings::nvmlReturn_t;
use wormhole_api::nvml::{Class, FUNCTIONS};
use wormhole_connect::log::{self, Level};

use crate::error::{NvmlError, Result};
use crate::library::library;

/// Runs a call of the function with this index in the table, traces it, and returns its code.
pub fn answer(index: usize, call: impl FnOnce() -> Result) -> nvmlReturn_t {
    let code = call().map_or_else(|error| error.0, |()| 0);
    log::write(
        Level::Trace,
        format_args!("{} = {code}", FUNCTIONS[index].name),
    );
    code
}

/// Answers a function that is not supported.
pub fn unsupported(index: usize) -> nvmlReturn_t {
    not_served(index, NvmlError::NOT_SUPPORTED)
}

/// Answers a function that would change state outside the tenant.
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
