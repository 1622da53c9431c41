//! C types of `cuda.h`, and the values of its flags that this library looks at.

pub use wormhole_api::constants::event_flags::{
    DISABLE_TIMING as EVENT_DISABLE_TIMING, INTERPROCESS as EVENT_INTERPROCESS,
};
pub use wormhole_api::constants::memory_allocation_type::PINNED as MEMORY_PINNED;
pub use wormhole_api::constants::memory_location::DEVICE as LOCATION_DEVICE;
pub use wormhole_api::constants::stream_flags::NON_BLOCKING as STREAM_NON_BLOCKING;
pub use wormhole_api::ctypes::*;

/// `CU_CTX_FLAGS_MASK`.
pub const CTX_FLAGS_MASK: u32 = 0xFF;
/// `CU_CTX_SCHED_MASK`, `CU_CTX_LMEM_RESIZE_TO_MAX` and `CU_CTX_SYNC_MEMOPS`: the flags that a context reports.
pub const CTX_FLAGS_KEPT: u32 = 0x97;
/// `CU_CTX_SCHED_MASK`.
pub const CTX_SCHED_MASK: u32 = 7;
/// `CU_STREAM_LEGACY`.
pub const STREAM_LEGACY: u64 = 1;
/// `CU_STREAM_PER_THREAD`.
pub const STREAM_PER_THREAD: u64 = 2;
