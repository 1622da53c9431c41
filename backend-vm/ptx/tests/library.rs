//! Compares kernels over CUDA's device libraries with results of the CPU.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "small counts"
)]

mod common;

use common::Device;
use wormhole_ptx::LaunchConfig;

fn library() -> Device {
    Device::of("library")
}

#[test]
fn block_wide_sort_and_scan() {
    let device = library();
    let values: Vec<i32> = (0..512_i32)
        .map(|i| (i.wrapping_mul(1_103_515_245) + 12345) >> 7)
        .collect();
    let (input, sorted, sums) = (
        device.memory.upload(&values),
        device.memory.alloc(2048),
        device.memory.alloc(512),
    );
    device
        .launch("sort_and_scan", 1, 128, &[input, sorted, sums])
        .unwrap();
    let mut expected = values.clone();
    expected.sort_unstable();
    assert_eq!(device.memory.read::<i32>(sorted, 512), expected);
    let expected: Vec<i32> = values[..128]
        .iter()
        .scan(0_i32, |sum, value| {
            *sum = sum.wrapping_add(*value);
            Some(*sum)
        })
        .collect();
    assert_eq!(device.memory.read::<i32>(sums, 128), expected);
}

#[test]
fn a_grid_synchronizes() {
    let n = 1000;
    for threads in [1, 2] {
        let device = library();
        let (data, workspace) = (device.memory.alloc(4 * (n + 2)), device.memory.alloc(64));
        let config = LaunchConfig {
            grid: [5, 1, 1],
            block: [64, 1, 1],
            cooperative: true,
            grid_workspace: workspace,
            threads,
            ..LaunchConfig::default()
        };
        device
            .launch_with("rounds", config, &[data, n as u64])
            .unwrap();
        let mut expected = vec![0_i32; n];
        for round in 0..4 {
            for i in 0..n {
                expected[(i * 7 + round) % n] += i as i32;
            }
        }
        expected.extend([28, 11]);
        assert_eq!(device.memory.read::<i32>(data, n + 2), expected);
    }
}

#[test]
fn mathematical_functions() {
    let device = library();
    let inputs: Vec<f64> = (0..64).map(|i| f64::from(i) * 0.37 - 11.3).collect();
    let (input, out) = (device.memory.upload(&inputs), device.memory.alloc(64 * 96));
    device.launch("functions", 1, 64, &[input, out]).unwrap();
    let got = device.memory.read::<f64>(out, 64 * 12);
    for (x, got) in inputs.iter().zip(got.chunks(12)) {
        let a = x.abs();
        let expected = [
            x.sin(),
            x.cos(),
            x.exp(),
            (a + 1.0).ln(),
            a.powf(1.7),
            x.tanh(),
            x.cbrt(),
            x.atan2(2.0),
            x.hypot(3.0),
            x % 0.7,
            x.round_ties_even(),
            x / 3.0,
        ];
        for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
            assert!(
                (got - expected).abs() <= expected.abs() * 1e-14 + 1e-300,
                "{index} of {x}: {got} {expected}"
            );
        }
    }
    let inputs: Vec<f32> = (0..64_u8).map(|i| f32::from(i) * 0.37 - 11.3).collect();
    let (input, out) = (device.memory.upload(&inputs), device.memory.alloc(64 * 32));
    device
        .launch("single_functions", 1, 64, &[input, out])
        .unwrap();
    let got = device.memory.read::<f32>(out, 64 * 8);
    for (x, got) in inputs.iter().zip(got.chunks(8)) {
        let a = x.abs();
        let expected = [
            x.sin(),
            x.sin(),
            x.exp(),
            (a + 1.0).ln(),
            a.powf(1.7),
            x.tanh(),
            1.0 / (a + 1.0).sqrt(),
            x * 2.0 + 1.0,
        ];
        for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
            let bound = if index == 7 {
                0.01
            } else {
                expected.abs() * 1e-5 + 1e-6
            };
            assert!(
                (got - expected).abs() <= bound,
                "{index} of {x}: {got} {expected}"
            );
        }
    }
}

#[test]
fn aggregates_travel_through_parameters_and_results() {
    let device = library();
    let out = device.memory.alloc(256);
    let big: Vec<i32> = (0..20).map(|i| i * i - 30).collect();
    let kernel = device.kernel("aggregates");
    let mut params = out.to_le_bytes().to_vec();
    params.extend(big.iter().flat_map(|value| value.to_le_bytes()));
    let config = LaunchConfig {
        block: [64, 1, 1],
        params: &params,
        ..LaunchConfig::default()
    };
    wormhole_ptx::launch(&kernel, &config, &device.memory, &device.output).unwrap();
    let expected: Vec<i32> = (0..64)
        .map(|i: usize| {
            (0..20)
                .map(|k| ((i * k) as i32 + big[19 - k]) * big[(k + i) % 20])
                .sum()
        })
        .collect();
    assert_eq!(device.memory.read::<i32>(out, 64), expected);
}

#[test]
fn memory_on_the_stack_differs_by_thread() {
    let device = library();
    let out = device.memory.alloc(256);
    device.launch("stack", 1, 64, &[out, 9]).unwrap();
    let expected: Vec<i32> = (0..64)
        .map(|t| {
            let count = 9 + t % 5;
            (0..count).map(|i| (count - 1 - i) * t * i).sum()
        })
        .collect();
    assert_eq!(device.memory.read::<i32>(out, 64), expected);
}
