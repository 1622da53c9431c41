//! Products of matrices on whole fragments: of small integers, whose sums are exact, and of numbers
//! whose sums round in an unspecified order.

use super::bits;
use crate::form::{Check, Form, Format};
use crate::operands::Class::{self, FiniteBytes, Int, Small, SmallPair, Unit, UnitPair};

/// Number of rows: one warp.
const ROWS: usize = 32;

/// Returns the registers of a fragment, as a vector.
fn list(kind: char, from: usize, count: usize) -> String {
    let names: Vec<_> = (from..from + count)
        .map(|i| format!("%{kind}{i}"))
        .collect();
    format!("{{{}}}", names.join(", "))
}

/// Returns the class of a register of a type, whose sums are exact or not.
fn class(ty: &str, exact: bool) -> Class {
    match (ty, exact) {
        ("f16", true) => SmallPair(Format::F16),
        ("f16", false) => UnitPair(Format::F16),
        ("bf16", true) => SmallPair(Format::Bf16),
        ("bf16", false) => UnitPair(Format::Bf16),
        ("tf32" | "f32", true) => Small(Format::F32),
        ("tf32" | "f32", false) => Unit(Format::F32),
        ("f64", true) => Small(Format::F64),
        ("f64", false) => Unit(Format::F64),
        ("e4m3" | "e5m2", _) => FiniteBytes,
        _ => Int(32),
    }
}

/// Returns the greatest difference between two orders of summing up to 32 products of numbers below 1.
fn latitude(sum: &str) -> Check {
    match sum {
        "f16" => Check::Near(Format::F16, (-4.0_f64).exp2()),
        "f64" => Check::Near(Format::F64, (-46.0_f64).exp2()),
        _ => Check::Near(Format::F32, (-17.0_f64).exp2()),
    }
}

/// Product: shape, types of d, a, b and c, registers of a, b and c, and the modifier after the types.
type Product = (&'static str, [&'static str; 4], [usize; 3], &'static str);

const PRODUCTS: &[Product] = &[
    ("m16n8k8", ["f32", "f16", "f16", "f32"], [2, 1, 4], ""),
    ("m16n8k8", ["f16", "f16", "f16", "f16"], [2, 1, 2], ""),
    ("m16n8k16", ["f32", "f16", "f16", "f32"], [4, 2, 4], ""),
    ("m16n8k16", ["f16", "f16", "f16", "f16"], [4, 2, 2], ""),
    ("m16n8k8", ["f32", "bf16", "bf16", "f32"], [2, 1, 4], ""),
    ("m16n8k16", ["f32", "bf16", "bf16", "f32"], [4, 2, 4], ""),
    ("m16n8k4", ["f32", "tf32", "tf32", "f32"], [2, 1, 4], ""),
    ("m16n8k8", ["f32", "tf32", "tf32", "f32"], [4, 2, 4], ""),
    ("m8n8k4", ["f64", "f64", "f64", "f64"], [1, 1, 2], ""),
    ("m16n8k4", ["f64", "f64", "f64", "f64"], [2, 1, 4], ""),
    ("m16n8k8", ["f64", "f64", "f64", "f64"], [4, 2, 4], ""),
    ("m16n8k16", ["f64", "f64", "f64", "f64"], [8, 4, 4], ""),
    ("m8n8k16", ["s32", "s8", "s8", "s32"], [1, 1, 2], ""),
    ("m8n8k16", ["s32", "u8", "u8", "s32"], [1, 1, 2], ""),
    ("m16n8k16", ["s32", "s8", "u8", "s32"], [2, 1, 4], ""),
    (
        "m16n8k16",
        ["s32", "u8", "s8", "s32"],
        [2, 1, 4],
        ".satfinite",
    ),
    ("m16n8k32", ["s32", "s8", "s8", "s32"], [4, 2, 4], ""),
    (
        "m16n8k32",
        ["s32", "s8", "s8", "s32"],
        [4, 2, 4],
        ".satfinite",
    ),
    ("m16n8k32", ["s32", "u8", "u8", "s32"], [4, 2, 4], ""),
    ("m8n8k32", ["s32", "s4", "s4", "s32"], [1, 1, 2], ""),
    ("m16n8k32", ["s32", "u4", "s4", "s32"], [2, 1, 4], ""),
    (
        "m16n8k64",
        ["s32", "s4", "u4", "s32"],
        [4, 2, 4],
        ".satfinite",
    ),
    (
        "m8n8k128",
        ["s32", "b1", "b1", "s32"],
        [1, 1, 2],
        ".xor.popc",
    ),
    (
        "m16n8k128",
        ["s32", "b1", "b1", "s32"],
        [2, 1, 4],
        ".and.popc",
    ),
    (
        "m16n8k256",
        ["s32", "b1", "b1", "s32"],
        [4, 2, 4],
        ".and.popc",
    ),
    (
        "m16n8k256",
        ["s32", "b1", "b1", "s32"],
        [4, 2, 4],
        ".xor.popc",
    ),
];

