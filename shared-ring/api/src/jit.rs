//! Compiler options.

/// Whether the value of a `CUjit_option` is a plain number that only the compiler reads: no pointer, no
/// place for an answer.
pub const fn is_plain_jit_option(option: u32) -> bool {
    matches!(option, 0 | 1 | 7..=14 | 20..=24 | 29..=34)
}
