//! Compares kernels that nvcc compiled with results of the CPU.

#![expect(clippy::cast_sign_loss, reason = "small counts")]

mod common;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use common::Device;
use wormhole_ptx::{FaultKind, LaunchConfig};

fn basics() -> Device {
    Device::of("basics")
}

#[test]
fn vector_add_with_constants_and_a_ragged_end() {
    let device = basics();
    let n = 1000;
    let a: Vec<f32> = (0..n).map(|i| i as f32 * 0.5).collect();
    let b: Vec<f32> = (0..n).map(|i| 100.0 - i as f32).collect();
    let (da, db, dc) = (
        device.memory.upload(&a),
        device.memory.upload(&b),
        device.memory.alloc(n * 4),
    );
    device
        .launch("vector_add", 8, 128, &[da, db, dc, n as u64])
        .unwrap();
    let weights = [0.5, 1.5, 2.5, 3.5_f32];
    let expected: Vec<f32> = (0..n).map(|i| b[i].mul_add(weights[i & 3], a[i])).collect();
    assert_eq!(device.memory.read::<f32>(dc, n), expected);
}

#[test]
fn tiled_matrix_product() {
    let device = basics();
    let n = 64;
    let a: Vec<f32> = (0..n * n).map(|i| (i % 13) as f32 - 6.0).collect();
    let b: Vec<f32> = (0..n * n).map(|i| (i % 7) as f32 - 3.0).collect();
    let (da, db, dc) = (
        device.memory.upload(&a),
        device.memory.upload(&b),
        device.memory.alloc(n * n * 4),
    );
    let config = LaunchConfig {
        grid: [4, 4, 1],
        block: [16, 16, 1],
        threads: 2,
        ..LaunchConfig::default()
    };
    device
        .launch_with("matrix_mul", config, &[da, db, dc, n as u64])
        .unwrap();
    let c = device.memory.read::<f32>(dc, n * n);
    for y in 0..n {
        for x in 0..n {
            let sum: f32 = (0..n).map(|k| a[y * n + k] * b[k * n + x]).sum();
            assert_eq!(c[y * n + x], sum, "({x}, {y})");
        }
    }
}

#[test]
fn reduction_with_shuffles_and_atomics() {
    let device = basics();
    let n = 10_000;
    let values: Vec<i32> = (0..n).map(|i| i * 3 - 5000).collect();
    let (input, out) = (device.memory.upload(&values), device.memory.alloc(8));
    let config = LaunchConfig {
        grid: [7, 1, 1],
        block: [256, 1, 1],
        dynamic_shared: 64,
        threads: 2,
        ..LaunchConfig::default()
    };
    device
        .launch_with("reduce_sum", config, &[input, out, n as u64])
        .unwrap();
    assert_eq!(
        device.memory.read::<i64>(out, 1)[0],
        values.iter().map(|&v| i64::from(v)).sum::<i64>()
    );
}

#[test]
fn locks_inside_a_warp_make_progress() {
    for kernel in ["spin_lock", "spin_lock_hard"] {
        for (blocks, threads) in [(2, 96), (3, 1024)] {
            let device = basics();
            let (lock, value) = (device.memory.alloc(4), device.memory.alloc(4));
            device
                .launch(kernel, blocks, threads, &[lock, value])
                .unwrap();
            let count = device.memory.read::<u32>(value, 1)[0];
            assert_eq!(count, blocks * threads, "{kernel}");
        }
    }
}

#[test]
fn divergent_code() {
    let device = basics();
    let out = device.memory.alloc(4 * 128);
    device.launch("diverge", 1, 128, &[out]).unwrap();
    let expected: Vec<i32> = (0..128)
        .map(|i: i32| {
            let mut v = 0_i32;
            for k in 0..=i {
                match k % 3 {
                    0 => v += k,
                    1 => v ^= k * 7,
                    _ => {
                        v -= 2;
                        if v < -100 {
                            break;
                        }
                    }
                }
            }
            match i % 7 {
                0 => v + 1,
                1 => v * 3,
                2 => v - i,
                3 => !v,
                4 => v << 2,
                5 => v / 3,
                _ => v % 11,
            }
        })
        .collect();
    assert_eq!(device.memory.read::<i32>(out, 128), expected);
}

