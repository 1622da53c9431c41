//! C types of `cuda.h`, and the values of its flags that this library looks at.

pub use wormhole_api::constants::event_flags::{
    DISABLE_TIMING as EVENT_DISABLE_TIMING, INTERPROCESS as EVENT_INTERPROCESS,
};
pub use wormhole_api::constants::memory_allocation_type::PINNED as MEMORY_PINNED;
use wormhole_api::constants::memory_handle_type::{
    FABRIC, POSIX_FILE_DESCRIPTOR, WIN32, WIN32_KMT,
};
pub use wormhole_api::constants::memory_location::DEVICE as LOCATION_DEVICE;
pub use wormhole_api::constants::stream_flags::NON_BLOCKING as STREAM_NON_BLOCKING;
pub use wormhole_api::constants::stream_handle::{
    LEGACY as STREAM_LEGACY, PER_THREAD as STREAM_PER_THREAD,
};
pub use wormhole_api::ctypes::*;

/// All `CUmemAllocationHandleType`s.
pub const HANDLE_TYPES: u32 = POSIX_FILE_DESCRIPTOR | WIN32 | WIN32_KMT | FABRIC;
