//! Lane-wise operations, applied to the 32 lanes of a warp.
//!
//! A handler receives the rows of a frame, a mask of active lanes and the indices of its operands.
//! All lanes are computed and the active ones stored: the loops have no branches, so the compiler
//! vectorizes them. A vectorized handler exists twice, for any x86-64 and for AVX2 with FMA.

pub(crate) mod compare;
pub(crate) mod convert;
pub(crate) mod float;
pub(crate) mod half;
pub(crate) mod int;
pub(crate) mod narrow;
pub(crate) mod round;
pub(crate) mod short;
pub(crate) mod video;

/// Number of threads of a warp.
pub(crate) const LANES: usize = 32;

/// One register of the 32 lanes.
pub(crate) type Row = [u64; LANES];

/// Indices of rows: the destination first, then the sources. A handler with fewer sources may use
/// the last index for modifiers.
pub(crate) type Ops = [u32; 5];

/// Handler that computes a row from others.
pub(crate) type Alu = fn(&mut [Row], u32, &Ops);

/// Handler that compares two rows and returns the mask of lanes in which the comparison holds.
pub(crate) type Compare = fn(&[Row], u32, u32) -> u32;

/// Type that a register slot can hold.
pub(crate) trait Slot: Copy {
    /// Reads the low bits of a slot.
    fn get(slot: u64) -> Self;
    /// Fills a slot: signed types extend their sign, others are padded with zeros.
    fn put(self) -> u64;
}

macro_rules! int_slot {
    ($($unsigned:ty, $signed:ty, $wide:ty;)*) => {$(
        impl Slot for $unsigned {
            #[inline(always)]
            #[allow(clippy::cast_possible_truncation, clippy::unnecessary_cast, reason = "a slot is read by its low bits")]
            fn get(slot: u64) -> Self { slot as $unsigned }
            #[inline(always)]
            #[allow(clippy::cast_lossless, clippy::unnecessary_cast, reason = "one macro for every width")]
            fn put(self) -> u64 { self as u64 }
        }
        impl Slot for $signed {
            #[inline(always)]
            #[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "a slot is read by its low bits")]
            fn get(slot: u64) -> Self { slot as $signed }
            #[inline(always)]
            #[allow(clippy::cast_sign_loss, clippy::cast_lossless, clippy::unnecessary_cast, reason = "sign extension is what is meant")]
            fn put(self) -> u64 { self as i64 as u64 }
        }
    )*};
}
int_slot! { u8, i8, u16; u16, i16, u32; u32, i32, u64; u64, i64, u128; }

impl Slot for f32 {
    #[inline(always)]
    fn get(slot: u64) -> Self {
        Self::from_bits(u32::get(slot))
    }
    #[inline(always)]
    fn put(self) -> u64 {
        u64::from(self.to_bits())
    }
}

impl Slot for f64 {
    #[inline(always)]
    fn get(slot: u64) -> Self {
        Self::from_bits(slot)
    }
    #[inline(always)]
    fn put(self) -> u64 {
        self.to_bits()
    }
}

/// Stores the active lanes of `out`.
#[inline(always)]
pub(crate) fn commit(row: &mut Row, out: &Row, mask: u32) {
    if mask == u32::MAX {
        *row = *out;
    } else {
        for lane in 0..LANES {
            row[lane] = if mask >> lane & 1 == 1 {
                out[lane]
            } else {
                row[lane]
            };
        }
    }
}

/// Number of lanes computed together. As many as fit in vector registers, since a row stored in one
/// width and loaded in another stalls the processor.
const CHUNK: usize = 8;

/// Returns the lanes of a chunk of a row.
#[inline(always)]
fn lanes(rows: &[Row], reg: u32, chunk: usize) -> &[u64; CHUNK] {
    &rows[reg as usize].as_chunks::<CHUNK>().0[chunk]
}

/// Computes a row chunk by chunk: `f` maps the rows and the chunk's number to the chunk's lanes.
#[inline(always)]
fn by_chunks(rows: &mut [Row], mask: u32, dest: u32, f: impl Fn(&[Row], usize) -> [u64; CHUNK]) {
    for chunk in 0..LANES / CHUNK {
        let out = f(rows, chunk);
        let row = &mut rows[dest as usize].as_chunks_mut::<CHUNK>().0[chunk];
        if mask == u32::MAX {
            *row = out;
        } else {
            let mask = mask >> (chunk * CHUNK);
            for lane in 0..CHUNK {
                row[lane] = if mask >> lane & 1 == 1 {
                    out[lane]
                } else {
                    row[lane]
                };
            }
        }
    }
}

