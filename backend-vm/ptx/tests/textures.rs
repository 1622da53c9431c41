//! Compares textures and surfaces with the formulas of the CUDA C++ Programming Guide.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "small indices"
)]

mod common;

use std::collections::HashMap;
use std::sync::Arc;

use common::Device;
use wormhole_ptx::{
    AddressMode, ChannelType, FaultKind, Image, LaunchConfig, Level, Objects, Texture,
};

#[derive(Debug, Default)]
struct Table {
    textures: HashMap<u64, Arc<Texture>>,
    surfaces: HashMap<u64, Arc<Image>>,
}

impl Objects for Table {
    fn texture(&self, handle: u64) -> Option<Arc<Texture>> {
        self.textures.get(&handle).cloned()
    }
    fn surface(&self, handle: u64) -> Option<Arc<Image>> {
        self.surfaces.get(&handle).cloned()
    }
}

fn device() -> Device {
    Device::of("textures")
}

/// Returns a level whose rows are contiguous.
fn packed(address: u64, extent: [u32; 3], texel: u32) -> Level {
    let row_pitch = u64::from(extent[0] * texel);
    Level {
        address,
        extent,
        row_pitch,
        slice_pitch: row_pitch * u64::from(extent[1]),
    }
}

fn image(channel: ChannelType, channels: u32, layers: u32, levels: Vec<Level>) -> Image {
    Image {
        channel,
        channels,
        dimensions: match levels[0].extent {
            [_, 1, 1] => 1,
            [_, _, 1] => 2,
            _ => 3,
        },
        layers,
        layered: layers > 1,
        cubes: false,
        levels,
    }
}

fn texture(image: Image) -> Texture {
    Texture {
        image,
        address_modes: [AddressMode::Clamp; 3],
        linear: false,
        linear_levels: false,
        normalized: false,
        as_floats: false,
        srgb: false,
        seamless: false,
        border: [0; 4],
        level_bias: 0.0,
        level_clamp: [0.0, 100.0],
    }
}

/// Fetches at three coordinates in each of up to 32 threads.
fn fetch<T: Copy + Default>(
    device: &Device,
    kernel: &str,
    texture: Texture,
    at: &[[f32; 3]],
    per_thread: usize,
) -> Vec<T> {
    let mut table = Table::default();
    table.textures.insert(7, Arc::new(texture));
    let flat: Vec<f32> = at.iter().flatten().copied().collect();
    let (coordinates, out) = (
        device.memory.upload(&flat),
        device.memory.alloc(at.len() * 16),
    );
    let config = LaunchConfig {
        block: [at.len() as u32, 1, 1],
        objects: Some(&table),
        ..LaunchConfig::default()
    };
    device
        .launch_with(kernel, config, &[7, coordinates, out])
        .unwrap_or_else(|fault| panic!("{fault}"));
    device.memory.read(out, at.len() * per_thread)
}

fn floats(device: &Device, kernel: &str, texture: Texture, at: &[[f32; 3]]) -> Vec<[f32; 4]> {
    let flat: Vec<f32> = fetch(device, kernel, texture, at, 4);
    flat.chunks_exact(4)
        .map(|texel| texel.try_into().unwrap())
        .collect()
}

fn firsts(device: &Device, kernel: &str, texture: Texture, at: &[[f32; 3]]) -> Vec<f32> {
    floats(device, kernel, texture, at)
        .iter()
        .map(|texel| texel[0])
        .collect()
}

