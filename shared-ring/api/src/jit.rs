//! Compiler options.

/// Returns whether the value of a `CUjit_option` is a plain number that only the compiler reads: not a pointer, not an
/// output.
pub const fn is_plain_jit_option(option: u32) -> bool {
    matches!(option, 0 | 1 | 7..=14 | 20..=24 | 29..=34)
}
