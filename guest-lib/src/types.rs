//! C types of `cuda.h`, and the values of its flags that this library looks at.

pub use wormhole_api::ctypes::*;

/// `CU_CTX_FLAGS_MASK`.
pub const CTX_FLAGS_MASK: u32 = 0xFF;
/// `CU_CTX_SCHED_MASK`, `CU_CTX_LMEM_RESIZE_TO_MAX` and `CU_CTX_SYNC_MEMOPS`: what a context says of itself.
pub const CTX_FLAGS_KEPT: u32 = 0x97;
/// `CU_CTX_SCHED_MASK`.
pub const CTX_SCHED_MASK: u32 = 7;
/// `CU_STREAM_NON_BLOCKING`.
pub const STREAM_NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`.
pub const EVENT_DISABLE_TIMING: u32 = 2;
/// `CU_EVENT_INTERPROCESS`.
pub const EVENT_INTERPROCESS: u32 = 4;
/// `CU_STREAM_LEGACY`.
pub const STREAM_LEGACY: u64 = 1;
/// `CU_STREAM_PER_THREAD`.
pub const STREAM_PER_THREAD: u64 = 2;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub const LOCATION_DEVICE: u32 = 1;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
pub const MEMORY_PINNED: u32 = 1;