#[test]
fn points_and_addressing_modes() {
    let device = device();
    let values: Vec<f32> = (0..4).map(|i| 10.0 + i as f32).collect();
    let address = device.memory.upload(&values);
    let line = || {
        texture(image(
            ChannelType::Single,
            1,
            1,
            vec![packed(address, [4, 1, 1], 4)],
        ))
    };
    let at: Vec<[f32; 3]> = [-5.5_f32, -0.5, 0.0, 0.99, 2.5, 3.99, 4.0, 9.5]
        .map(|x| [x, 0.0, 0.0])
        .to_vec();
    let normalized: Vec<[f32; 3]> = at.iter().map(|[x, ..]| [x / 4.0, 0.0, 0.0]).collect();
    let clamped = [10.0, 10.0, 10.0, 10.0, 12.0, 13.0, 13.0, 13.0];
    assert_eq!(firsts(&device, "lines", line(), &at), clamped);
    let mode = |mode, normalized| Texture {
        address_modes: [mode; 3],
        normalized,
        border: [(-1.0_f32).to_bits(), 0, 0, 0],
        ..line()
    };
    let border = [-1.0, -1.0, 10.0, 10.0, 12.0, 13.0, -1.0, -1.0];
    assert_eq!(
        firsts(&device, "lines", mode(AddressMode::Border, false), &at),
        border
    );
    // Without normalized coordinates, an image does not repeat.
    assert_eq!(
        firsts(&device, "lines", mode(AddressMode::Wrap, false), &at),
        clamped
    );
    let wrapped = [12.0, 13.0, 10.0, 10.0, 12.0, 13.0, 10.0, 11.0];
    assert_eq!(
        firsts(&device, "lines", mode(AddressMode::Wrap, true), &normalized),
        wrapped
    );
    let mirrored = [12.0, 10.0, 10.0, 10.0, 12.0, 13.0, 13.0, 11.0];
    assert_eq!(
        firsts(
            &device,
            "lines",
            mode(AddressMode::Mirror, true),
            &normalized
        ),
        mirrored
    );
    // Missing channels.
    assert_eq!(
        floats(&device, "lines", line(), &at[2..3]),
        [[10.0, 0.0, 0.0, 0.0]]
    );
}

/// Computes linear filtering by its formula, with fractions of 8 bits.
fn interpolated(values: &[f32], extent: [usize; 3], at: [f32; 3], dimensions: usize) -> f32 {
    let mut sum = 0.0;
    for corner in 0..1 << dimensions {
        let (mut index, mut weight) = (0, 1.0);
        for dimension in (0..dimensions).rev() {
            let x = at[dimension] - 0.5;
            let alpha = ((x - x.floor()) * 256.0).round() / 256.0;
            let far = corner >> dimension & 1;
            let i = (x.floor() as i64 + far).clamp(0, extent[dimension] as i64 - 1) as usize;
            index = index * extent[dimension] + i;
            weight *= if far == 1 { alpha } else { 1.0 - alpha };
        }
        sum += weight * values[index];
    }
    sum
}

#[test]
fn linear_filtering_in_one_two_and_three_dimensions() {
    let device = device();
    let values: Vec<f32> = (0..60).map(|i| (i * i % 17) as f32).collect();
    let address = device.memory.upload(&values);
    let at: Vec<[f32; 3]> = (0..30)
        .map(|i| i as f32)
        .map(|i| [i * 0.23 - 0.6, i * 0.17 - 0.3, i * 0.13 - 0.4])
        .collect();
    // The tolerance is the error of rounding the weights to 1/256, for values up to 16.
    for (kernel, dimensions, extent, tolerance) in [
        ("lines", 1, [5, 1, 1], 1e-4),
        ("planes", 2, [5, 4, 1], 4.0 / 32.0),
        ("volumes", 3, [5, 4, 3], 8.0 / 16.0),
    ] {
        let level = packed(address, extent, 4);
        let filtered = Texture {
            linear: true,
            ..texture(image(ChannelType::Single, 1, 1, vec![level]))
        };
        let got = firsts(&device, kernel, filtered, &at);
        for (got, at) in got.into_iter().zip(&at) {
            let expected = interpolated(&values, extent.map(|e| e as usize), *at, dimensions);
            assert!(
                (got - expected).abs() < tolerance,
                "{kernel} {at:?}: {got} {expected}"
            );
        }
    }
}

/// Fractions of a position between two texels of each dimension, in 1/256, and the weights of the eight texels
/// around it on an H200, in 1/256.
const WEIGHTS: [([u8; 3], [u8; 8]); 12] = [
    ([1, 128, 128], [64, 0, 63, 1, 64, 0, 63, 1]),
    ([128, 1, 128], [64, 64, 0, 0, 64, 64, 0, 0]),
    ([128, 128, 1], [64, 64, 63, 64, 0, 0, 0, 1]),
    ([128, 128, 128], [32, 32, 32, 32, 32, 32, 32, 32]),
    ([64, 2, 85], [127, 43, 1, 0, 64, 21, 0, 0]),
    ([7, 243, 171], [4, 0, 79, 2, 8, 0, 158, 5]),
    ([31, 7, 7], [213, 29, 6, 1, 6, 1, 0, 0]),
    ([3, 3, 13], [237, 3, 3, 0, 13, 0, 0, 0]),
    ([200, 224, 85], [5, 17, 32, 117, 2, 8, 17, 58]),
    ([85, 3, 7], [164, 82, 2, 1, 5, 2, 0, 0]),
    ([100, 243, 3], [8, 5, 146, 94, 0, 0, 2, 1]),
    ([5, 5, 100], [150, 3, 3, 0, 96, 2, 2, 0]),
];

