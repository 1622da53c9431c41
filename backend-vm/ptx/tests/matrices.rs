//! Compares products of matrices by whole warps with products summed element by element.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "small numbers, exact in every format"
)]

mod common;

use common::Device;

/// Returns a small integer that every format represents exactly.
fn small(index: usize, seed: usize) -> i32 {
    ((index * 7 + seed * 5 + index / 3) % 13) as i32 - 6
}

fn half(value: i32) -> u16 {
    short(value, 10, 15)
}

fn bfloat(value: i32) -> u16 {
    short(value, 7, 127)
}

/// Encodes a small integer as a 16-bit float.
fn short(value: i32, mantissa: u32, bias: u32) -> u16 {
    if value == 0 {
        return 0;
    }
    let magnitude = value.unsigned_abs();
    let exponent = magnitude.ilog2();
    let fraction = (magnitude << mantissa >> exponent) & ((1 << mantissa) - 1);
    let sign = u32::from(value < 0) << 15;
    (sign | (exponent + bias) << mantissa | fraction) as u16
}

/// Returns the product of an m by k and a k by n matrix, both row-major, plus a matrix.
fn product(a: &[i32], b: &[i32], c: &[i32], m: usize, n: usize) -> Vec<i32> {
    let k = a.len() / m;
    let sum = |row: usize, column: usize| -> i32 {
        (0..k).map(|i| a[row * k + i] * b[i * n + column]).sum()
    };
    (0..m * n).map(|at| sum(at / n, at % n) + c[at]).collect()
}

fn matrix(elements: usize, seed: usize) -> Vec<i32> {
    (0..elements).map(|at| small(at, seed)).collect()
}

/// Returns a matrix in column-major order.
fn transposed(matrix: &[i32], columns: usize) -> Vec<i32> {
    let rows = matrix.len() / columns;
    (0..matrix.len())
        .map(|at| matrix[at % rows * columns + at / rows])
        .collect()
}

fn upload<T: Copy>(device: &Device, values: &[i32], f: impl Fn(i32) -> T) -> u64 {
    device
        .memory
        .upload(&values.iter().map(|&value| f(value)).collect::<Vec<T>>())
}

/// Kernel of `matrices.cu`, which doubles the product and stores it in column-major order.
struct Wmma {
    kernel: &'static str,
    shape: (usize, usize, usize),
    /// Whether a and b are row-major.
    by_rows: (bool, bool),
}

impl Wmma {
    fn check<T: Copy, C: Copy + Default + PartialEq + std::fmt::Debug>(
        &self,
        element: impl Fn(i32) -> T,
        sum: impl Fn(i32) -> C,
    ) {
        let device = Device::of("matrices");
        let (m, n, k) = self.shape;
        let (a, b, c) = (matrix(m * k, 1), matrix(k * n, 2), matrix(m * n, 3));
        let lies = |matrix: &[i32], columns, by_rows| {
            if by_rows {
                matrix.to_vec()
            } else {
                transposed(matrix, columns)
            }
        };
        let da = upload(&device, &lies(&a, k, self.by_rows.0), &element);
        let db = upload(&device, &lies(&b, n, self.by_rows.1), &element);
        let (dc, d) = (upload(&device, &c, &sum), device.memory.alloc(m * n * 8));
        device.launch(self.kernel, 1, 32, &[da, db, dc, d]).unwrap();
        let expected: Vec<C> = transposed(&product(&a, &b, &c, m, n), n)
            .into_iter()
            .map(|value| sum(2 * value))
            .collect();
        assert_eq!(
            device.memory.read::<C>(d, m * n),
            expected,
            "{}",
            self.kernel
        );
    }
}

#[test]
fn wmma_multiplies_what_it_loads() {
    let wmma = |kernel, shape, by_rows| Wmma {
        kernel,
        shape,
        by_rows,
    };
    let single = |value: i32| value as f32;
    wmma("half_single", (16, 16, 16), (true, false)).check(half, single);
    wmma("half_tall", (32, 8, 16), (false, true)).check(half, single);
    wmma("half_flat", (8, 32, 16), (true, true)).check(half, half);
    wmma("bfloat", (16, 16, 16), (false, false)).check(bfloat, single);
    wmma("tf32", (16, 16, 8), (true, true)).check(single, single);
    wmma("doubles", (8, 8, 4), (true, false)).check(f64::from, f64::from);
    wmma("signed_bytes", (16, 16, 16), (true, false)).check(|value| value as i8, |value| value);
}