#[test]
fn recursion_and_calls_through_tables_and_objects() {
    let device = basics();
    let out = device.memory.alloc(4 * 64);
    device.launch("recursion", 1, 64, &[out]).unwrap();
    let fibonacci = [0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89];
    let expected: Vec<i32> = (0..64).map(|i| fibonacci[i % 12]).collect();
    assert_eq!(device.memory.read::<i32>(out, 64), expected);

    device.launch("virtual_calls", 1, 64, &[out]).unwrap();
    let expected: Vec<f32> = (0..64)
        .map(|i| if i % 2 == 1 { i * i } else { 3 * i * i } as f32)
        .collect();
    assert_eq!(device.memory.read::<f32>(out, 64), expected);

    device.launch("function_pointers", 1, 64, &[out]).unwrap();
    let expected: Vec<i32> = (0..64).map(|i| i * (2 + i % 2)).collect();
    assert_eq!(device.memory.read::<i32>(out, 64), expected);
}

#[test]
fn printf_formats_as_c_does() {
    let device = basics();
    device.launch("hello", 1, 32, &[2]).unwrap();
    assert_eq!(
        device.output.text(),
        "block 0 thread 0:  0.00 text x -5000000000 7%\nblock 0 thread 1:  1.50 text x -5000000000 7%\n"
    );
    assert!(device.kernel("hello").uses_printf());
    assert!(!device.kernel("diverge").uses_printf());
}

/// Checks each in either order: the second kernel reuses the code that was lowered for the first.
#[test]
fn a_function_does_the_same_in_every_kernel_that_calls_it() {
    let expected = [("first", 10), ("second", 12), ("wide", 28 + 14)];
    for turned in [0, 1, 2] {
        let device = Device::load(include_bytes!("kernels/shared_functions.ptx"));
        let out = device.memory.alloc(4);
        for index in 0..6 {
            let (kernel, value) = expected[(index + turned) % 3];
            let config = LaunchConfig {
                dynamic_shared: 8,
                ..LaunchConfig::default()
            };
            device.launch_with(kernel, config, &[out]).unwrap();
            assert_eq!(device.memory.read::<u32>(out, 1), [value], "{kernel}");
        }
    }
}

#[test]
fn faults_have_their_kinds() {
    let device = basics();
    let small = device.memory.alloc(64);
    let fault = device.launch("wild", 1, 1, &[small]).unwrap_err();
    assert_eq!(
        fault.kind,
        FaultKind::IllegalAddress {
            address: small + (4 << 40),
            bytes: 4,
            write: true
        }
    );
    let fault = device.launch("wild", 1, 1, &[0]).unwrap_err();
    assert!(matches!(fault.kind, FaultKind::IllegalAddress { .. }));
    let fault = device.launch("misaligned", 1, 1, &[small]).unwrap_err();
    assert!(matches!(fault.kind, FaultKind::Misaligned { .. }));
    let fault = device.launch("traps", 1, 32, &[]).unwrap_err();
    assert_eq!((fault.kind, fault.thread), (FaultKind::Trap, [3, 0, 0]));
    let fault = device.launch("asserts", 2, 8, &[7]).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Assert);
    let text = device.output.text();
    assert!(text.contains("basics.cu:"), "{text}");
    let place = ": block: [0,0,0], thread: [7,0,0] Assertion `threadIdx.x < n` failed.\n";
    let other = ": block: [1,0,0], thread: [7,0,0] Assertion `threadIdx.x < n` failed.\n";
    assert!(text.ends_with(place) || text.ends_with(other), "{text}");
    device.launch("asserts", 2, 8, &[8]).unwrap();
}