#[test]
fn the_weights_of_filtering_are_a_gpus() {
    let device = device();
    let at = WEIGHTS.map(|(fractions, _)| fractions.map(|part| f32::from(part) / 256.0 + 0.5));
    for corner in 0..8 {
        let mut values = [0.0_f32; 8];
        values[corner] = 256.0;
        let level = packed(device.memory.upload(&values), [2, 2, 2], 4);
        let filtered = Texture {
            linear: true,
            ..texture(image(ChannelType::Single, 1, 1, vec![level]))
        };
        let expected = WEIGHTS.map(|(_, weights)| f32::from(weights[corner]));
        assert_eq!(firsts(&device, "volumes", filtered, &at), expected);
    }
}

#[test]
fn integers_are_read_as_they_are_or_as_floats() {
    let device = device();
    let bytes: [u8; 8] = [0, 255, 51, 128, 102, 204, 1, 2];
    let address = device.memory.upload(&bytes);
    let four = |channel| texture(image(channel, 4, 1, vec![packed(address, [2, 1, 1], 4)]));
    let at = [[0.5, 0.5, 0.0], [1.5, 0.5, 0.0]];
    let read: Vec<u8> = fetch(&device, "bytes", four(ChannelType::Unsigned8), &at, 4);
    assert_eq!(read, bytes);
    let as_floats = Texture {
        as_floats: true,
        ..four(ChannelType::Unsigned8)
    };
    let unit = |byte: u8| f32::from(byte) / 255.0;
    let expected = [0, 255, 51, 128].map(unit);
    assert_eq!(
        floats(&device, "planes", as_floats.clone(), &at)[0],
        expected
    );
    let signed = Texture {
        as_floats: true,
        ..four(ChannelType::Signed8)
    };
    let expected = [0.0, -1.0 / 127.0, 51.0 / 127.0, -1.0];
    assert_eq!(floats(&device, "planes", signed, &at)[0], expected);
    let srgb = floats(
        &device,
        "planes",
        Texture {
            srgb: true,
            ..as_floats
        },
        &at,
    )[0];
    assert!(
        (srgb[2] - 0.033_105).abs() < 1e-4 && srgb[3] == unit(128),
        "{srgb:?}"
    );
    let halves = device.memory.upload(&[0x3c00_u16, 0xc000]);
    let two = texture(image(
        ChannelType::Half,
        2,
        1,
        vec![packed(halves, [1, 1, 1], 4)],
    ));
    assert_eq!(
        floats(&device, "planes", two, &at)[0],
        [1.0, -2.0, 0.0, 0.0]
    );
}

#[test]
fn fetches_by_index() {
    let device = device();
    let values: Vec<i32> = (0..8).map(|i| i * 100).collect();
    let address = device.memory.upload(&values);
    let pairs = texture(image(
        ChannelType::Signed32,
        2,
        1,
        vec![packed(address, [4, 1, 1], 8)],
    ));
    let mut table = Table::default();
    table.textures.insert(7, Arc::new(pairs));
    let (at, out) = (
        device.memory.upload(&[0, 3, -1, 4]),
        device.memory.alloc(32),
    );
    let config = LaunchConfig {
        block: [4, 1, 1],
        objects: Some(&table),
        ..LaunchConfig::default()
    };
    device
        .launch_with("fetches", config, &[7, at, out])
        .unwrap();
    let expected = [0, 100, 600, 700, 0, 0, 0, 0];
    assert_eq!(device.memory.read::<i32>(out, 8), expected);
}

#[test]
fn layers_and_faces() {
    let device = device();
    let values: Vec<f32> = (0..6 * 4).map(|i| i as f32).collect();
    let address = device.memory.upload(&values);
    let six = || {
        texture(image(
            ChannelType::Single,
            1,
            6,
            vec![packed(address, [2, 2, 1], 4)],
        ))
    };
    let at = [[0.5, 0.5, 0.0], [1.5, 0.5, 2.0], [0.5, 1.5, 9.0]];
    assert_eq!(firsts(&device, "layers", six(), &at), [0.0, 9.0, 22.0]);
    // On each face, the quarter towards its first texel.
    let towards = [
        [1.0, 0.5, 0.5],
        [-1.0, 0.5, -0.5],
        [-0.5, 1.0, -0.5],
        [-0.5, -1.0, 0.5],
        [-0.5, 0.5, 1.0],
        [0.5, 0.5, -1.0],
    ];
    assert_eq!(
        firsts(&device, "cubes", six(), &towards),
        [0.0, 4.0, 8.0, 12.0, 16.0, 20.0]
    );
    let away = towards.map(|[x, y, z]| {
        let turn = |v: f32| if v.abs() == 0.5 { -v } else { v };
        [turn(x), turn(y), turn(z)]
    });
    assert_eq!(
        firsts(&device, "cubes", six(), &away),
        [3.0, 7.0, 11.0, 15.0, 19.0, 23.0]
    );
}

