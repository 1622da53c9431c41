//! Matrices that the lanes of a warp hold together.

use std::sync::Arc;

use super::{Place, Reg};
use crate::alu::half::Rounding;

/// The type of a matrix's elements.
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
    /// Single bits, which are taken 32 at a time.
    B1,
}

impl Element {
    /// Bits of one element in registers and memory.
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

/// What the lanes of a warp hold of a matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fragment {
    pub element: Element,
    pub regs: Box<[Reg]>,
    /// Where an element lies in the matrix, row by row: by register, by its place in the
    /// register, by lane.
    pub positions: Arc<[u16]>,
}

/// How bits are multiplied.
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
    /// Products in one instruction.
    pub blocks: u32,
    pub a: Fragment,
    pub b: Fragment,
    pub c: Fragment,
    pub d: Fragment,
    /// Whether integer sums are clamped.
    pub saturate: bool,
    pub bits: Option<BitProduct>,
    /// Of sums in double precision.
    pub rounding: Rounding,
}

/// Matrices of 8 by 8 elements of 16 bits, whose rows lie anywhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tiles {
    pub load: bool,
    /// One for each matrix.
    pub regs: Box<[Reg]>,
    /// Lane `8 i + j` has the address of row `j` of matrix `i`.
    pub place: Place,
    pub transposed: bool,
}

/// An operation on matrices that the lanes of a warp hold together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Matrix {
    Multiply(Multiply),
    /// `wmma.load` and `wmma.store`
    Access {
        store: bool,
        fragment: Fragment,
        /// Of the matrix.
        columns: u32,
        place: Place,
        /// From one row, or column, to the next, in elements.
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
