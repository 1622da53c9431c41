//! Positions of matrix elements in the registers of a warp's lanes.
//!
//! A table of positions is computed once for each kind of fragment, when a kernel is decoded.
//! Fragments of `mma` have the documented layout. PTX leaves the layout of `wmma`
//! fragments open: these store elements lane after lane.

use std::sync::Arc;

use super::insn::Element;
use crate::alu::LANES;

/// Shape of a product: rows, columns, and the number of terms summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    pub m: u32,
    pub n: u32,
    pub k: u32,
}

impl Shape {
    /// Parses a shape such as `m16n8k16`.
    pub(super) fn named(name: &str) -> Option<Self> {
        let (m, rest) = name.strip_prefix('m')?.split_once('n')?;
        let (n, k) = rest.split_once('k')?;
        let extent = |text: &str| {
            text.parse()
                .ok()
                .filter(|extent| (4..=256).contains(extent))
        };
        Some(Self {
            m: extent(m)?,
            n: extent(n)?,
            k: extent(k)?,
        })
    }

    /// Returns the shape in units of the element: a word of 32 bits, for single bits.
    pub(super) fn units(self, element: Element) -> Self {
        let words = if element == Element::B1 { 32 } else { 1 };
        Self {
            k: self.k / words,
            ..self
        }
    }
}

impl Element {
    pub(super) fn named(name: &str) -> Option<Self> {
        Some(match name {
            "f16" => Self::F16,
            "bf16" => Self::Bf16,
            "tf32" => Self::Tf32,
            "f32" => Self::F32,
            "f64" => Self::F64,
            "e4m3" => Self::E4m3,
            "e5m2" => Self::E5m2,
            "s32" => Self::S32,
            "s8" => Self::S8,
            "u8" => Self::U8,
            "s4" => Self::S4,
            "u4" => Self::U4,
            "b1" => Self::B1,
            _ => return None,
        })
    }

    /// Returns the number of elements in a register.
    pub(super) fn packed(self) -> u32 {
        32_u32.checked_div(self.bits()).unwrap_or(1).max(1)
    }

    /// Returns whether products of elements of this type may accumulate in type `sum`.
    pub(super) fn sums_to(self, sum: Self) -> bool {
        match self {
            Self::F16 | Self::E4m3 | Self::E5m2 => matches!(sum, Self::F16 | Self::F32),
            Self::Bf16 | Self::Tf32 => sum == Self::F32,
            Self::S8 | Self::U8 | Self::S4 | Self::U4 | Self::B1 => sum == Self::S32,
            Self::F64 => sum == Self::F64,
            Self::F32 | Self::S32 => false,
        }
    }

    /// Returns whether elements may be multiplied by those of `other`: integers may differ in sign,
    /// bytes in format.
    pub(super) fn multiplies(self, other: Self) -> bool {
        let kind = |element: Self| match element {
            Self::U8 => Self::S8,
            Self::U4 => Self::S4,
            Self::E5m2 => Self::E4m3,
            other => other,
        };
        kind(self) == kind(other)
    }
}

/// Matrix of a product that a fragment belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Role {
    A,
    B,
    Sum,
}

impl Role {
    /// Returns the number of rows and columns of the matrix.
    pub(super) fn extents(self, shape: Shape) -> (u32, u32) {
        match self {
            Self::A => (shape.m, shape.k),
            Self::B => (shape.k, shape.n),
            Self::Sum => (shape.m, shape.n),
        }
    }
}

/// Returns the row and column of an element of an `mma` fragment: element `index` of register
/// `reg`.
fn mma_position(
    role: Role,
    shape: Shape,
    packed: u32,
    lane: u32,
    reg: u32,
    index: u32,
) -> (u32, u32) {
    let (group, inner) = (lane / 4, lane % 4);
    let halves = shape.m / 8;
    match role {
        // Registers alternate between the upper and the lower rows, then go along `k`.
        Role::A => (
            group + 8 * (reg % halves),
            (reg / halves * 4 + inner) * packed + index,
        ),
        Role::B => ((reg * 4 + inner) * packed + index, group),
        Role::Sum => {
            let index = reg * packed + index;
            (group + 8 * (index / 2), inner * 2 + index % 2)
        }
    }
}

