//! Measures how many thread-instructions per second one core interprets, and the duration of whole
//! kernels.
//!
//! `cargo run --release -p wormhole-ptx --example speed`

use std::time::Instant;

use wormhole_ptx::{GlobalMemory, LaunchConfig, Module, Output, Region, launch};

const HEAD: &str = ".version 8.0\n.target sm_90\n.address_size 64\n";
/// Iterations of the loop of each kernel.
const ROUNDS: u64 = 20_000;
/// Number of runs of each kernel.
const RUNS: usize = 12;
/// Number of copies of the measured instructions in the loop.
const UNROLL: usize = 16;

/// Global memory of one buffer.
struct Memory(Vec<u64>);

// SAFETY: the buffer is neither resized nor freed while launches run.
unsafe impl GlobalMemory for Memory {
    fn region(&self, address: u64, bytes: u64) -> Option<Region> {
        let (start, length) = (self.0.as_ptr() as u64, (self.0.len() * 8) as u64);
        let inside = address >= start && address.checked_add(bytes)? <= start + length;
        inside.then_some(Region {
            start,
            bytes: length,
            host: self.0.as_ptr().cast_mut().cast(),
            writable: true,
        })
    }
}

struct Silent;

impl Output for Silent {
    fn finding(&self, _: &str) {}
    fn printf(&self, _: &[u8]) {}
    fn assertion(&self, _: &[u8]) {}
}

/// Measures products of square matrices by kernels that nvcc compiled, on one core.
fn products() {
    println!("{:>20}  seconds on one core", "product of 512^2");
    let n = 512_u64;
    let memory = Memory(vec![0; 3 << 17]);
    let base = memory.0.as_ptr() as u64;
    let text = include_str!("../tests/kernels/basics.ptx");
    let module = Module::from_ptx(text).expect("valid PTX");
    let addresses = vec![base; module.variables().len()];
    let program = module.link(addresses);
    let kernel = program.kernel("matrix_mul").expect("supported");
    let matrix = n * n * 4;
    let args = [base, base + matrix, base + 2 * matrix, n];
    let mut params = vec![0; kernel.param_bytes() as usize];
    for (layout, arg) in kernel.params().iter().zip(args) {
        let (at, size) = (layout.offset as usize, layout.size as usize);
        params[at..at + size].copy_from_slice(&arg.to_le_bytes()[..size]);
    }
    let config = LaunchConfig {
        grid: [32, 32, 1],
        block: [16, 16, 1],
        params: &params,
        ..LaunchConfig::default()
    };
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        let start = Instant::now();
        launch(&kernel, &config, &memory, &Silent).expect("no fault");
        best = best.min(start.elapsed().as_secs_f64());
    }
    println!("{:>20}  {best:.2}", "tiled, f32");
}

fn main() {
    let memory = Memory(vec![0; 1 << 16]);
    let kernels = [
        ("add.u32", "add.u32 %r1, %r1, %r2;"),
        ("mad.lo.s32", "mad.lo.s32 %r1, %r1, %r2, %r3;"),
        ("add.u64", "add.u64 %rd1, %rd1, %rd2;"),
        ("fma.rn.f32", "fma.rn.f32 %f1, %f1, %f2, %f3;"),
        ("fma.rn.f64", "fma.rn.f64 %d1, %d1, %d2, %d3;"),
        (
            "setp and selp",
            "setp.lt.s32 %p1, %r1, %r2; selp.b32 %r3, %r1, %r2, %p1;",
        ),
        ("ld.shared", "ld.shared.f32 %f1, [%r5];"),
        ("ld.global", "ld.global.f32 %f1, [%rd3];"),
        ("st.global", "st.global.f32 [%rd3], %f1;"),
        ("add.f16", "add.f16 %h1, %h1, %h2;"),
        ("mul.bf16", "mul.bf16 %h1, %h1, %h2;"),
        ("cvt.f32.f16", "cvt.f32.f16 %f1, %h1;"),
        ("add.f16x2", "add.f16x2 %r1, %r1, %r2;"),
        ("fma.rn.bf16", "fma.rn.bf16 %h1, %h1, %h2, %h3;"),
        ("cvt.rn.f16.f32", "cvt.rn.f16.f32 %h1, %f1;"),
        ("mul.hi.u64", "mul.hi.u64 %rd1, %rd1, %rd2;"),
        ("div.s32", "div.s32 %r1, %r2, %r3;"),
        ("lop3.b32", "lop3.b32 %r1, %r1, %r2, %r3, 150;"),
        (
            "ld.global.v4",
            "ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd5];",
        ),
        ("atom.add", "atom.global.add.u32 %r1, [%rd3], 1;"),
        (
            "mma.m16n8k16",
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1, %f2, %f3, %f4}, {%r1, %r2, %r3, %r4}, {%r1, %r2}, {%f1, %f2, %f3, %f4};",
        ),
        ("sin.approx", "sin.approx.f32 %f1, %f1;"),
        ("cvt.rn.f32.s32", "cvt.rn.f32.s32 %f1, %r1;"),
        ("shfl.sync.bfly", "shfl.sync.bfly.b32 %r1, %r1, 1, 31, -1;"),
        (
            "divergent branch",
            "@%p2 bra L$; add.u32 %r1, %r1, 1; L$: add.u32 %r1, %r1, 2;",
        ),
    ];
    println!(
        "{:>20}  {:>10}  million thread-instructions/s on one core",
        "instruction", "count"
    );
    for (name, body) in kernels {
        let instructions = body.matches(';').count() * UNROLL + 3;
        let unrolled: String = (0..UNROLL)
            .map(|copy| body.replace('$', &copy.to_string()) + "\n")
            .collect();
        let text = format!(
            "{HEAD}.entry k(.param .u64 p) {{
            .reg .pred %p<4>; .reg .b32 %r<9>; .reg .b16 %h<9>; .reg .b64 %rd<9>; .reg .f32 %f<9>; .reg .f64 %d<9>;
            .shared .align 4 .b8 s[4096];
            mov.u32 %r5, %tid.x; mul.wide.u32 %rd4, %r5, 4; shl.b32 %r5, %r5, 2;
            ld.param.u64 %rd3, [p]; shl.b64 %rd5, %rd4, 2; add.u64 %rd5, %rd5, %rd3; add.u64 %rd3, %rd3, %rd4; and.b32 %r8, %r5, 4; setp.ne.u32 %p2, %r8, 0;
            mov.u32 %r7, 0;
            LOOP: {unrolled}
            add.u32 %r7, %r7, 1; setp.lt.u32 %p3, %r7, {ROUNDS}; @%p3 bra LOOP; ret; }}"
        );
        let program = Module::from_ptx(&text).expect("valid PTX").link(Vec::new());
        let kernel = program.kernel("k").expect("supported");
        let params = (memory.0.as_ptr() as u64).to_le_bytes();
        let config = LaunchConfig {
            block: [32, 1, 1],
            params: &params,
            ..LaunchConfig::default()
        };
        let count = ROUNDS * instructions as u64 * 32;
        // The best of several runs: the speed of the machine without other load.
        let mut rate = 0.0_f64;
        for _ in 0..RUNS {
            let start = Instant::now();
            launch(&kernel, &config, &memory, &Silent).expect("no fault");
            rate = rate.max(count as f64 / start.elapsed().as_secs_f64() / 1e6);
        }
        println!("{name:>20}  {count:>10}  {rate:>8.0}");
    }
    products();
}