/// Returns the forms of `mma`, and of instructions that move matrices.
pub fn fragments() -> Vec<Form> {
    let mut forms = Vec::new();
    for &(shape, types, counts, tail) in PRODUCTS {
        for exact in [true, false] {
            let [d, a, b, c] = types;
            if !exact && matches!(d, "s32") {
                continue;
            }
            // The flag precedes the types, the operation on bits follows them.
            let (flag, operation) = if tail.ends_with("popc") {
                ("", tail)
            } else {
                (tail, "")
            };
            let op = format!("mma.sync.aligned.{shape}.row.col{flag}.{d}.{a}.{b}.{c}{operation}");
            forms.push(product(&op, types, counts, exact));
        }
    }
    // Each quarter of a warp multiplies its own matrices.
    for a in ["row", "col"] {
        for b in ["row", "col"] {
            for (sum, count) in [("f16", 4), ("f32", 8)] {
                let op = format!("mma.sync.aligned.m8n8k4.{a}.{b}.{sum}.f16.f16.{sum}");
                forms.push(product(&op, [sum, "f16", "f16", sum], [2, 2, count], true));
            }
        }
    }
    for a in ["e4m3", "e5m2"] {
        for b in ["e4m3", "e5m2"] {
            let op = format!("mma.sync.aligned.m16n8k32.row.col.f32.{a}.{b}.f32");
            // Products reach 2 to the power of 2; their sums have at least 14 bits.
            let check = Check::Near(Format::F32, (-4.0_f64).exp2());
            forms.push(product(&op, ["f32", a, b, "f32"], [4, 2, 4], true).checked(check));
        }
    }
    for trans in ["", ".trans"] {
        for count in [1, 2, 4] {
            let op = format!("ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16");
            let body = format!(
                "st.shared.v2.b64 [%s], {{%i0, %i1}}; bar.sync 0; {op} {}, [%s];",
                list('o', 0, count)
            );
            forms.push(Form::new(&op, &[Int(64); 2], &vec![32; count], body).rows(ROWS));
            let op = format!("stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16");
            let body = format!(
                ".reg .b64 %z; mov.b64 %z, 0; st.shared.v2.b64 [%s], {{%z, %z}}; bar.sync 0;
{op} [%s], {}; bar.sync 0; ld.shared.v2.b64 {{%o0, %o1}}, [%s];",
                list('i', 0, count)
            );
            forms.push(Form::new(&op, &vec![Int(32); count], &[64; 2], body).rows(ROWS));
        }
    }
    let op = "movmatrix.sync.aligned.m8n8.trans.b16";
    forms.push(Form::plain(op, &[Int(32)], 32).rows(ROWS));
    forms
}

fn product(op: &str, types: [&str; 4], [a, b, c]: [usize; 3], exact: bool) -> Form {
    let [sum, left, right, addend] = types;
    let mut inputs = vec![class(left, exact); a];
    inputs.extend(vec![class(right, exact); b]);
    inputs.extend(vec![class(addend, exact); c]);
    let body = format!(
        "{op} {}, {}, {}, {};",
        list('o', 0, c),
        list('i', 0, a),
        list('i', a, b),
        list('i', a + b, c)
    );
    let width = if sum == "f64" { 64 } else { 32 };
    let name = if exact {
        op.to_owned()
    } else {
        format!("{op} rounded")
    };
    let check = if exact { Check::Exact } else { latitude(sum) };
    Form::new(&name, &inputs, &vec![width; c], body)
        .rows(ROWS)
        .checked(check)
}

