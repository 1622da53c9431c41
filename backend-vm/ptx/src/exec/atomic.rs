//! Atomic read-modify-write operations (PTX ISA 9.7.13.3).
//!
//! Operations on global memory are the host's atomic operations, sequentially consistent, so that
//! blocks on other threads and the guest's CPU see them as atomic. Only one host thread accesses
//! shared and local memory.

use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use super::frame::Frame;
use super::memory::{LaneFault, Lanes, Spaces, Target};
use super::step::lane_fault;
use crate::alu::Slot;
use crate::alu::float::{canonical, flush};
use crate::alu::half::{Bf16, F16, Short};
use crate::decode::insn::{self as decode, Atomic, AtomicOp, ShortOp};
use crate::error::FaultKind;

/// Width of atomic operations.
trait Cell: Slot + Eq {
    /// Replaces the value by `f` of it, and returns the old value.
    ///
    /// # Safety
    ///
    /// `at` is valid for reads and writes and aligned, and only accessed atomically meanwhile.
    unsafe fn update(at: *mut u8, f: impl Fn(Self) -> Self) -> Self;
    /// Applies `op` with operands `a` and `b`, and returns the old value: by the processor's
    /// instruction for `op` if it has one, otherwise by `f`.
    ///
    /// # Safety
    ///
    /// As for `update`.
    unsafe fn operate(
        at: *mut u8,
        op: AtomicOp,
        a: Self,
        b: Self,
        f: impl Fn(Self) -> Self,
    ) -> Self;
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
            #[inline]
            unsafe fn operate(
                at: *mut u8,
                op: AtomicOp,
                a: Self,
                b: Self,
                f: impl Fn(Self) -> Self,
            ) -> Self {
                const ORDER: Ordering = Ordering::SeqCst;
                // SAFETY: the caller vouches for validity, alignment and atomicity.
                let cell = unsafe { <$atomic>::from_ptr(at.cast()) };
                match op {
                    AtomicOp::Add => cell.fetch_add(a, ORDER),
                    AtomicOp::Exchange => cell.swap(a, ORDER),
                    AtomicOp::CompareExchange => match cell.compare_exchange(a, b, ORDER, ORDER) {
                        Ok(old) | Err(old) => old,
                    },
                    // SAFETY: as above.
                    _ => unsafe { Self::update(at, f) },
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

fn combine_short<T: Short>(op: ShortOp, old: u16, a: u16) -> u16 {
    let (x, y) = (T::of(old).wide(), T::of(a).wide());
    match op {
        ShortOp::Add => T::nearest(x + y).bits(),
        ShortOp::Min => extreme::<T>(x < y || (x == y && x.is_sign_negative()), old, a),
        ShortOp::Max => extreme::<T>(x > y || (x == y && y.is_sign_negative()), old, a),
    }
}

/// Returns `old` if `first`, else `a`; the other one if that is a NaN, and the canonical NaN if both
/// are.
fn extreme<T: Short>(first: bool, old: u16, a: u16) -> u16 {
    match (T::of(old).wide().is_nan(), T::of(a).wide().is_nan()) {
        (true, true) => T::NAN.bits(),
        (true, false) => a,
        (false, true) => old,
        (false, false) if first => old,
        (false, false) => a,
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the halves of a pair")]
fn combine_shorts(kind: decode::Short, old: u32, a: u32) -> u32 {
    let one = |old: u32, a: u32| {
        let (old, a) = (old as u16, a as u16);
        u32::from(if kind.bfloat {
            combine_short::<Bf16>(kind.op, old, a)
        } else {
            combine_short::<F16>(kind.op, old, a)
        })
    };
    let low = one(old, a);
    if kind.pair {
        one(old >> 16, a >> 16) << 16 | low
    } else {
        low
    }
}

/// Returns the new value for an old one, on slots of 2, 4 or 8 bytes.
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
        AtomicOp::AddF32 => canonical(f32::from_bits(old32) + f32::from_bits(a32)).put(),
        AtomicOp::AddF64 => (f64::from_bits(old) + f64::from_bits(a)).put(),
        AtomicOp::Short(kind) => u64::from(combine_shorts(kind, old32, a32)),
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

/// Executes the operation for the lanes of `mask`, one after another, and returns whether any changed
/// memory.
pub(super) fn execute(
    spaces: &mut Spaces<'_, '_>,
    frame: &mut Frame,
    atomic: &Atomic,
    mask: u32,
) -> Result<bool, LaneFault> {
    match atomic.size {
        2 => execute_as::<u16>(spaces, frame, atomic, mask),
        4 => execute_as::<u32>(spaces, frame, atomic, mask),
        16 => execute_wide(spaces, frame, atomic, mask),
        _ => execute_as::<u64>(spaces, frame, atomic, mask),
    }
}

/// Combines a value with an element of global memory, of 4 or 8 bytes.
///
/// # Safety
///
/// `at` is valid for reads and writes of `size` bytes, and aligned, and only accessed atomically
/// meanwhile.
pub(super) unsafe fn reduce(
    at: *mut u8,
    op: AtomicOp,
    size: u32,
    value: u64,
) -> Result<(), FaultKind> {
    match size {
        4 => {
            let value = u32::get(value).put();
            // SAFETY: the caller vouches for the element.
            unsafe { u32::update(at, |old| u32::get(apply(op, 4, old.put(), value, value))) };
        }
        // SAFETY: the caller vouches for the element.
        8 => _ = unsafe { u64::update(at, |old| apply(op, 8, old, value, value)) },
        _ => {
            let what = "a reduction has elements of 4 or 8 bytes";
            return Err(FaultKind::IllegalInstruction(what));
        }
    }
    Ok(())
}

/// Resolves the memory that a lane operates on.
fn target<'m>(
    spaces: &'m mut Spaces<'_, '_>,
    atomic: &Atomic,
    lane: usize,
    address: u64,
) -> Result<Target<'m>, LaneFault> {
    let (space, bytes) = (atomic.place.space, atomic.align);
    if address & u64::from(bytes - 1) != 0 {
        let kind = FaultKind::Misaligned { address, bytes };
        return Err(lane_fault(kind, lane));
    }
    if spaces.watch.is_some() {
        spaces.watch_atomic(lane, space, address, atomic.size);
    }
    let target = spaces.atomic_target(space, lane, address, atomic.size);
    target.map_err(|kind| lane_fault(kind, lane))
}

/// Executes `exch` and `cas` on 16 bytes.
fn execute_wide(
    spaces: &mut Spaces<'_, '_>,
    frame: &mut Frame,
    atomic: &Atomic,
    mask: u32,
) -> Result<bool, LaneFault> {
    let mut changed = false;
    let addresses = atomic.place.addresses(frame);
    for lane in Lanes(mask) {
        let wide = |reg: u32| {
            let [low, high] = [reg, reg + 1].map(|reg| frame.rows[reg as usize][lane]);
            u128::from(high) << 64 | u128::from(low)
        };
        let (a, b) = (wide(atomic.a), wide(atomic.b));
        let compares = atomic.op == AtomicOp::CompareExchange;
        let f = |old: u128| match compares {
            true if old == a => b,
            true => old,
            false => a,
        };
        let old = match target(spaces, atomic, lane, addresses[lane])? {
            // SAFETY: `target` found the aligned bytes inside a writable region that stays valid.
            Target::Global(at) => unsafe { update_wide(at, f) }.ok_or_else(|| {
                let what = "this processor has no atomic operations on 128 bits";
                lane_fault(FaultKind::IllegalInstruction(what), lane)
            })?,
            Target::Private(bytes) => {
                let old = (&*bytes).try_into().map_or(0, u128::from_le_bytes);
                bytes.copy_from_slice(&f(old).to_le_bytes());
                old
            }
        };
        changed |= f(old) != old;
        if let Some(dest) = atomic.dest {
            #[expect(clippy::cast_possible_truncation, reason = "the halves of the value")]
            let halves = [old as u64, (old >> 64) as u64];
            for (reg, half) in (dest..).zip(halves) {
                frame.rows[reg as usize][lane] = half;
            }
        }
    }
    Ok(changed)
}

/// Replaces 16 bytes of global memory by `f` of them. Returns the old ones, `None` if the processor
/// lacks `cmpxchg16b`.
///
/// # Safety
///
/// `at` is valid for reads and writes and aligned to 16, and only accessed atomically meanwhile.
unsafe fn update_wide(at: *mut u8, f: impl Fn(u128) -> u128) -> Option<u128> {
    if !std::arch::is_x86_feature_detected!("cmpxchg16b") {
        return None;
    }
    let mut old = 0;
    loop {
        // SAFETY: the caller vouches for the bytes, and the processor has the instruction.
        let found = unsafe { exchange_wide(at, old, f(old)) };
        if found == old {
            return Some(old);
        }
        old = found;
    }
}

/// Stores `new` if the memory holds `old`, and returns the value found.
///
/// # Safety
///
/// As for [`update_wide`], and the processor has `cmpxchg16b`.
#[expect(clippy::cast_possible_truncation, reason = "the halves of the values")]
unsafe fn exchange_wide(at: *mut u8, old: u128, new: u128) -> u128 {
    let (mut low, mut high) = (old as u64, (old >> 64) as u64);
    // SAFETY: reads and writes the 16 bytes that the caller vouches for. The compiler reserves `rbx`,
    // in which the instruction expects the low half of the new value; the assembly restores it.
    unsafe {
        std::arch::asm!(
            "xchg {new_low}, rbx",
            "lock cmpxchg16b [rdi]",
            "mov rbx, {new_low}",
            in("rdi") at,
            new_low = inout(reg) new as u64 => _,
            in("rcx") (new >> 64) as u64,
            inout("rax") low,
            inout("rdx") high,
            options(nostack),
        );
    }
    u128::from(high) << 64 | u128::from(low)
}

fn execute_as<T: Cell>(
    spaces: &mut Spaces<'_, '_>,
    frame: &mut Frame,
    atomic: &Atomic,
    mask: u32,
) -> Result<bool, LaneFault> {
    let mut changed = false;
    let addresses = atomic.place.addresses(frame);
    let (op, size) = (atomic.op, atomic.size);
    for lane in Lanes(mask) {
        // `T` drops the bits beyond the width.
        let a = T::get(frame.rows[atomic.a as usize][lane]).put();
        let b = T::get(frame.rows[atomic.b as usize][lane]).put();
        let f = |old: T| T::get(apply(op, size, old.put(), a, b));
        let target = target(spaces, atomic, lane, addresses[lane])?;
        let old = match target {
            // On global memory, additions of singles flush subnormals (PTX ISA 9.7.13.5).
            Target::Global(at) if op == AtomicOp::AddF32 => {
                let sum = |old: T| {
                    let single = |bits: u64| flush(f32::get(bits));
                    T::get(canonical(flush(single(old.put()) + single(a))).put())
                };
                // SAFETY: `target` found the aligned bytes inside a writable region that stays valid.
                unsafe { T::update(at, sum) }
            }
            // SAFETY: as above.
            Target::Global(at) => unsafe { T::operate(at, op, T::get(a), T::get(b), f) },
            Target::Private(bytes) => {
                let old = T::of(bytes);
                f(old).store(bytes);
                old
            }
        };
        changed |= f(old) != old;
        if let Some(dest) = atomic.dest {
            frame.rows[dest as usize][lane] = old.put();
        }
    }
    Ok(changed)
}
