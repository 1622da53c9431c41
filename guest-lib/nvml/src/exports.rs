//! Includes the C functions that the build script generates from the table.

#![allow(
    non_snake_case,
    clippy::too_many_arguments,
    reason = "NVML's own names and parameters"
)]
#![expect(
    clippy::undocumented_unsafe_blocks,
    reason = "generated code has no comments: callers keep the contracts of the C functions"
)]

use std::ffi::{c_char, c_void};

use nvml_wrapper_sys::bindings::*;
use wormhole_api::nvml::{HOST, Word};

include!(concat!(env!("OUT_DIR"), "/exports.rs"));
