//! Operations on matrices that are distributed over the lanes of a warp.
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "elements are cut from registers and rounded to their types"
)]

use super::frame::Frame;
use super::memory::{LaneFault, Lanes, Spaces};
use super::step::{lane_fault, word};
use crate::alu::half::{Bf16, F16, Rounding, Short};
use crate::alu::narrow::byte_value;
use crate::alu::round::fma_double;
use crate::alu::{LANES, Slot};
use crate::decode::insn::{
    AddressSpace, BitProduct, Element, Fragment, Matrix, Multiply, Place, Reg, Tiles,
};
use crate::error::FaultKind;
use crate::limits::MAX_MATRIX_ELEMENTS;

/// Returns the value of an element of a floating-point type.
fn float(element: Element, bits: u64) -> f64 {
    match element {
        Element::F16 => f64::from(F16::get(bits).wide()),
        Element::Bf16 => f64::from(Bf16::get(bits).wide()),
        // Bits beyond a significand of 10 bits are ignored.
        Element::Tf32 => f64::from(f32::from_bits(bits as u32 & !0x1fff)),
        Element::F32 => f64::from(f32::from_bits(bits as u32)),
        Element::E4m3 => f64::from(byte_value(true, bits as u8)),
        Element::E5m2 => f64::from(byte_value(false, bits as u8)),
        _ => f64::from_bits(bits),
    }
}

/// Rounds a sum to its type, and returns the bits.
fn rounded(element: Element, value: f64) -> u64 {
    match element {
        Element::F16 => F16::narrow(value, Rounding::Nearest).put(),
        Element::F32 if value.is_nan() => 0x7fff_ffff,
        Element::F32 => (value as f32).put(),
        _ => value.to_bits(),
    }
}

/// Returns the value of an element of an integer type.
fn integer(element: Element, bits: u64) -> i64 {
    match element {
        Element::S8 => i64::from(bits as i8),
        Element::U8 => i64::from(bits as u8),
        Element::S4 => i64::from((bits as i8) << 4 >> 4),
        Element::U4 => i64::from(bits as u8 & 15),
        _ => i64::from(bits as i32),
    }
}

impl Fragment {
    /// Returns, for every element of every register, the register, the shift of the element's bits,
    /// and the positions in all lanes.
    fn pieces(&self) -> impl Iterator<Item = (Reg, u32, &[u16; LANES])> {
        let packed = self.positions.len() / LANES / self.regs.len().max(1);
        let (positions, _) = self.positions.as_chunks::<LANES>();
        positions.iter().enumerate().map(move |(index, positions)| {
            let shift = u32::try_from(index % packed).unwrap_or(0) * self.element.bits();
            (self.regs[index / packed], shift, positions)
        })
    }

    /// Gathers the matrix from the lanes' registers.
    fn gather<T: Copy>(&self, frame: &Frame, zero: T, value: impl Fn(u64) -> T) -> Vec<T> {
        let mut matrix = vec![zero; MAX_MATRIX_ELEMENTS as usize];
        for (reg, shift, positions) in self.pieces() {
            for (slot, &position) in frame.rows[reg as usize].iter().zip(positions) {
                matrix[usize::from(position)] = value(slot >> shift);
            }
        }
        matrix
    }

    /// Stores the elements of a matrix in the registers of the lanes of `mask`.
    fn scatter(&self, frame: &mut Frame, mask: u32, bits: impl Fn(usize) -> u64) {
        for (reg, shift, positions) in self.pieces() {
            let row = &mut frame.rows[reg as usize];
            for lane in Lanes(mask) {
                let value = bits(usize::from(positions[lane])) << shift;
                // The first element of a register clears the bits of the others.
                row[lane] = value | if shift == 0 { 0 } else { row[lane] };
            }
        }
    }
}

/// Adds the products of a row's and a column's elements to every element of the result.
fn products<T: Copy>(
    op: &Multiply,
    (a, b): (&[T], &[T]),
    sums: &mut [T],
    multiply_add: impl Fn(T, T, T) -> T,
) {
    let (rows, columns, inner) = (op.rows as usize, op.columns as usize, op.inner as usize);
    for block in 0..op.blocks as usize {
        let a = &a[block * rows * inner..][..rows * inner];
        let b = &b[block * inner * columns..][..inner * columns];
        let sums = &mut sums[block * rows * columns..][..rows * columns];
        for (a, sums) in a.chunks_exact(inner).zip(sums.chunks_exact_mut(columns)) {
            for (&a, b) in a.iter().zip(b.chunks_exact(columns)) {
                for (sum, &b) in sums.iter_mut().zip(b) {
                    *sum = multiply_add(a, b, *sum);
                }
            }
        }
    }
}