/// Returns the row and column for `mma.m8n8k4` on halves, which is four products, each by two
/// groups of four lanes.
fn quad_position(role: Role, row_major: bool, wide: bool, lane: u32, index: u32) -> (u32, u32) {
    let (inner, upper) = (lane % 4, if lane < 16 { 0 } else { 4 });
    match (role, row_major) {
        (Role::A, true) => (inner + upper, index),
        (Role::A, false) => (index % 4 + upper, inner),
        (Role::B, true) => (inner, index + upper),
        (Role::B, false) => (index, inner + upper),
        (Role::Sum, _) if wide => (
            (lane & 1) + (index & 2) + upper,
            (index & 4) + (lane & 2) + (index & 1),
        ),
        (Role::Sum, _) => (inner + upper, index),
    }
}

/// Layout of the fragments of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Layout {
    Wmma,
    Mma,
    /// `mma.m8n8k4` on halves, and whether A and B are row-major.
    Quads(bool, bool),
}

impl Layout {
    /// Returns the number of products in one instruction.
    pub(super) fn blocks(self) -> u32 {
        if matches!(self, Self::Quads(..)) {
            4
        } else {
            1
        }
    }
}

/// Parameters that determine the positions of a fragment's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct FragmentKind {
    pub(super) role: Role,
    /// Shape in units of the element.
    pub(super) shape: Shape,
    pub(super) element: Element,
    pub(super) layout: Layout,
    /// Number of registers of a lane.
    pub(super) count: u32,
}

impl FragmentKind {
    /// Returns the index of each element in its matrix, row by row. The table is ordered by
    /// register, by position in the register, by lane.
    pub(super) fn positions(self) -> Arc<[u16]> {
        let packed = self.element.packed();
        let (rows, columns) = self.role.extents(self.shape);
        let total = rows * columns * self.layout.blocks();
        let position = |reg: u32, index: u32, lane: u32| {
            let all = reg * packed + index;
            match self.layout {
                Layout::Wmma => (lane * self.count * packed + all) % total,
                Layout::Mma => {
                    let (row, column) =
                        mma_position(self.role, self.shape, packed, lane, reg, index);
                    row * columns + column
                }
                Layout::Quads(a_rows, b_rows) => {
                    let by_rows = if self.role == Role::A { a_rows } else { b_rows };
                    let wide = self.element == Element::F32;
                    let (row, column) = quad_position(self.role, by_rows, wide, lane, all);
                    let block = lane / 4 % 4;
                    (block * rows + row) * columns + column
                }
            }
        };
        let mut positions = Vec::new();
        for reg in 0..self.count {
            for index in 0..packed {
                for lane in (0..).take(LANES) {
                    let position = position(reg, index, lane);
                    positions.push(u16::try_from(position).unwrap_or(u16::MAX));
                }
            }
        }
        positions.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that exactly one lane of an `mma` fragment holds each element of a matrix.
    #[test]
    fn fragments_of_mma_cover_their_matrices() {
        let shapes = [
            (8, 4, 1),
            (8, 16, 4),
            (16, 8, 2),
            (16, 16, 2),
            (16, 4, 1),
            (16, 32, 4),
            (16, 64, 8),
            (16, 16, 1),
        ];
        for (m, k, packed) in shapes {
            let shape = Shape { m, n: 8, k };
            for (role, packed) in [(Role::A, packed), (Role::B, packed), (Role::Sum, 1)] {
                let (rows, columns) = role.extents(shape);
                let mut seen = vec![0; (rows * columns) as usize];
                for lane in 0..32 {
                    for reg in 0..rows * columns / 32 / packed {
                        for index in 0..packed {
                            let (row, column) = mma_position(role, shape, packed, lane, reg, index);
                            assert!(row < rows && column < columns, "{role:?} {shape:?}");
                            seen[(row * columns + column) as usize] += 1;
                        }
                    }
                }
                assert!(seen.iter().all(|&count| count == 1), "{role:?} {shape:?}");
            }
        }
    }
}
