//! Bookkeeping of every export: counts calls, traces them, and logs functions that are not supported.

use std::fmt::Arguments;
use std::sync::atomic::{AtomicBool, Ordering};

use wormhole_api::{Class, FUNCTIONS};

use crate::counts;
use crate::error::CuError;
use crate::log::{self, Level};
use crate::session::session;
use crate::types::CUresult;

/// Counts a call of the function with this index in the table, if it never leaves the guest.
#[inline]
pub fn enter<const INDEX: usize>() {
    if const { matches!(FUNCTIONS[INDEX].class, Class::Local) } {
        counts::count();
    }
}

/// Returns true if calls are printed.
#[inline]
pub fn tracing() -> bool {
    log::enabled(Level::Trace)
}

/// Prints a call with its arguments and its result.
#[cold]
pub fn trace(index: usize, arguments: Arguments<'_>, result: CUresult) {
    log::write(
        Level::Trace,
        format_args!("{}({arguments}) = {result}", FUNCTIONS[index].name),
    );
}

/// Returns the error of a function that is not forwarded, and logs one line per function.
#[cold]
pub fn unsupported(index: usize) -> CUresult {
    static SAID: [AtomicBool; FUNCTIONS_LIMIT] =
        [const { AtomicBool::new(false) }; FUNCTIONS_LIMIT];
    counts::count();
    let function = &FUNCTIONS[index];
    let first = SAID
        .get(index)
        .is_some_and(|said| !said.swap(true, Ordering::Relaxed));
    if let Class::Unsupported(reason) = function.class
        && first
    {
        log::error!("{} is not supported: {reason}", function.name);
    }
    CuError::NOT_SUPPORTED.0
}

/// Returns the error of a function that always fails with `code`, as natively.
#[cold]
pub fn refuse(code: CUresult) -> CUresult {
    counts::count();
    match session() {
        Ok(_) => code,
        Err(error) => error.0,
    }
}

/// Upper bound of the number of functions; checked by a test.
const FUNCTIONS_LIMIT: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_function_can_say_once_that_it_is_unsupported() {
        assert!(FUNCTIONS.len() <= FUNCTIONS_LIMIT);
    }

    #[test]
    fn an_unsupported_function_is_an_error() {
        let index = FUNCTIONS
            .iter()
            .position(|function| matches!(function.class, Class::Unsupported(_)))
            .unwrap();
        assert_eq!(unsupported(index), 801);
    }
}