fn multiply(frame: &mut Frame, op: &Multiply, mask: u32) {
    let (a, b, c, d) = (&op.a, &op.b, &op.c, &op.d);
    match (a.element, op.bits) {
        (_, Some(bits)) => {
            let words = |fragment: &Fragment| fragment.gather(frame, 0, |bits| bits as u32);
            let mut sums = words(c);
            products(op, (&words(a), &words(b)), &mut sums, |a, b, sum| {
                let product = match bits {
                    BitProduct::Xor => a ^ b,
                    BitProduct::And => a & b,
                };
                sum.wrapping_add(product.count_ones())
            });
            d.scatter(frame, mask, |at| u64::from(sums[at]));
        }
        (Element::S8 | Element::U8 | Element::S4 | Element::U4, _) => {
            let values = |fragment: &Fragment| {
                fragment.gather(frame, 0, |bits| integer(fragment.element, bits))
            };
            let mut sums = values(c);
            products(op, (&values(a), &values(b)), &mut sums, |a, b, sum| {
                a * b + sum
            });
            let saturate = op.saturate;
            d.scatter(frame, mask, |at| {
                let sum = sums[at];
                let sum = if saturate {
                    sum.clamp(i64::from(i32::MIN), i64::from(i32::MAX))
                } else {
                    sum
                };
                u64::from(sum as u32)
            });
        }
        _ => {
            let values = |fragment: &Fragment| {
                fragment.gather(frame, 0.0, |bits| float(fragment.element, bits))
            };
            let mut sums = values(c);
            let factors = (&values(a)[..], &values(b)[..]);
            if a.element == Element::F64 {
                let rounding = op.rounding;
                products(op, factors, &mut sums, |a, b, sum| {
                    fma_double(rounding, a, b, sum)
                });
            } else {
                // Products are exact in double precision; the sum is rounded to its type at the end.
                products(op, factors, &mut sums, |a, b, sum| a * b + sum);
            }
            d.scatter(frame, mask, |at| rounded(d.element, sums[at]));
        }
    }
}

/// Reads or writes one element; `index` counts elements.
fn element_access(
    spaces: &mut Spaces<'_, '_>,
    (space, lane): (AddressSpace, usize),
    (start, index): (u64, u64),
    bits: u32,
    write: Option<u64>,
) -> Result<u64, FaultKind> {
    let at = start.wrapping_add(index.wrapping_mul(u64::from(bits)) / 8);
    macro_rules! access {
        ($t:ty) => {
            match write {
                Some(value) => spaces.write(space, lane, at, value as $t).map(|()| 0),
                None => spaces.read::<$t>(space, lane, at).map(u64::from),
            }
        };
    }
    match bits {
        4 => spaces
            .read::<u8>(space, lane, at)
            .map(|byte| u64::from(byte >> (index % 2 * 4) & 15)),
        8 => access!(u8),
        16 => access!(u16),
        32 => access!(u32),
        _ => access!(u64),
    }
}

/// Location of a fragment's matrix in memory.
struct Memory {
    columns: u32,
    place: Place,
    stride: Reg,
    by_rows: bool,
}

fn access(
    spaces: &mut Spaces<'_, '_>,
    frame: &mut Frame,
    (fragment, store): (&Fragment, bool),
    memory: &Memory,
    mask: u32,
) -> Result<(), LaneFault> {
    let starts = memory.place.addresses(frame);
    let strides = frame.rows[memory.stride as usize];
    let bits = fragment.element.bits();
    // Strides of single bits are given in bits; an element is a word of 32.
    let unit = if fragment.element == Element::B1 {
        32
    } else {
        1
    };
    for (reg, shift, positions) in fragment.pieces() {
        for lane in Lanes(mask) {
            let position = u32::from(positions[lane]);
            let (row, column) = (position / memory.columns, position % memory.columns);
            let (line, along) = if memory.by_rows {
                (row, column)
            } else {
                (column, row)
            };
            let stride = u64::from(word(&strides, lane) / unit);
            let index = (starts[lane], u64::from(line) * stride + u64::from(along));
            let slot = &mut frame.rows[reg as usize][lane];
            let write = store.then_some(*slot >> shift);
            let done = element_access(spaces, (memory.place.space, lane), index, bits, write);
            let value = done.map_err(|kind| lane_fault(kind, lane))?;
            if !store {
                *slot = value << shift | if shift == 0 { 0 } else { *slot };
            }
        }
    }
    Ok(())
}

