//! Runs single instructions in one thread, or checks them against a result.

#![allow(dead_code, reason = "each test program uses a part")]

use super::Device;

/// Runs `body` in one thread, and returns the value that it leaves in `%out`. The inputs are in
/// `%rd0…`, and, cut or reinterpreted, in `%h0…`, `%r0…`, `%f0…` and `%d0…`.
pub fn eval(body: &str, inputs: &[u64]) -> u64 {
    let mut loads = String::new();
    for index in 0..inputs.len() {
        loads += &format!(
            "ld.param.u64 %rd{index}, [in+{}]; cvt.u32.u64 %r{index}, %rd{index};
             cvt.u16.u64 %h{index}, %rd{index}; mov.b32 %f{index}, %r{index}; mov.b64 %d{index}, %rd{index};\n",
            index * 8
        );
    }
    let text = format!(
        ".version 8.7\n.target sm_90\n.address_size 64\n
         .global .align 16 .b8 g[64];
         .entry k(.param .u64 result, .param .align 8 .b8 in[64]) {{
         .reg .pred %p<9>; .reg .b16 %h<20>; .reg .b32 %r<20>; .reg .b64 %rd<20>; .reg .f32 %f<20>; .reg .f64 %d<20>;
         .reg .b64 %out, %to; .shared .align 16 .b8 s[64]; .local .align 16 .b8 l[64];
         mov.u64 %out, 0; {loads} {body}
         ld.param.u64 %to, [result]; cvta.to.global.u64 %to, %to; st.global.u64 [%to], %out; ret; }}"
    );
    let device = Device::load(text.as_bytes());
    let out = device.memory.alloc(8);
    let kernel = device.kernel("k");
    let mut params = out.to_le_bytes().to_vec();
    params.extend(inputs.iter().flat_map(|input| input.to_le_bytes()));
    params.resize(72, 0);
    let config = wormhole_ptx::LaunchConfig {
        params: &params,
        ..Default::default()
    };
    wormhole_ptx::launch(&kernel, &config, &device.memory, &device.output)
        .unwrap_or_else(|fault| panic!("{body}: {fault}"));
    device.memory.read::<u64>(out, 1)[0]
}

/// Checks 32-bit integer instructions: `op %r10, %r0, %r1, …`.
pub fn words(op: &str, inputs: &[u32], expected: u32) {
    let sources: Vec<String> = (0..inputs.len())
        .map(|index| format!("%r{index}"))
        .collect();
    let body = format!("{op} %r10, {}; cvt.u64.u32 %out, %r10;", sources.join(", "));
    let inputs: Vec<u64> = inputs.iter().map(|&input| u64::from(input)).collect();
    assert_eq!(
        eval(&body, &inputs),
        u64::from(expected),
        "{op} {inputs:x?}"
    );
}

/// Checks 64-bit integer instructions.
pub fn longs(op: &str, inputs: &[u64], expected: u64) {
    let sources: Vec<String> = (0..inputs.len())
        .map(|index| format!("%rd{index}"))
        .collect();
    let body = format!("{op} %out, {};", sources.join(", "));
    assert_eq!(eval(&body, inputs), expected, "{op} {inputs:x?}");
}

/// Checks single precision instructions, bit by bit.
pub fn singles(op: &str, inputs: &[f32], expected: f32) {
    let sources: Vec<String> = (0..inputs.len())
        .map(|index| format!("%f{index}"))
        .collect();
    let body = format!(
        "{op} %f10, {}; mov.b32 %r10, %f10; cvt.u64.u32 %out, %r10;",
        sources.join(", ")
    );
    let bits: Vec<u64> = inputs
        .iter()
        .map(|input| u64::from(input.to_bits()))
        .collect();
    assert_eq!(
        eval(&body, &bits),
        u64::from(expected.to_bits()),
        "{op} {inputs:?}"
    );
}

/// Checks double precision instructions, bit by bit.
pub fn doubles(op: &str, inputs: &[f64], expected: f64) {
    let sources: Vec<String> = (0..inputs.len())
        .map(|index| format!("%d{index}"))
        .collect();
    let body = format!("{op} %d10, {}; mov.b64 %out, %d10;", sources.join(", "));
    let bits: Vec<u64> = inputs.iter().map(|input| input.to_bits()).collect();
    assert_eq!(eval(&body, &bits), expected.to_bits(), "{op} {inputs:?}");
}

/// Canonical NaN of single precision.
pub const NAN: f32 = f32::from_bits(0x7fff_ffff);

pub fn neg(value: i32) -> u32 {
    value.cast_unsigned()
}