#[test]
fn levels_of_detail() {
    let device = device();
    let (fine, coarse) = (vec![1.0_f32; 16], vec![5.0_f32; 4]);
    let levels = vec![
        packed(device.memory.upload(&fine), [4, 4, 1], 4),
        packed(device.memory.upload(&coarse), [2, 2, 1], 4),
    ];
    let mapped = |linear_levels| Texture {
        normalized: true,
        linear_levels,
        ..texture(image(ChannelType::Single, 1, 1, levels.clone()))
    };
    let at = [-1.0, 0.0, 0.25, 0.75, 1.0, 7.0].map(|detail| [0.5, 0.5, detail]);
    let nearest = [1.0, 1.0, 1.0, 5.0, 5.0, 5.0];
    assert_eq!(firsts(&device, "details", mapped(false), &at), nearest);
    let mixed = [1.0, 1.0, 2.0, 4.0, 5.0, 5.0];
    assert_eq!(firsts(&device, "details", mapped(true), &at), mixed);
    let clamped = Texture {
        level_clamp: [0.0, 0.5],
        level_bias: 0.25,
        ..mapped(true)
    };
    assert_eq!(
        firsts(&device, "details", clamped, &at)[1..4],
        [2.0, 3.0, 3.0]
    );
    // A step of a texel is level 0, of two texels level 1.
    let steps = [[0.5, 0.5, 0.25], [0.5, 0.5, 0.5]];
    assert_eq!(
        firsts(&device, "gradients", mapped(true), &steps),
        [1.0, 5.0]
    );
    let mut table = Table::default();
    table.textures.insert(7, Arc::new(mapped(false)));
    let out = device.memory.alloc(20);
    let config = LaunchConfig {
        objects: Some(&table),
        ..LaunchConfig::default()
    };
    device.launch_with("queries", config, &[7, out]).unwrap();
    assert_eq!(device.memory.read::<i32>(out, 5), [4, 4, 2, 2, 1]);
}

#[test]
fn four_texels_are_gathered_counter_clockwise() {
    let device = device();
    let values: Vec<f32> = (0..32).map(|i| i as f32).collect();
    let address = device.memory.upload(&values);
    let pairs = texture(image(
        ChannelType::Single,
        2,
        1,
        vec![packed(address, [4, 4, 1], 8)],
    ));
    let got = floats(&device, "gathers", pairs, &[[2.0, 1.0, 0.0]]);
    let second = |x: usize, y: usize| values[(y * 4 + x) * 2 + 1];
    assert_eq!(
        got,
        [[second(1, 1), second(2, 1), second(2, 0), second(1, 0)]]
    );
}

#[test]
fn surfaces_are_read_and_written() {
    let device = device();
    let values: Vec<u16> = (0..24).collect();
    let (from, to) = (device.memory.upload(&values), device.memory.alloc(48));
    let two = |address, extent| {
        image(
            ChannelType::Unsigned16,
            2,
            1,
            vec![packed(address, extent, 4)],
        )
    };
    let mut table = Table::default();
    table.surfaces.insert(1, Arc::new(two(from, [4, 3, 1])));
    table.surfaces.insert(2, Arc::new(two(to, [3, 4, 1])));
    let config = LaunchConfig {
        block: [4, 3, 1],
        objects: Some(&table),
        ..LaunchConfig::default()
    };
    device.launch_with("transposed", config, &[1, 2]).unwrap();
    let expected: Vec<u16> = (0..12)
        .flat_map(|at| {
            let source = (at % 3 * 4 + at / 3) * 2;
            [source + 1, source]
        })
        .collect();
    assert_eq!(device.memory.read::<u16>(to, 24), expected);

    let (deep, layered) = (device.memory.alloc(24 * 4), device.memory.alloc(24));
    let floats = image(ChannelType::Single, 1, 1, vec![packed(deep, [4, 3, 2], 4)]);
    let bytes = image(
        ChannelType::Unsigned8,
        1,
        2,
        vec![packed(layered, [4, 3, 1], 1)],
    );
    table.surfaces.insert(3, Arc::new(floats));
    table.surfaces.insert(4, Arc::new(bytes));
    let config = LaunchConfig {
        block: [4, 3, 2],
        objects: Some(&table),
        ..LaunchConfig::default()
    };
    device.launch_with("deep", config, &[3, 4]).unwrap();
    let expected: Vec<f32> = (0..24)
        .map(|at| (at % 4 + at / 4 % 3 * 10 + at / 12 * 100) as f32)
        .collect();
    assert_eq!(device.memory.read::<f32>(deep, 24), expected);
    let expected: Vec<u8> = (0..24).map(|at| at % 4 + at / 12 * 16).collect();
    assert_eq!(device.memory.read::<u8>(layered, 24), expected);
}