#[inline(always)]
pub(crate) fn one<A: Slot, R: Slot>(rows: &mut [Row], mask: u32, ops: &Ops, f: impl Fn(A) -> R) {
    by_chunks(rows, mask, ops[0], |rows, chunk| {
        let a = lanes(rows, ops[1], chunk);
        let mut out = [0; CHUNK];
        for lane in 0..CHUNK {
            out[lane] = f(A::get(a[lane])).put();
        }
        out
    });
}

#[inline(always)]
pub(crate) fn two<A: Slot, B: Slot, R: Slot>(
    rows: &mut [Row],
    mask: u32,
    ops: &Ops,
    f: impl Fn(A, B) -> R,
) {
    by_chunks(rows, mask, ops[0], |rows, chunk| {
        let (a, b) = (lanes(rows, ops[1], chunk), lanes(rows, ops[2], chunk));
        let mut out = [0; CHUNK];
        for lane in 0..CHUNK {
            out[lane] = f(A::get(a[lane]), B::get(b[lane])).put();
        }
        out
    });
}

#[inline(always)]
pub(crate) fn three<A: Slot, B: Slot, C: Slot, R: Slot>(
    rows: &mut [Row],
    mask: u32,
    ops: &Ops,
    f: impl Fn(A, B, C) -> R,
) {
    by_chunks(rows, mask, ops[0], |rows, chunk| {
        let (a, b) = (lanes(rows, ops[1], chunk), lanes(rows, ops[2], chunk));
        let c = lanes(rows, ops[3], chunk);
        let mut out = [0; CHUNK];
        for lane in 0..CHUNK {
            out[lane] = f(A::get(a[lane]), B::get(b[lane]), C::get(c[lane])).put();
        }
        out
    });
}

#[inline(always)]
pub(crate) fn four<A: Slot, B: Slot, C: Slot, D: Slot, R: Slot>(
    rows: &mut [Row],
    mask: u32,
    ops: &Ops,
    f: impl Fn(A, B, C, D) -> R,
) {
    by_chunks(rows, mask, ops[0], |rows, chunk| {
        let (a, b) = (lanes(rows, ops[1], chunk), lanes(rows, ops[2], chunk));
        let (c, d) = (lanes(rows, ops[3], chunk), lanes(rows, ops[4], chunk));
        let mut out = [0; CHUNK];
        for lane in 0..CHUNK {
            out[lane] = f(
                A::get(a[lane]),
                B::get(b[lane]),
                C::get(c[lane]),
                D::get(d[lane]),
            )
            .put();
        }
        out
    });
}

/// Applies a function to both 16-bit halves of every lane, first to all lower ones: the compiler
/// vectorizes one loop for each half.
#[inline(always)]
fn halves(f: impl Fn(usize, u32) -> u64) -> [u64; CHUNK] {
    let (mut low, mut high) = ([0; CHUNK], [0; CHUNK]);
    for (lane, out) in low.iter_mut().enumerate() {
        *out = f(lane, 0);
    }
    for (lane, out) in high.iter_mut().enumerate() {
        *out = f(lane, 16) << 16;
    }
    for (high, low) in high.iter_mut().zip(low) {
        *high |= low;
    }
    high
}

/// Applies `f` to each of the two 16-bit values of every lane.
#[inline(always)]
pub(crate) fn one_pair<T: Slot>(rows: &mut [Row], mask: u32, ops: &Ops, f: impl Fn(T) -> T) {
    by_chunks(rows, mask, ops[0], |rows, chunk| {
        let a = lanes(rows, ops[1], chunk);
        halves(|lane, half| f(T::get(a[lane] >> half)).put())
    });
}

#[inline(always)]
pub(crate) fn two_pairs<T: Slot>(rows: &mut [Row], mask: u32, ops: &Ops, f: impl Fn(T, T) -> T) {
    by_chunks(rows, mask, ops[0], |rows, chunk| {
        let (a, b) = (lanes(rows, ops[1], chunk), lanes(rows, ops[2], chunk));
        halves(|lane, half| f(T::get(a[lane] >> half), T::get(b[lane] >> half)).put())
    });
}

#[inline(always)]
pub(crate) fn three_pairs<T: Slot>(
    rows: &mut [Row],
    mask: u32,
    ops: &Ops,
    f: impl Fn(T, T, T) -> T,
) {
    by_chunks(rows, mask, ops[0], |rows, chunk| {
        let (a, b) = (lanes(rows, ops[1], chunk), lanes(rows, ops[2], chunk));
        let c = lanes(rows, ops[3], chunk);
        halves(|lane, half| {
            f(
                T::get(a[lane] >> half),
                T::get(b[lane] >> half),
                T::get(c[lane] >> half),
            )
            .put()
        })
    });
}