#[test]
fn wmma_multiplies_unsigned_bytes_and_bits() {
    let device = Device::of("matrices");
    let byte = |value: i32| (value + 200) as u8;
    let widen = |values: &[i32]| -> Vec<i32> { values.iter().map(|value| value + 200).collect() };
    let (a, b, c) = (matrix(32 * 16, 1), matrix(16 * 8, 2), matrix(32 * 8, 3));
    let da = upload(&device, &transposed(&a, 16), byte);
    let (db, dc) = (
        upload(&device, &b, byte),
        upload(&device, &c, |value| value),
    );
    let d = device.memory.alloc(32 * 8 * 4);
    device
        .launch("unsigned_bytes", 1, 32, &[da, db, dc, d])
        .unwrap();
    let expected: Vec<i32> = transposed(&product(&widen(&a), &widen(&b), &c, 32, 8), 8)
        .into_iter()
        .map(|value| 2 * value)
        .collect();
    assert_eq!(device.memory.read::<i32>(d, 256), expected);

    let words = |seed: u32| -> Vec<u32> {
        (1..33)
            .map(|i: u32| i.wrapping_mul(0x9e37_79b9 ^ seed))
            .collect()
    };
    let (a, b) = (words(1), words(77));
    let (da, db) = (device.memory.upload(&a), device.memory.upload(&b));
    device.launch("bits", 1, 32, &[da, db, dc, d]).unwrap();
    let expected: Vec<i32> = (0..64)
        .map(|at| {
            let ones = (0..4).map(|i| (a[at / 8 * 4 + i] ^ b[at % 8 * 4 + i]).count_ones());
            c[at] + ones.sum::<u32>() as i32
        })
        .collect();
    assert_eq!(device.memory.read::<i32>(d, 64), expected);
}

#[test]
fn matrices_are_loaded_by_rows_that_lie_anywhere() {
    let device = Device::of("matrices");
    let (a, b) = (matrix(256, 1), matrix(128, 2));
    let (da, db) = (upload(&device, &a, half), upload(&device, &b, half));
    let d = device.memory.alloc(128 * 4);
    device.launch("tiles", 1, 32, &[da, db, d]).unwrap();
    let expected: Vec<f32> = product(&a, &b, &[0; 128], 16, 8)
        .into_iter()
        .map(|value| value as f32)
        .collect();
    assert_eq!(device.memory.read::<f32>(d, 128), expected);
}

/// Registers of a fragment: for each one its 32 (or 64) bits in each lane.
type Registers = Vec<[u64; 32]>;

/// Runs an `mma` on fragments, and returns the registers of its result.
fn mma(
    op: &str,
    a: &Registers,
    b: &Registers,
    c: &Registers,
    results: usize,
    bytes: usize,
) -> Registers {
    let (word, kind) = if bytes == 8 {
        ("f64", "fd")
    } else {
        ("b32", "r")
    };
    let mut loads = String::new();
    let mut data = Vec::new();
    let mut lists = Vec::new();
    for fragment in [a, b, c] {
        let mut names = Vec::new();
        for register in fragment {
            let name = format!("%{kind}{}", data.len() / 32);
            loads += &format!("ld.global.{word} {name}, [%in+{}];\n", data.len() * 8);
            data.extend_from_slice(register);
            names.push(name);
        }
        lists.push(format!("{{{}}}", names.join(", ")));
    }
    let outputs: Vec<String> = (0..results)
        .map(|index| format!("%{kind}{}", 50 + index))
        .collect();
    let stores: String = (0..results)
        .map(|index| {
            format!(
                "st.global.{word} [%to+{}], {};\n",
                index * 256,
                outputs[index]
            )
        })
        .collect();
    let text = format!(
        ".version 8.7\n.target sm_90\n.address_size 64\n
         .visible .entry k(.param .u64 in, .param .u64 out) {{
         .reg .b32 %r<90>; .reg .f64 %fd<90>; .reg .b64 %in, %to, %at; .reg .b32 %lane;
         ld.param.u64 %in, [in]; ld.param.u64 %to, [out]; mov.u32 %lane, %tid.x;
         mul.wide.u32 %at, %lane, 8; add.u64 %in, %in, %at; add.u64 %to, %to, %at;
         {loads} {op} {{{}}}, {}, {}, {};\n{stores} ret; }}",
        outputs.join(", "),
        lists[0],
        lists[1],
        lists[2],
    );
    let device = Device::load(text.as_bytes());
    let (input, out) = (
        device.memory.upload(&data),
        device.memory.alloc(results * 256),
    );
    device.launch("k", 1, 32, &[input, out]).unwrap();
    let words = device.memory.read::<u64>(out, results * 32);
    words
        .chunks_exact(32)
        .map(|row| row.try_into().unwrap())
        .collect()
}

