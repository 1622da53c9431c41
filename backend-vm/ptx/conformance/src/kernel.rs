//! Writes the PTX of a form.

use std::fmt::Write;

use crate::form::Form;
use crate::object::Object;

/// Name of the kernel in its module.
pub const NAME: &str = "form";
/// Number of threads of the one block.
pub const BLOCK: usize = 128;
/// Bytes of global memory that the kernel uses as scratch memory.
pub const SCRATCH: u64 = PRIVATE * 128 + 4 * WARP;
/// Bytes of scratch memory of each thread.
const PRIVATE: u64 = 32;
/// Bytes of scratch memory of each warp.
const WARP: u64 = 8192;

/// Returns the type of a register of `bits` bits.
fn register(bits: u32) -> &'static str {
    match bits {
        16 => "b16",
        64 => "b64",
        _ => "b32",
    }
}

/// Returns the module of one form. Each element of a row of operands or results is eight bytes
/// long.
#[must_use]
pub fn text(form: &Form) -> String {
    let mut declared = String::new();
    let mut loads = String::new();
    let mut stores = String::new();
    for (i, class) in form.inputs.iter().enumerate() {
        let bits = class.bits();
        let at = 8 * i;
        if bits == 1 {
            let _ = writeln!(declared, ".reg .pred %i{i}; .reg .b32 %x{i};");
            let _ = writeln!(loads, "ld.global.b32 %x{i}, [%in+{at}];");
            let _ = writeln!(loads, "setp.ne.s32 %i{i}, %x{i}, 0;");
        } else {
            let ty = register(bits);
            let _ = writeln!(declared, ".reg .{ty} %i{i};");
            let _ = writeln!(loads, "ld.global.{ty} %i{i}, [%in+{at}];");
        }
    }
    // Results written to a surface are not stored.
    let stored = match form.object {
        Some(Object::Written(_)) => &[],
        _ => form.outputs.as_slice(),
    };
    for (i, &bits) in stored.iter().enumerate() {
        let at = 8 * i;
        if bits == 1 {
            let _ = writeln!(declared, ".reg .pred %o{i}; .reg .b32 %y{i};");
            let _ = writeln!(loads, "setp.ne.s32 %o{i}, 0, 0;");
            let _ = writeln!(stores, "selp.b32 %y{i}, 1, 0, %o{i};");
            let _ = writeln!(stores, "st.global.b32 [%out+{at}], %y{i};");
        } else {
            let ty = register(bits);
            let _ = writeln!(declared, ".reg .{ty} %o{i};");
            let _ = writeln!(loads, "mov.{ty} %o{i}, 0;");
            let _ = writeln!(stores, "st.global.{ty} [%out+{at}], %o{i};");
        }
    }
    let (inputs, outputs) = (8 * form.inputs.len(), 8 * stored.len());
    let warps = PRIVATE * 128;
    let shared = if form.body.contains("%s") || form.body.contains("%b") {
        format!(
            ".shared .align 16 .b8 tile[8192];
.reg .b32 %s, %b;
mov.u32 %b, tile;
mad.lo.u32 %s, %t, {PRIVATE}, %b;"
        )
    } else {
        String::new()
    };
    let (parameter, handle) = match form.object {
        Some(_) => (
            ", .param .u64 object",
            ".reg .b64 %h; ld.param.u64 %h, [object];\n",
        ),
        None => ("", ""),
    };
    format!(
        ".version 8.7
.target sm_90
.address_size 64
.visible .entry {NAME}(.param .u64 operands, .param .u64 results, .param .u64 scratch{parameter})
{{
.reg .b32 %t, %wi;
.reg .b64 %in, %out, %m, %w;
{declared}mov.u32 %t, %tid.x;
ld.param.u64 %in, [operands];
ld.param.u64 %out, [results];
ld.param.u64 %w, [scratch];
mad.wide.u32 %in, %t, {inputs}, %in;
mad.wide.u32 %out, %t, {outputs}, %out;
mad.wide.u32 %m, %t, {PRIVATE}, %w;
shr.u32 %wi, %t, 5;
mad.wide.u32 %w, %wi, {WARP}, %w;
add.s64 %w, %w, {warps};
{shared}
{handle}{loads}{body}
{stores}ret;
}}
",
        body = form.body
    )
}
