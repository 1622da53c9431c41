//! The C functions, generated from the API table.
#![expect(
    non_snake_case,
    reason = "these are the functions of the CUDA driver API"
)]

use wormhole_api::ctypes::*;

include!(concat!(env!("OUT_DIR"), "/exports.rs"));
