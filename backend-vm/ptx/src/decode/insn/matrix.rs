//! Instructions on matrices that are distributed over the lanes of a warp.

use std::sync::Arc;

use super::{Place, Reg};
use crate::alu::half::Rounding;

/// Type of a matrix's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Element {
    F16,
    Bf16,
    Tf32,
    F32,
    F64,
    E4m3,
    E5m2,
    S32,
    S8,
    U8,
    S4,
    U4,
    /// Single bits, in words of 32.
    B1,
}

impl Element {
    /// Returns the bits of one element in registers and memory.
    pub(crate) fn bits(self) -> u32 {
        match self {
            Self::S4 | Self::U4 => 4,
            Self::S8 | Self::U8 | Self::E4m3 | Self::E5m2 => 8,
            Self::F16 | Self::Bf16 => 16,
            Self::Tf32 | Self::F32 | Self::S32 | Self::B1 => 32,
            Self::F64 => 64,
        }
    }
}

/// Registers in which the lanes of a warp hold a matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fragment {
    pub element: Element,
    pub regs: Box<[Reg]>,
    /// Index of each element in the matrix, row by row; ordered by register, by position in the
    /// register, by lane.
    pub positions: Arc<[u16]>,
}

/// Operation that multiplies single bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BitProduct {
    Xor,
    And,
}

/// `d = a * b + c`
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Multiply {
    pub rows: u32,
    pub columns: u32,
    /// Columns of `a` and rows of `b`.
    pub inner: u32,
    /// Number of products in one instruction.
    pub blocks: u32,
    pub a: Fragment,
    pub b: Fragment,
    pub c: Fragment,
    pub d: Fragment,
    /// Whether integer sums are clamped.
    pub saturate: bool,
    pub bits: Option<BitProduct>,
    /// Rounding of sums in double precision.
    pub rounding: Rounding,
}

/// Access to matrices of 8 by 8 elements of 16 bits, whose rows lie anywhere in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tiles {
    pub load: bool,
    /// Registers, one for each matrix.
    pub regs: Box<[Reg]>,
    /// Addresses: that of lane `8 i + j` is the address of row `j` of matrix `i`.
    pub place: Place,
    pub transposed: bool,
}

/// Operation on matrices that are distributed over the lanes of a warp.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Matrix {
    Multiply(Multiply),
    /// `wmma.load` and `wmma.store`
    Access {
        store: bool,
        fragment: Fragment,
        /// Number of columns of the matrix.
        columns: u32,
        place: Place,
        /// Distance from one row, or column, to the next, in elements.
        stride: Reg,
        by_rows: bool,
    },
    Tiles(Tiles),
    /// `movmatrix`
    Transpose {
        d: Reg,
        a: Reg,
    },
}