#[test]
fn clocks_advance() {
    let device = basics();
    let out = device.memory.alloc(8);
    device.launch("spin", 1, 1, &[200_000, out]).unwrap();
    let waited = device.memory.read::<i64>(out, 1)[0];
    assert!(waited >= 200_000, "{waited}");
}

#[test]
fn a_runaway_kernel_is_cancelled() {
    let device = basics();
    let stop = device.memory.alloc(4);
    let cancel = AtomicBool::new(false);
    let config = LaunchConfig {
        grid: [4, 1, 1],
        block: [64, 1, 1],
        threads: 2,
        cancel: Some(&cancel),
        ..LaunchConfig::default()
    };
    std::thread::scope(|scope| {
        let launched = scope.spawn(|| device.launch_with("forever", config, &[stop]));
        cancel.store(true, Ordering::Relaxed);
        assert_eq!(
            launched.join().unwrap().unwrap_err().kind,
            FaultKind::Cancelled
        );
    });
}

/// PTX that calls `cudaGraphSetConditional` as the compiler does.
const SETS_A_CONDITION: &[u8] = b".version 8.3\n.target sm_70\n.address_size 64\n\
    .extern .func cudaGraphSetConditional (.param .b64 a, .param .b32 b);\n\
    .visible .entry put(.param .u64 h, .param .u32 v) {\n\
    .reg .b64 %h; .reg .b32 %v; ld.param.u64 %h, [h]; ld.param.u32 %v, [v];\n\
    { .param .b64 p; st.param.b64 [p+0], %h; .param .b32 q; st.param.b32 [q+0], %v;\n\
    call.uni cudaGraphSetConditional, (p, q); } ret; }";

#[test]
fn a_kernel_sets_the_conditions_of_its_graph_and_no_others() {
    let device = Device::load(SETS_A_CONDITION);
    let conditions = [10, 20, 30].map(AtomicU32::new);
    let put = |handle, value, conditions| {
        let config = LaunchConfig {
            conditions,
            ..LaunchConfig::default()
        };
        device.launch_with("put", config, &[handle, value])
    };
    put(2, 7, &conditions).unwrap();
    put(3, u32::MAX.into(), &conditions).unwrap();
    let values = conditions.each_ref().map(|c| c.load(Ordering::Relaxed));
    assert_eq!(values, [10, 7, u32::MAX]);
    for handle in [0, 4, u64::MAX, 1 << 32 | 1] {
        let fault = put(handle, 1, &conditions).unwrap_err();
        assert_eq!(fault.kind, FaultKind::InvalidCondition { handle });
    }
    let fault = put(1, 1, &[]).unwrap_err();
    assert_eq!(
        fault.kind,
        FaultKind::InvalidCondition { handle: 1 },
        "no graph"
    );
}

#[test]
fn the_heap_serves_kernels() {
    let device = basics();
    let out = device.memory.alloc(8 * 64);
    device.launch("heap", 1, 64, &[out]).unwrap();
    let expected: Vec<u64> = (0..64).map(|i| 4 * i + 6).collect();
    assert_eq!(device.memory.read::<u64>(out, 64), expected);
    assert!(
        device.heap.malloc(1 << 15).is_some(),
        "everything was freed"
    );
}

#[test]
fn variables_hold_addresses_of_others() {
    let device = basics();
    let out = device.memory.alloc(4);
    device.launch("through_pointer", 1, 1, &[out]).unwrap();
    assert_eq!(device.memory.read::<i32>(out, 1)[0], 42);
    let (address, size) = device.program.variable("counter").unwrap();
    assert_eq!((device.memory.read::<i32>(address, 1)[0], size), (42, 4));
}