/// Fills registers with the elements at the positions that `position` returns, `bits` wide.
fn fill(
    registers: usize,
    bits: usize,
    position: impl Fn(usize, usize) -> usize,
    element: impl Fn(usize) -> u64,
) -> Registers {
    let packed = (32 / bits).max(1);
    (0..registers)
        .map(|register| {
            std::array::from_fn(|lane| {
                (0..packed).fold(0, |word, index| {
                    let at = position(lane, register * packed + index);
                    word | element(at) << (index * bits)
                })
            })
        })
        .collect()
}

/// `mma` with 8 columns, with the positions of the PTX ISA's figures for its shape.
struct Mma {
    op: &'static str,
    rows: usize,
    inner: usize,
    bits: usize,
    /// Returns row and column of element `i` of A in a lane, as in the ISA's figure for this shape.
    a: fn(usize, usize) -> (usize, usize),
    /// Returns the row of element `i` of B.
    b: fn(usize, usize) -> usize,
}

impl Mma {
    fn check(&self, element: impl Fn(i32) -> u64, sum: impl Fn(i32) -> u64, sum_bits: usize) {
        let (m, n, k) = (self.rows, 8, self.inner);
        let (a, b, c) = (matrix(m * k, 1), matrix(k * n, 2), matrix(m * n, 3));
        let packed = (32 / self.bits).max(1);
        let fa = fill(
            m * k / 32 / packed,
            self.bits,
            |lane, i| {
                let (row, column) = (self.a)(lane, i);
                row * k + column
            },
            |at| element(a[at]),
        );
        let fb = fill(
            k * n / 32 / packed,
            self.bits,
            |lane, i| (self.b)(lane, i) * n + lane / 4,
            |at| element(b[at]),
        );
        let results = m * n / 32 / (32 / sum_bits).max(1);
        let place = |lane: usize, i: usize| (lane / 4 + 8 * (i / 2)) * n + lane % 4 * 2 + i % 2;
        let fc = fill(results, sum_bits, place, |at| sum(c[at]));
        let bytes = self.bits.max(32) / 8;
        let got = mma(self.op, &fa, &fb, &fc, results, bytes);
        let d = product(&a, &b, &c, m, n);
        let expected = fill(results, sum_bits, place, |at| sum(d[at]));
        assert_eq!(got, expected, "{}", self.op);
    }
}