/// Product of whole matrices: shape, type of a and b, type of the sums; registers of each fragment.
type Tile = (&'static str, &'static str, &'static str, [usize; 3]);

const TILES: &[Tile] = &[
    ("m16n16k16", "f16", "f32", [8, 8, 8]),
    ("m16n16k16", "f16", "f16", [8, 8, 4]),
    ("m32n8k16", "f16", "f32", [8, 8, 8]),
    ("m32n8k16", "f16", "f16", [8, 8, 4]),
    ("m8n32k16", "f16", "f32", [8, 8, 8]),
    ("m8n32k16", "f16", "f16", [8, 8, 4]),
    ("m16n16k16", "bf16", "f32", [4, 4, 8]),
    ("m32n8k16", "bf16", "f32", [8, 2, 8]),
    ("m8n32k16", "bf16", "f32", [2, 8, 8]),
    ("m16n16k8", "tf32", "f32", [4, 4, 8]),
    ("m8n8k4", "f64", "f64", [1, 1, 2]),
    ("m16n16k16", "s8", "s32", [2, 2, 8]),
    ("m16n16k16", "u8", "s32", [2, 2, 8]),
    ("m32n8k16", "s8", "s32", [4, 1, 8]),
    ("m8n32k16", "u8", "s32", [1, 4, 8]),
];

/// Returns the forms of `wmma`, which load, multiply and store matrices through memory, since the
/// layout of a fragment is not specified.
pub fn tiles() -> Vec<Form> {
    let mut forms = Vec::new();
    for &(shape, ty, sum, counts) in TILES {
        for (a, b, c) in [("row", "col", "row"), ("col", "row", "col")] {
            forms.push(tile(shape, ty, sum, counts, [a, b, c]));
        }
    }
    forms
}

fn extents(shape: &str) -> [u32; 3] {
    let mut numbers = shape.split(['m', 'n', 'k']).skip(1);
    [(); 3].map(|()| numbers.next().and_then(|n| n.parse().ok()).unwrap_or(0))
}

fn tile(shape: &str, ty: &str, sum: &str, counts: [usize; 3], orders: [&str; 3]) -> Form {
    let [m, n, k] = extents(shape);
    let element = if ty == "tf32" { 32 } else { bits(ty) };
    // The matrices are one after another in the warp's memory, with each lane's part of a matrix
    // contiguous.
    let mut inputs = Vec::new();
    let mut body = String::from(".reg .b32 %lane; and.b32 %lane, %t, 31; .reg .b64 %at;\n");
    let mut offset = 0;
    let mut places = Vec::new();
    for (elements, size, ty) in [
        (m * k, element, ty),
        (k * n, element, ty),
        (m * n, bits(sum), sum),
    ] {
        let word = if size == 64 { 64 } else { 32 };
        let words = elements * size / word / 32;
        body.push_str(&format!(
            "mad.wide.u32 %at, %lane, {}, %w;\n",
            words * word / 8
        ));
        for index in 0..words {
            let at = offset + index * word / 8;
            body.push_str(&format!(
                "st.global.b{word} [%at+{at}], %i{};\n",
                inputs.len()
            ));
            inputs.push(class(ty, true));
        }
        places.push(offset);
        offset += elements * size / 8;
    }
    let [a, b, c] = orders;
    let stride = |order: &str, rows: u32, columns: u32| if order == "row" { columns } else { rows };
    let strides = [stride(a, m, k), stride(b, k, n), stride(c, m, n)];
    let kind = if sum == "f64" || ty == "f64" {
        "b64"
    } else {
        "b32"
    };
    for (fragment, count) in ["a", "b", "c", "d"]
        .iter()
        .zip([counts[0], counts[1], counts[2], counts[2]])
    {
        body.push_str(&format!(".reg .{kind} %f{fragment}<{}>;\n", count + 1));
    }
    let regs = |fragment: char, count: usize| {
        let names: Vec<_> = (0..count).map(|i| format!("%f{fragment}{i}")).collect();
        format!("{{{}}}", names.join(", "))
    };
    body.push_str("bar.sync 0;\n.reg .b64 %base;\n");
    for (index, (fragment, ty)) in [('a', ty), ('b', ty), ('c', sum)].into_iter().enumerate() {
        body.push_str(&format!(
            "add.s64 %base, %w, {}; wmma.load.{fragment}.sync.aligned.{}.{shape}.global.{ty} {}, [%base], {};\n",
            places[index],
            orders[index],
            regs(fragment, counts[index]),
            strides[index]
        ));
    }
    let types = if ty == "f16" {
        format!("{sum}.{sum}")
    } else {
        format!("{sum}.{ty}.{ty}.{sum}")
    };
    let product = format!("wmma.mma.sync.aligned.{a}.{b}.{shape}.{types}");
    body.push_str(&format!(
        "{product} {}, {}, {}, {};\n",
        regs('d', counts[2]),
        regs('a', counts[0]),
        regs('b', counts[1]),
        regs('c', counts[2])
    ));
    body.push_str(&format!(
        "bar.sync 0; wmma.store.d.sync.aligned.{c}.{shape}.global.{sum} [%base], {}, {}; bar.sync 0;\n",
        regs('d', counts[2]),
        strides[2]
    ));
    let word = if bits(sum) == 64 { 64 } else { 32 };
    let words = m * n * bits(sum) / word / 32;
    body.push_str(&format!(
        "mad.wide.u32 %at, %lane, {}, %base;\n",
        words * word / 8
    ));
    for index in 0..words {
        body.push_str(&format!(
            "ld.global.b{word} %o{index}, [%at+{}];\n",
            index * word / 8
        ));
    }
    let outputs = vec![word; usize::try_from(words).unwrap_or(0)];
    let name = format!("wmma {a}.{b}.{c}.{shape}.{ty}.{sum}");
    Form::new(&name, &inputs, &outputs, body).rows(ROWS)
}