#[inline(always)]
pub(crate) fn compare_rows<A: Slot>(rows: &[Row], a: u32, b: u32, f: impl Fn(A, A) -> bool) -> u32 {
    let (a, b) = (&rows[a as usize], &rows[b as usize]);
    let mut mask = 0;
    for lane in 0..LANES {
        mask |= u32::from(f(A::get(a[lane]), A::get(b[lane]))) << lane;
    }
    mask
}

/// Returns whether the AVX2 copies of the handlers may run on this machine.
pub(crate) fn has_wide() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

/// Makes both copies of a handler and chooses the one for this machine.
macro_rules! handler {
    ($loop:ident < $($ty:ty),+ >, $f:expr) => {{
        fn plain(rows: &mut [$crate::alu::Row], mask: u32, ops: &$crate::alu::Ops) {
            $crate::alu::$loop::<$($ty),+>(rows, mask, ops, $f);
        }
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx2,fma")]
            fn wide(rows: &mut [$crate::alu::Row], mask: u32, ops: &$crate::alu::Ops) {
                $crate::alu::$loop::<$($ty),+>(rows, mask, ops, $f);
            }
            if $crate::alu::has_wide() {
                // SAFETY: `has_wide` has just found the features that `wide` is compiled for.
                let wide: $crate::alu::Alu = |rows, mask, ops| unsafe { wide(rows, mask, ops) };
                wide
            } else {
                plain as $crate::alu::Alu
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            plain as $crate::alu::Alu
        }
    }};
}
macro_rules! alu1 { ($a:ty => $r:ty, $f:expr) => { $crate::alu::handler!(one<$a, $r>, $f) }; }
macro_rules! alu2 { ($a:ty, $b:ty => $r:ty, $f:expr) => { $crate::alu::handler!(two<$a, $b, $r>, $f) }; }
macro_rules! alu3 { ($a:ty, $b:ty, $c:ty => $r:ty, $f:expr) => { $crate::alu::handler!(three<$a, $b, $c, $r>, $f) }; }
macro_rules! alu4 { ($a:ty, $b:ty, $c:ty, $d:ty => $r:ty, $f:expr) => { $crate::alu::handler!(four<$a, $b, $c, $d, $r>, $f) }; }

/// Makes a handler in one copy, for operations that do not gain from vector code.
macro_rules! plain {
    ($loop:ident < $($ty:ty),+ >, $f:expr) => {{
        let plain: $crate::alu::Alu = |rows, mask, ops| $crate::alu::$loop::<$($ty),+>(rows, mask, ops, $f);
        plain
    }};
}

/// Expands an expression with a name bound to the Rust type of an integer type.
macro_rules! by_int {
    ($ty:expr, $t:ident => $e:expr) => {{
        use $crate::parse::ast::Type;
        match $ty {
            Type::U16 | Type::B16 => {
                type $t = u16;
                Some($e)
            }
            Type::S16 => {
                type $t = i16;
                Some($e)
            }
            Type::U32 | Type::B32 => {
                type $t = u32;
                Some($e)
            }
            Type::S32 => {
                type $t = i32;
                Some($e)
            }
            Type::U64 | Type::B64 => {
                type $t = u64;
                Some($e)
            }
            Type::S64 => {
                type $t = i64;
                Some($e)
            }
            _ => None,
        }
    }};
}
/// As `by_int`, with the 8-bit types.
macro_rules! by_int8 {
    ($ty:expr, $t:ident => $e:expr) => {{
        use $crate::parse::ast::Type;
        match $ty {
            Type::U8 | Type::B8 => { type $t = u8; Some($e) }
            Type::S8 => { type $t = i8; Some($e) }
            other => $crate::alu::by_int!(other, $t => $e),
        }
    }};
}
/// Expands an expression for the unsigned type as wide as an untyped one.
macro_rules! by_bits {
    ($ty:expr, $t:ident => $e:expr) => {{
        match $ty.bytes() {
            2 => {
                type $t = u16;
                Some($e)
            }
            4 => {
                type $t = u32;
                Some($e)
            }
            8 => {
                type $t = u64;
                Some($e)
            }
            _ => None,
        }
    }};
}
/// Expands an expression with boolean constants bound to run-time flags.
macro_rules! by_flags {
    ($x:expr, $X:ident => $e:expr) => {
        if $x { const $X: bool = true; $e } else { const $X: bool = false; $e }
    };
    ($x:expr, $X:ident, $y:expr, $Y:ident => $e:expr) => {
        $crate::alu::by_flags!($x, $X => $crate::alu::by_flags!($y, $Y => $e))
    };
}
pub(crate) use {alu1, alu2, alu3, alu4, by_bits, by_flags, by_int, by_int8, handler, plain};
