//! Compiler options.

use crate::constants::jit_option::{
    CACHE_MODE, FMA, LTO, MAX_REGISTERS, OPTIMIZATION_LEVEL, OPTIMIZE_UNUSED_DEVICE_VARIABLES,
    SPLIT_COMPILE, THREADS_PER_BLOCK,
};

/// Returns whether the value of a `CUjit_option` is a plain number that only the compiler reads: not a pointer, not an
/// output.
pub const fn is_plain_jit_option(option: u32) -> bool {
    matches!(
        option,
        MAX_REGISTERS
            | THREADS_PER_BLOCK
            | OPTIMIZATION_LEVEL..=CACHE_MODE
            | LTO..=FMA
            | OPTIMIZE_UNUSED_DEVICE_VARIABLES..=SPLIT_COMPILE
    )
}