#[test]
fn surfaces_have_bounds() {
    let device = device();
    let values: Vec<i32> = (1..13).collect();
    let address = device.memory.upload(&values);
    let mut table = Table::default();
    let plane = image(
        ChannelType::Signed32,
        1,
        1,
        vec![packed(address, [4, 3, 1], 4)],
    );
    table.surfaces.insert(1, Arc::new(plane));
    let config = LaunchConfig {
        objects: Some(&table),
        ..LaunchConfig::default()
    };
    let out = device.memory.upload(&[0_i32; 4]);
    let coordinate = |value: i32| u64::from(value.cast_unsigned());
    let at = [coordinate(9), coordinate(-2)];
    device
        .launch_with("bounded", config, &[1, at[0], at[1], out])
        .unwrap();
    assert_eq!(device.memory.read::<i32>(out, 2), [4, 0]);
    assert_eq!(device.memory.read::<i32>(address, 12), values);
    device.memory.write(out, &[0, 0, 1, 0]);
    let fault = device
        .launch_with("bounded", config, &[1, at[0], at[1], out])
        .unwrap_err();
    assert!(matches!(
        fault.kind,
        FaultKind::IllegalAddress { .. } | FaultKind::InvalidObject { .. }
    ));
    device
        .launch_with("bounded", config, &[1, 1, 1, out])
        .unwrap();
    assert_eq!(device.memory.read::<i32>(out, 4), [6, 6, 1, -1]);
    let unknown = device
        .launch_with("bounded", config, &[99, 0, 0, out])
        .unwrap_err();
    assert!(unknown.to_string().contains("0x63"), "{unknown}");
}

#[test]
fn reductions_on_surfaces_and_halves_from_textures() {
    let device = Device::load(
        b".version 8.7\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 out) {
          .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .f32 %f<9>;
          ld.param.u64 %rd1, [out]; mov.u64 %rd2, 1; mov.u64 %rd3, 7; mov.u32 %r1, %tid.x;
          sured.b.add.1d.u32.trap [%rd2, {4}], %r1;
          sured.b.max.1d.s32.zero [%rd2, {8}], %r1;
          sured.b.or.1d.b32.clamp [%rd2, {-40}], %r1;
          tex.2d.v2.f16x2.f32 {%r2, %r3}, [%rd3, {0f3F000000, 0f3F000000}];
          tex.level.2d.v4.u32.s32 {%r4, _, _, _}, [%rd3, {1, 0}], 0;
          suq.width.b32 %r5, [%rd2];
          st.global.v4.u32 [%rd1], {%r2, %r3, %r4, %r5}; ret; }",
    );
    let words = device.memory.upload(&[0_u32, 100, 0, 0]);
    let texels = device.memory.upload(&[1.0_f32, -2.0, 0.5, 4.0]);
    let mut table = Table::default();
    let plane = image(
        ChannelType::Unsigned32,
        1,
        1,
        vec![packed(words, [4, 1, 1], 4)],
    );
    table.surfaces.insert(1, Arc::new(plane));
    let pairs = texture(image(
        ChannelType::Single,
        2,
        1,
        vec![packed(texels, [2, 1, 1], 8)],
    ));
    table.textures.insert(7, Arc::new(pairs));
    let out = device.memory.alloc(16);
    let config = LaunchConfig {
        block: [32, 1, 1],
        objects: Some(&table),
        ..LaunchConfig::default()
    };
    device.launch_with("k", config, &[out]).unwrap();
    assert_eq!(device.memory.read::<u32>(words, 4), [31, 596, 31, 0]);
    let half = 0.5_f32.to_bits();
    assert_eq!(device.memory.read::<u32>(out, 4), [0xc000_3c00, 0, half, 4]);
}