#[test]
fn operations_of_a_warp() {
    let device = basics();
    let out = device.memory.alloc(4 * 12 * 32);
    device.launch("warps", 1, 32, &[out]).unwrap();
    let got = device.memory.read::<u32>(out, 12 * 32);
    let ballot = (0..32)
        .filter(|i| i % 3 == 0)
        .fold(0_u32, |m, i| m | 1 << i);
    for i in 0..32_u32 {
        let group = (0..32)
            .filter(|j| j / 5 == i / 5)
            .fold(0_u32, |m, j| m | 1 << j);
        let expected = [
            ballot,
            1,
            0,
            if i < 3 { i * 10 } else { (i - 3) * 10 },
            (i ^ 5) * 10,
            (i / 8 * 8 + 1) * 10,
            group,
            u32::MAX.wrapping_add(1),
            496,
            31,
            u32::MAX,
            if i % 16 == 15 && i == 31 { i } else { i + 1 },
        ];
        let row = &got[i as usize * 12..][..12];
        assert_eq!(row[..11], expected[..11], "lane {i}");
        if i % 16 != 15 {
            assert_eq!(row[11], expected[11], "lane {i}");
        }
    }
}

#[test]
fn lanes_that_parted_meet_at_warp_and_block_barriers() {
    let device = basics();
    let out = device.memory.alloc(4 * 64);
    device.launch("split_sync", 1, 64, &[out]).unwrap();
    let v = |i: i32| if i & 1 == 1 { i * 3 } else { i * 5 };
    let expected: Vec<i32> = (0..64).map(|i| v(63 - i) + 16 + 1 + 1).collect();
    assert_eq!(device.memory.read::<i32>(out, 64), expected);
}

#[test]
fn atomics_across_blocks() {
    let device = basics();
    let (count, sum, max) = (
        device.memory.alloc(4),
        device.memory.alloc(4),
        device.memory.alloc(4),
    );
    device
        .launch("many_blocks", 500, 96, &[count, sum, max])
        .unwrap();
    assert_eq!(device.memory.read::<u32>(count, 1)[0], 48_000);
    assert_eq!(device.memory.read::<f32>(sum, 1)[0], 24_000.0);
    assert_eq!(device.memory.read::<i32>(max, 1)[0], 47_999);
}

#[test]
fn blocks_that_wait_for_each_other_run_together() {
    for (threads, cooperative) in [(1, false), (2, true), (1, true)] {
        let device = basics();
        let arrived = device.memory.alloc(4);
        let config = LaunchConfig {
            grid: [24, 1, 1],
            block: [64, 1, 1],
            threads,
            cooperative,
            ..LaunchConfig::default()
        };
        device
            .launch_with("rendezvous", config, &[arrived, 24])
            .unwrap();
        assert_eq!(device.memory.read::<i32>(arrived, 1)[0], 24);
    }
}

#[test]
fn aliases_and_constants_are_what_they_stand_for() {
    let device = Device::load(
        b".version 8.7\n.target sm_90\n.address_size 64\n
          .const .align 8 .b8 table[16] = {1, 2, 3}; .global .align 8 .b8 data[16];
          .func (.reg .u32 r) second; .func (.reg .u32 r) first { mov.u32 r, 42; ret; }
          .alias second, first;
          .visible .entry k(.param .u64 out) { .reg .u32 %r<9>; .reg .u64 %rd<9>; .reg .pred %p<9>;
          ld.param.u64 %rd1, [out]; call.uni (%r1), second; mov.u64 %rd2, table; mov.u64 %rd3, data;
          cvta.const.u64 %rd2, %rd2; isspacep.const %p1, %rd2; isspacep.const %p2, %rd3;
          isspacep.global %p3, %rd2; isspacep.global %p4, %rd3;
          selp.u32 %r2, 1, 0, %p1; @%p2 add.u32 %r2, %r2, 2; @%p3 add.u32 %r2, %r2, 4;
          @%p4 add.u32 %r2, %r2, 8; st.global.v2.u32 [%rd1], {%r1, %r2}; ret; }",
    );
    let out = device.memory.alloc(8);
    device.launch("k", 1, 1, &[out]).unwrap();
    assert_eq!(device.memory.read::<u32>(out, 2), [42, 9]);
}