/// Number of rows and of columns of the matrices of `ldmatrix`.
const SIDE: usize = 8;

/// Returns the row and the column of the two elements of an 8 by 8 matrix that a lane holds.
fn held(lane: usize, transposed: bool) -> [(usize, usize); 2] {
    let (outer, inner) = (lane / 4, lane % 4 * 2);
    [inner, inner + 1].map(|inner| {
        if transposed {
            (inner, outer)
        } else {
            (outer, inner)
        }
    })
}

fn tiles(
    spaces: &mut Spaces<'_, '_>,
    frame: &mut Frame,
    tiles: &Tiles,
    mask: u32,
) -> Result<(), LaneFault> {
    let addresses = tiles.place.addresses(frame);
    for (index, &reg) in tiles.regs.iter().enumerate() {
        let row = &mut frame.rows[reg as usize];
        let mut tile = [[0_u16; SIDE]; SIDE];
        if !tiles.load {
            for (lane, slot) in row.iter().enumerate() {
                let pair = held(lane, tiles.transposed);
                for ((row, column), shift) in pair.into_iter().zip([0, 16]) {
                    tile[row][column] = (slot >> shift) as u16;
                }
            }
        }
        for (line, elements) in tile.iter_mut().enumerate() {
            let lane = index * SIDE + line;
            let start = addresses[lane];
            let fault = |kind| lane_fault(kind, lane);
            if !start.is_multiple_of(16) {
                return Err(fault(FaultKind::Misaligned {
                    address: start,
                    bytes: 16,
                }));
            }
            for (element, address) in elements.iter_mut().zip((start..).step_by(2)) {
                if tiles.load {
                    let read = spaces.read::<u16>(tiles.place.space, lane, address);
                    *element = read.map_err(fault)?;
                } else {
                    let written = spaces.write(tiles.place.space, lane, address, *element);
                    written.map_err(fault)?;
                }
            }
        }
        if tiles.load {
            for lane in Lanes(mask) {
                let [low, high] =
                    held(lane, tiles.transposed).map(|(row, column)| tile[row][column]);
                row[lane] = u64::from(high) << 16 | u64::from(low);
            }
        }
    }
    Ok(())
}

fn transpose(frame: &mut Frame, d: Reg, a: Reg, mask: u32) {
    let mut tile = [[0_u16; SIDE]; SIDE];
    for (lane, slot) in frame.rows[a as usize].iter().enumerate() {
        for ((row, column), shift) in held(lane, false).into_iter().zip([0, 16]) {
            tile[row][column] = (slot >> shift) as u16;
        }
    }
    for lane in Lanes(mask) {
        let [low, high] = held(lane, true).map(|(row, column)| tile[row][column]);
        frame.rows[d as usize][lane] = u64::from(high) << 16 | u64::from(low);
    }
}

/// Executes the operation for the lanes of `mask`.
pub(super) fn execute(
    spaces: &mut Spaces<'_, '_>,
    frame: &mut Frame,
    matrix: &Matrix,
    mask: u32,
) -> Result<(), LaneFault> {
    match matrix {
        Matrix::Multiply(op) => multiply(frame, op, mask),
        Matrix::Access {
            store,
            fragment,
            columns,
            place,
            stride,
            by_rows,
        } => {
            let memory = Memory {
                columns: *columns,
                place: *place,
                stride: *stride,
                by_rows: *by_rows,
            };
            return access(spaces, frame, (fragment, *store), &memory, mask);
        }
        Matrix::Tiles(op) => return tiles(spaces, frame, op, mask),
        Matrix::Transpose { d, a } => transpose(frame, *d, *a, mask),
    }
    Ok(())
}