#[test]
fn fragments_of_mma_lie_as_documented() {
    let single = |value: i32| u64::from((value as f32).to_bits());
    let f16 = |value: i32| u64::from(half(value));
    let bf16 = |value: i32| u64::from(bfloat(value));
    let s8 = |value: i32| u64::from(value as u8);
    let s4 = |value: i32| u64::from(value as u8 & 15);
    let s32 = |value: i32| u64::from(value as u32);
    let e4m3 = |value: i32| u64::from(short(value, 3, 7) & 0x7f | short(value, 3, 7) >> 15 << 7);
    let double = |value: i32| f64::from(value).to_bits();
    let shapes_of_8 = |op| Mma {
        op,
        rows: 16,
        inner: 8,
        bits: 16,
        a: |l, i| (l / 4 + if i < 2 { 0 } else { 8 }, l % 4 * 2 + (i & 1)),
        b: |l, i| l % 4 * 2 + i,
    };
    shapes_of_8("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32").check(f16, single, 32);
    shapes_of_8("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16").check(f16, f16, 16);
    shapes_of_8("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32").check(bf16, single, 32);
    let shapes_of_16 = |op| Mma {
        op,
        rows: 16,
        inner: 16,
        bits: 16,
        a: |l, i| {
            let upper = i < 2 || (4..6).contains(&i);
            let row = l / 4 + if upper { 0 } else { 8 };
            (row, l % 4 * 2 + (i & 1) + if i < 4 { 0 } else { 8 })
        },
        b: |l, i| l % 4 * 2 + (i & 1) + if i < 2 { 0 } else { 8 },
    };
    shapes_of_16("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32").check(f16, single, 32);
    shapes_of_16("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16").check(f16, f16, 16);
    shapes_of_16("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32").check(bf16, single, 32);
    Mma {
        op: "mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32",
        rows: 16,
        inner: 4,
        bits: 32,
        a: |l, i| (l / 4 + 8 * i, l % 4),
        b: |l, _| l % 4,
    }
    .check(single, single, 32);
    Mma {
        op: "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",
        rows: 16,
        inner: 8,
        bits: 32,
        a: |l, i| (l / 4 + 8 * (i % 2), l % 4 + if i < 2 { 0 } else { 4 }),
        b: |l, i| l % 4 + 4 * i,
    }
    .check(single, single, 32);
    Mma {
        op: "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32",
        rows: 8,
        inner: 16,
        bits: 8,
        a: |l, i| (l / 4, l % 4 * 4 + i),
        b: |l, i| l % 4 * 4 + i,
    }
    .check(s8, s32, 32);
    Mma {
        op: "mma.sync.aligned.m16n8k16.row.col.satfinite.s32.s8.s8.s32",
        rows: 16,
        inner: 16,
        bits: 8,
        a: |l, i| (l / 4 + if i < 4 { 0 } else { 8 }, l % 4 * 4 + (i & 3)),
        b: |l, i| l % 4 * 4 + i,
    }
    .check(s8, s32, 32);
    let bytes_of_32 = |op| Mma {
        op,
        rows: 16,
        inner: 32,
        bits: 8,
        a: |l, i| {
            let upper = i < 4 || (8..12).contains(&i);
            let row = l / 4 + if upper { 0 } else { 8 };
            (row, l % 4 * 4 + (i & 3) + if i < 8 { 0 } else { 16 })
        },
        b: |l, i| l % 4 * 4 + (i & 3) + if i < 4 { 0 } else { 16 },
    };
    bytes_of_32("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32").check(s8, s32, 32);
    bytes_of_32("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32").check(e4m3, single, 32);
    Mma {
        op: "mma.sync.aligned.m8n8k32.row.col.s32.s4.s4.s32",
        rows: 8,
        inner: 32,
        bits: 4,
        a: |l, i| (l / 4, l % 4 * 8 + i),
        b: |l, i| l % 4 * 8 + i,
    }
    .check(s4, s32, 32);
    Mma {
        op: "mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32",
        rows: 16,
        inner: 64,
        bits: 4,
        a: |l, i| {
            let upper = i < 8 || (16..24).contains(&i);
            let row = l / 4 + if upper { 0 } else { 8 };
            (row, l % 4 * 8 + (i & 7) + if i < 16 { 0 } else { 32 })
        },
        b: |l, i| l % 4 * 8 + (i & 7) + if i < 8 { 0 } else { 32 },
    }
    .check(s4, s32, 32);
    Mma {
        op: "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64",
        rows: 8,
        inner: 4,
        bits: 64,
        a: |l, _| (l / 4, l % 4),
        b: |l, _| l % 4,
    }
    .check(double, double, 64);
    Mma {
        op: "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64",
        rows: 16,
        inner: 16,
        bits: 64,
        a: |l, i| {
            let column = if i % 2 == 0 { i * 2 } else { i * 2 - 2 };
            (l / 4 + 8 * (i % 2), column + l % 4)
        },
        b: |l, i| l % 4 + i * 4,
    }
    .check(double, double, 64);
}

