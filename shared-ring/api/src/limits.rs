//! Limits of the driver that both sides of a session check.

/// Greatest number of dimensions of a tensor map.
pub const TENSOR_RANKS: u32 = 5;
/// Greatest number of memory operations of one call: the documentation of `cuStreamBatchMemOp` says 256, the driver
/// accepts one less.
pub const MEMORY_OPERATIONS: usize = 255;
