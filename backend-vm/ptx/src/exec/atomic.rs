//! Atomic read-modify-write operations (PTX ISA 9.7.13.3).
//!
//! On global memory they are the host's atomic operations, sequentially
//! consistent, so that blocks on other threads and the guest's CPU see them as
//! such. Shared and local memory belong to one thread of the host.

use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use super::frame::Frame;
use super::memory::{LaneFault, Lanes, Spaces, Target, addresses};
use crate::alu::Slot;
use crate::alu::half::{Bf16, F16, Rounding, Short};
use crate::decode::insn::{Atomic, AtomicOp};

/// A width of atomic operations.
trait Cell: Slot + Eq {
    /// Replaces the value by `f` of it; the old value.
    ///
    /// # Safety
    ///
    /// `at` is valid for reads and writes and aligned, and only accessed atomically meanwhile.
    unsafe fn update(at: *mut u8, f: impl Fn(Self) -> Self) -> Self;
    fn of(bytes: &[u8]) -> Self;
    fn store(self, bytes: &mut [u8]);
}

macro_rules! cell {
    ($($t:ty, $atomic:ty;)*) => {$(
        impl Cell for $t {
            unsafe fn update(at: *mut u8, f: impl Fn(Self) -> Self) -> Self {
                // SAFETY: the caller vouches for validity, alignment and atomicity.
                let cell = unsafe { <$atomic>::from_ptr(at.cast()) };
                let mut old = cell.load(Ordering::Relaxed);
                loop {
                    match cell.compare_exchange_weak(old, f(old), Ordering::SeqCst, Ordering::Relaxed) {
                        Ok(old) => return old,
                        Err(found) => old = found,
                    }
                }
            }
            fn of(bytes: &[u8]) -> Self {
                bytes.try_into().map_or(0, <$t>::from_le_bytes)
            }
            fn store(self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&self.to_le_bytes());
            }
        }
    )*};
}
cell! { u16, AtomicU16; u32, AtomicU32; u64, AtomicU64; }

fn add_short<T: Short>(old: u16, a: u16) -> u16 {
    let sum = T::of(old).wide() + T::of(a).wide();
    if sum.is_nan() {
        T::NAN.bits()
    } else {
        T::narrow(sum, Rounding::Nearest).bits()
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the halves of a pair")]
fn add_pair<T: Short>(old: u32, a: u32) -> u32 {
    let high = add_short::<T>((old >> 16) as u16, (a >> 16) as u16);
    u32::from(high) << 16 | u32::from(add_short::<T>(old as u16, a as u16))
}

/// The new value for an old one, on slots of 2, 4 or 8 bytes.
#[expect(
    clippy::cast_possible_truncation,
    reason = "a slot is read by its low bits"
)]
fn apply(op: AtomicOp, size: u32, old: u64, a: u64, b: u64) -> u64 {
    let signed = |x: u64| {
        if size == 4 {
            i64::from((x as u32).cast_signed())
        } else {
            x.cast_signed()
        }
    };
    let (old32, a32) = (old as u32, a as u32);
    match op {
        AtomicOp::And => old & a,
        AtomicOp::Or => old | a,
        AtomicOp::Xor => old ^ a,
        AtomicOp::Exchange => a,
        AtomicOp::CompareExchange => {
            if old == a {
                b
            } else {
                old
            }
        }
        AtomicOp::Add => old.wrapping_add(a),
        AtomicOp::AddF32 => (f32::from_bits(old32) + f32::from_bits(a32)).put(),
        AtomicOp::AddF64 => (f64::from_bits(old) + f64::from_bits(a)).put(),
        AtomicOp::AddF16 => u64::from(add_short::<F16>(old as u16, a as u16)),
        AtomicOp::AddBf16 => u64::from(add_short::<Bf16>(old as u16, a as u16)),
        AtomicOp::AddF16x2 => u64::from(add_pair::<F16>(old32, a32)),
        AtomicOp::AddBf16x2 => u64::from(add_pair::<Bf16>(old32, a32)),
        AtomicOp::Increment => u64::from(if old32 >= a32 { 0 } else { old32 + 1 }),
        AtomicOp::Decrement => u64::from(if old32 == 0 || old32 > a32 {
            a32
        } else {
            old32 - 1
        }),
        AtomicOp::MinUnsigned => old.min(a),
        AtomicOp::MaxUnsigned => old.max(a),
        AtomicOp::MinSigned => {
            if signed(a) < signed(old) {
                a
            } else {
                old
            }
        }
        AtomicOp::MaxSigned => {
            if signed(a) > signed(old) {
                a
            } else {
                old
            }
        }
    }
}

/// Executes the operation for the lanes of `mask`, one after another.
pub(super) fn execute(
    spaces: &mut Spaces<'_, '_>,
    frame: &mut Frame,
    atomic: &Atomic,
    mask: u32,
) -> Result<(), LaneFault> {
    match atomic.size {
        2 => execute_as::<u16>(spaces, frame, atomic, mask),
        4 => execute_as::<u32>(spaces, frame, atomic, mask),
        _ => execute_as::<u64>(spaces, frame, atomic, mask),
    }
}

fn execute_as<T: Cell>(
    spaces: &mut Spaces<'_, '_>,
    frame: &mut Frame,
    atomic: &Atomic,
    mask: u32,
) -> Result<(), LaneFault> {
    let addresses = addresses(frame, atomic.base, atomic.offset);
    let (op, size) = (atomic.op, atomic.size);
    for lane in Lanes(mask) {
        // Through the type, so that bits beyond the width play no part.
        let a = T::get(frame.rows[atomic.a as usize][lane]).put();
        let b = T::get(frame.rows[atomic.b as usize][lane]).put();
        let f = |old: T| T::get(apply(op, size, old.put(), a, b));
        let target = spaces.atomic_target(atomic.space, lane, addresses[lane], size);
        let target = target.map_err(|kind| LaneFault {
            kind,
            lane: u32::try_from(lane).unwrap_or(0),
        })?;
        let old = match target {
            // SAFETY: `atomic_target` found the aligned bytes inside a writable region that stays valid.
            Target::Global(at) => unsafe { T::update(at, f) },
            Target::Private(bytes) => {
                let old = T::of(bytes);
                f(old).store(bytes);
                old
            }
        };
        if let Some(dest) = atomic.dest {
            frame.rows[dest as usize][lane] = old.put();
        }
    }
    Ok(())
}