/// Checks that `mma.m8n8k4` is four products, each by the lanes of one quad pair.
#[test]
fn quad_pairs_multiply_on_their_own() {
    let quad = |lane: usize| lane / 4 % 4;
    let upper = |lane: usize| if lane < 16 { 0 } else { 4 };
    let matrices = |elements: usize, seed: usize| -> Vec<Vec<i32>> {
        (0..4)
            .map(|block| matrix(elements, seed + 11 * block))
            .collect()
    };
    let (a, b, c) = (matrices(32, 1), matrices(32, 2), matrices(64, 3));
    for (rows_a, rows_b) in [(true, true), (true, false), (false, true), (false, false)] {
        for wide in [true, false] {
            let place_a = |l: usize, i: usize| match rows_a {
                true => (l % 4 + upper(l)) * 4 + i,
                false => (i % 4 + upper(l)) * 4 + l % 4,
            };
            let place_b = |l: usize, i: usize| match rows_b {
                true => l % 4 * 8 + i + upper(l),
                false => i * 8 + l % 4 + upper(l),
            };
            let place = |l: usize, i: usize| match wide {
                true => ((l & 1) + (i & 2) + upper(l)) * 8 + (i & 4) + (l & 2) + (i & 1),
                false => (l % 4 + upper(l)) * 8 + i,
            };
            // Positions in one block are 64 below those in the next block.
            let block = |at: usize| (at / 64, at % 64);
            let cut = |matrices: &[Vec<i32>], at: usize| matrices[block(at).0][block(at).1];
            let sum = |value: i32| {
                if wide {
                    u64::from((value as f32).to_bits())
                } else {
                    u64::from(half(value))
                }
            };
            let fa = fill(
                2,
                16,
                |l, i| quad(l) * 64 + place_a(l, i),
                |at| u64::from(half(cut(&a, at))),
            );
            let fb = fill(
                2,
                16,
                |l, i| quad(l) * 64 + place_b(l, i),
                |at| u64::from(half(cut(&b, at))),
            );
            let (registers, bits, ty) = if wide { (8, 32, "f32") } else { (4, 16, "f16") };
            let position = |l: usize, i: usize| quad(l) * 64 + place(l, i);
            let fc = fill(registers, bits, position, |at| sum(cut(&c, at)));
            let word = |rows: bool| if rows { "row" } else { "col" };
            let op = format!(
                "mma.sync.aligned.m8n8k4.{}.{}.{ty}.f16.f16.{ty}",
                word(rows_a),
                word(rows_b)
            );
            let got = mma(&op, &fa, &fb, &fc, registers, 4);
            let d: Vec<Vec<i32>> = (0..4).map(|i| product(&a[i], &b[i], &c[i], 8, 8)).collect();
            let expected = fill(registers, bits, position, |at| sum(cut(&d, at)));
            assert_eq!(got, expected, "{op}");
        }
    }
}

#[test]
fn fragments_are_stored_and_transposed() {
    let text = ".version 8.7\n.target sm_90\n.address_size 64\n
         .visible .entry k(.param .u64 out) {
         .reg .b32 %r<20>; .reg .b64 %rd<9>; .shared .align 16 .b8 s[256];
         ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 1; add.u32 %r3, %r2, 1;
         shl.b32 %r4, %r3, 16; or.b32 %r4, %r4, %r2;
         movmatrix.sync.aligned.m8n8.trans.b16 %r5, %r4;
         and.b32 %r6, %r1, 7; shl.b32 %r6, %r6, 4; mov.u32 %r7, s; add.u32 %r6, %r6, %r7;
         add.u32 %r8, %r6, 128; setp.lt.u32 %p1, %r1, 8; selp.u32 %r6, %r6, %r8, %p1;
         stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r6], {%r4, %r5};
         bar.warp.sync -1; shl.b32 %r9, %r1, 3; add.u32 %r9, %r9, %r7; ld.shared.b64 %rd2, [%r9];
         mul.wide.u32 %rd3, %r1, 8; add.u64 %rd1, %rd1, %rd3; st.global.u64 [%rd1], %rd2; ret; }"
        .replace(".reg .b32", ".reg .pred %p<2>; .reg .b32");
    let device = Device::load(text.as_bytes());
    let out = device.memory.alloc(256);
    device.launch("k", 1, 32, &[out]).unwrap();
    let expected: Vec<u16> = (0..64)
        .chain((0..64).map(|at| at % 8 * 8 + at / 8))
        .collect();
    assert_eq!(device.memory.read::<u16>(out, 128), expected);
}

#[test]
fn shapes_that_do_not_exist_are_refused_by_name() {
    for op in [
        "mma.sync.aligned.m16n8k12.row.col.f32.f16.f16.f32 {%r1}, {%r1}, {%r1}, {%r1}",
        "mma.sync.aligned.m16n8k256.row.col.f32.f16.f16.f32 {%r1}, {%r1}, {%r1}, {%r1}",
        "mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1}, {%r1}, {%r1}, {%r1}, %r1, 0",
        "wmma.mma.sync.aligned.row.col.m256n256k256.f32.f32 {%r1}, {%r1}, {%r1}, {%r1}",
        "wmma.load.a.sync.aligned.row.m8n8k4.b1 {%r1}, [%rd1]",
        "wgmma.fence.sync.aligned",
    ] {
        let text = format!(
            ".version 8.7\n.target sm_90\n.address_size 64\n
             .entry k() {{ .reg .b32 %r<3>; .reg .b64 %rd<3>; {op}; ret; }}"
        );
        let program = wormhole_ptx::Module::from_ptx(&text)
            .unwrap()
            .link(Vec::new());
        let error = program.kernel("k").unwrap_err();
        assert!(
            matches!(error, wormhole_ptx::KernelError::Unsupported { .. }),
            "{error}"
        );
        let name = op.split(' ').next().unwrap();
        assert!(error.to_string().contains(name), "{error}");
    }
}
