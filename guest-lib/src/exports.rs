//! The C functions, generated from the API table.
#![expect(
    non_snake_case,
    reason = "these are the functions of the CUDA driver API"
)]
#![expect(
    clippy::undocumented_unsafe_blocks,
    reason = "generated code has no comments; `wormhole_idl::exports` says why lists are sound"
)]

use wormhole_api::ctypes::*;

use crate::parameter::{In, InOut, Length as _, Out, Pointer, Room, Text, UnifiedPtr};

include!(concat!(env!("OUT_DIR"), "/exports.rs"));
