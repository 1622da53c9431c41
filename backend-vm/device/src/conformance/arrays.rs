//! Arrays, textures, surfaces, and 3-D copies.

use wormhole_api::constants::array_format::{FLOAT, UNSIGNED_INT8, UNSIGNED_INT32};
use wormhole_api::constants::{address_mode, filter_mode, texture_flags};

use super::{
    Check, HostMemory, NON_BLOCKING, ONE_THREAD, Outcome, PAGE, Shape, holds, launch, load, same,
    worked,
};
use crate::array::{LAYERED, SURFACE_LDST};
use crate::{
    ArrayShape, Copy3dEnd, CuError, Device, MemCopy3d, RawArray, RawStream, Resource, Sampling,
    Texels,
};

pub const CHECKS: &[Check] = &[
    Check {
        name: "a 3-D region of memory is copied and nothing beside it",
        run: boxes_of_memory,
    },
    Check {
        name: "arrays hold what is copied into a part of them",
        run: parts_of_arrays,
    },
    Check {
        name: "a volume goes through arrays",
        run: volumes,
    },
    Check {
        name: "3-D copies keep their place in a stream",
        run: order,
    },
    Check {
        name: "a texture of linear memory reads what is there at the time",
        run: linear_memory,
    },
    Check {
        name: "a texture of linear memory has a longest width by its texels",
        run: longest,
    },
    Check {
        name: "coordinates outside a texture are brought inside",
        run: addressing,
    },
    Check {
        name: "linear filtering has fractions of 8 bits",
        run: filtering,
    },
    Check {
        name: "a texture of rows of memory skips what is between them",
        run: rows_of_memory,
    },
    Check {
        name: "integers are read as they are, as parts of one, and by the sRGB curve",
        run: reading,
    },
    Check {
        name: "a surface writes its array",
        run: surfaces,
    },
    Check {
        name: "layers are distinguished",
        run: layers,
    },
    Check {
        name: "levels of detail are arrays of their own",
        run: levels,
    },
    Check {
        name: "an array is refused that cannot be",
        run: refusals,
    },
];

const LEGACY: RawStream = RawStream::LEGACY;

/// Kernels that read textures, one thread for each coordinate in memory, and one that writes a surface.
const KERNELS: &str = r"
.version 7.0
.target sm_70
.address_size 64

// out[i] = the first channel at (x[i], y[i]) of level 0
.visible .entry plane(.param .u64 texture, .param .u64 at, .param .u64 out)
{
    .reg .b32 %r<2>;
    .reg .f32 %f<7>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [texture];
    ld.param.u64 %rd2, [at];
    ld.param.u64 %rd3, [out];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd4, %r1, 8;
    add.s64 %rd5, %rd2, %rd4;
    ld.global.v2.f32 {%f1, %f2}, [%rd5];
    tex.2d.v4.f32.f32 {%f3, %f4, %f5, %f6}, [%rd1, {%f1, %f2}];
    mul.wide.u32 %rd6, %r1, 4;
    add.s64 %rd7, %rd3, %rd6;
    st.global.f32 [%rd7], %f3;
    ret;
}

// out[i] = the first channel at (x[i], 0.5) of level y[i]
.visible .entry detail(.param .u64 texture, .param .u64 at, .param .u64 out)
{
    .reg .b32 %r<2>;
    .reg .f32 %f<8>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [texture];
    ld.param.u64 %rd2, [at];
    ld.param.u64 %rd3, [out];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd4, %r1, 8;
    add.s64 %rd5, %rd2, %rd4;
    ld.global.v2.f32 {%f1, %f2}, [%rd5];
    mov.f32 %f7, 0f3F000000;
    tex.level.2d.v4.f32.f32 {%f3, %f4, %f5, %f6}, [%rd1, {%f1, %f7}], %f2;
    mul.wide.u32 %rd6, %r1, 4;
    add.s64 %rd7, %rd3, %rd6;
    st.global.f32 [%rd7], %f3;
    ret;
}

// out[i] = the first channel of texel i
.visible .entry fetch(.param .u64 texture, .param .u64 out)
{
    .reg .b32 %r<6>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [texture];
    ld.param.u64 %rd2, [out];
    mov.u32 %r1, %tid.x;
    tex.1d.v4.u32.s32 {%r2, %r3, %r4, %r5}, [%rd1, {%r1}];
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd2, %rd3;
    st.global.u32 [%rd4], %r2;
    ret;
}

// out[i] = the first channel at (1.5, 0.5) of layer i
.visible .entry layer(.param .u64 texture, .param .u64 out)
{
    .reg .b32 %r<3>;
    .reg .f32 %f<7>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [texture];
    ld.param.u64 %rd2, [out];
    mov.u32 %r1, %tid.x;
    mov.f32 %f1, 0f3FC00000;
    mov.f32 %f2, 0f3F000000;
    tex.a2d.v4.f32.f32 {%f3, %f4, %f5, %f6}, [%rd1, {%r1, %f1, %f2, %f2}];
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd2, %rd3;
    st.global.f32 [%rd4], %f3;
    ret;
}

// surface(i, 1) = 100 + i
.visible .entry write(.param .u64 surface)
{
    .reg .b32 %r<5>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [surface];
    mov.u32 %r1, %tid.x;
    shl.b32 %r2, %r1, 2;
    add.s32 %r3, %r1, 100;
    mov.u32 %r4, 1;
    sust.b.2d.b32.trap [%rd1, {%r2, %r4}], {%r3};
    ret;
}
";

pub(super) fn shape(
    extent: [u64; 3],
    format: u32,
    channels: u32,
    flags: u32,
) -> Result<ArrayShape, String> {
    ArrayShape::new(extent, format, channels, flags)
        .map_err(|error| format!("{extent:?} is no shape: {error:?}"))
}

pub(super) fn memory(address: u64, pitch: u64, rows: u64) -> Copy3dEnd {
    Copy3dEnd::Memory {
        address,
        pitch,
        rows,
    }
}

pub(super) fn of(array: RawArray, origin: [u64; 3]) -> Copy3dEnd {
    Copy3dEnd::Array { array, origin }
}

pub(super) fn copy(
    device: &dyn Device,
    to: Copy3dEnd,
    from: Copy3dEnd,
    extent: [u64; 3],
) -> Outcome {
    let copy = MemCopy3d { to, from, extent };
    worked("3-D copy", device.copy_3d(&copy, LEGACY))
}

/// Allocates device memory with these bytes.
pub(super) fn upload(device: &dyn Device, bytes: &[u8]) -> Result<u64, String> {
    let address = worked("allocate", device.mem_alloc(bytes.len() as u64))?;
    worked("write", device.write(address, bytes, LEGACY))?;
    Ok(address)
}

pub(super) fn download(device: &dyn Device, address: u64, bytes: usize) -> Result<Vec<u8>, String> {
    let host = HostMemory::new(device, bytes.div_ceil(PAGE))?;
    let copied = device.mem_copy(host.address(0), address, bytes as u64, LEGACY);
    worked("copy", copied)?;
    worked("synchronize", device.synchronize_stream(LEGACY))?;
    Ok(host.read(bytes))
}

/// Bytes that encode their offset modulo 251.
fn counted(bytes: usize) -> Vec<u8> {
    (0..=250).cycle().take(bytes).collect()
}

fn boxes_of_memory(device: &dyn Device) -> Outcome {
    let source = upload(device, &counted(600))?;
    let target = upload(device, &[0xEE; 600])?;
    // Two slices of three rows of five bytes, with gaps between all of them.
    let (to, from) = (memory(target + 7, 9, 4), memory(source + 20, 16, 5));
    copy(device, to, from, [5, 3, 2])?;
    let mut expected = vec![0xEE; 600];
    let bytes = counted(600);
    for (z, y) in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)] {
        let (to, from) = (7 + (z * 4 + y) * 9, 20 + (z * 5 + y) * 16);
        expected[to..to + 5].copy_from_slice(&bytes[from..from + 5]);
    }
    same("the target", download(device, target, 600)?, expected)?;
    // Copies between host and device.
    let host = HostMemory::new(device, 1)?;
    let (to, from) = (memory(host.address(8), 8, 0), memory(source, 100, 0));
    copy(device, to, from, [4, 3, 1])?;
    worked("synchronize", device.synchronize_stream(LEGACY))?;
    let found = host.read(32);
    same("the first row", &found[8..12], &bytes[..4])?;
    same("the last row", &found[24..28], &bytes[200..204])?;
    same("what is between", &found[12..16], &[0; 4])
}

fn parts_of_arrays(device: &dyn Device) -> Outcome {
    let shape = shape([16, 8, 0], UNSIGNED_INT8, 4, 0)?;
    let first = worked("array", device.create_array(&shape))?;
    let second = worked("array", device.create_array(&shape))?;
    let bytes = counted(64 * 8);
    let source = upload(device, &bytes)?;
    let target = upload(device, &[0xEE; 64 * 8])?;
    let whole = [64, 8, 1];
    copy(device, of(first, [0; 3]), memory(source, 64, 8), whole)?;
    copy(device, of(second, [0; 3]), memory(target, 64, 8), whole)?;
    // From (8, 2) of the first to (4, 5) of the second: five texels of three rows.
    let (to, from) = (of(second, [16, 5, 0]), of(first, [32, 2, 0]));
    copy(device, to, from, [20, 3, 1])?;
    copy(device, memory(target, 64, 8), of(second, [0; 3]), whole)?;
    let mut expected = vec![0xEE; 64 * 8];
    for row in 0..3 {
        let (to, from) = (64 * (5 + row) + 16, 64 * (2 + row) + 32);
        expected[to..to + 20].copy_from_slice(&bytes[from..from + 20]);
    }
    same(
        "the second array",
        download(device, target, 64 * 8)?,
        expected,
    )?;
    worked("destroy", device.array_destroy(first))?;
    worked("destroy", device.array_destroy(second))
}

fn volumes(device: &dyn Device) -> Outcome {
    let shape = shape([4, 3, 5], FLOAT, 1, 0)?;
    let array = worked("array", device.create_array(&shape))?;
    let bytes = counted(16 * 3 * 5);
    let source = upload(device, &bytes)?;
    let target = upload(device, &[0; 16 * 3 * 5])?;
    copy(device, of(array, [0; 3]), memory(source, 16, 3), [16, 3, 5])?;
    // Two texels of two rows of three slices.
    copy(
        device,
        memory(target, 8, 2),
        of(array, [4, 1, 2]),
        [8, 2, 3],
    )?;
    let expected: Vec<u8> = [2, 3, 4]
        .into_iter()
        .flat_map(|z| [1, 2].map(|y| (z * 3 + y) * 16 + 4))
        .flat_map(|at| bytes[at..at + 8].to_vec())
        .collect();
    same("the part", download(device, target, 48)?, expected)?;
    worked("destroy", device.array_destroy(array))
}

fn order(device: &dyn Device) -> Outcome {
    let stream = worked("stream", device.stream_create(NON_BLOCKING, 0))?;
    let shape = shape([256, 64, 0], UNSIGNED_INT32, 1, 0)?;
    let array = worked("array", device.create_array(&shape))?;
    let bytes = 1024 * 64;
    let address = worked("allocate", device.mem_alloc(bytes))?;
    let host = HostMemory::new(device, 1)?;
    let extent = [1024, 64, 1];
    for round in 1..=20_u8 {
        let fill = crate::Fill {
            destination: address,
            pitch: 0,
            width: bytes,
            height: 1,
            value: round.into(),
            element: 1,
        };
        worked("fill", device.fill(fill, stream))?;
        let (to, from) = (of(array, [0; 3]), memory(address, 1024, 64));
        let written = device.copy_3d(&MemCopy3d { to, from, extent }, stream);
        worked("copy", written)?;
        worked(
            "fill",
            device.fill(crate::Fill { value: 0, ..fill }, stream),
        )?;
        let (to, from) = (memory(address, 1024, 64), of(array, [0; 3]));
        let read = device.copy_3d(&MemCopy3d { to, from, extent }, stream);
        worked("copy", read)?;
        let last = device.mem_copy(host.address(0), address + bytes - 4, 4, stream);
        worked("copy", last)?;
        worked("synchronize", device.synchronize_stream(stream))?;
        same("the last bytes", host.read(4), vec![round; 4])?;
    }
    Ok(())
}

/// Point sampling: clamped, without normalised coordinates, as floats if possible.
pub(super) const POINTS: Sampling = Sampling {
    address_modes: [address_mode::CLAMP; 3],
    filter: filter_mode::POINT,
    level_filter: filter_mode::POINT,
    flags: 0,
    anisotropy: 0,
    level_bias: 0.0,
    level_clamp: [0.0, 100.0],
    border: [0; 4],
};

/// Runs a kernel of [`KERNELS`] with one thread for each 32-bit result.
fn run(
    device: &dyn Device,
    name: &str,
    arguments: &[u64],
    results: usize,
) -> Result<Vec<u32>, String> {
    let module = load(device, KERNELS)?;
    let kernel = super::function(device, &module, name)?;
    let out = upload(device, &vec![0xEE; 4 * results.max(1)])?;
    let shape = Shape {
        block: u32::try_from(results.max(1)).map_err(|error| error.to_string())?,
        ..ONE_THREAD
    };
    let arguments = [arguments, &[out]].concat();
    worked(name, launch(device, LEGACY, &kernel, shape, &arguments))?;
    let bytes = download(device, out, 4 * results)?;
    worked("unload", device.unload(module.module))?;
    let words = bytes.chunks_exact(4).map(|word| word.iter().rev());
    Ok(words
        .map(|word| word.fold(0, |word, byte| word << 8 | u32::from(*byte)))
        .collect())
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

/// Samples a texture at these coordinates.
fn sample(
    device: &dyn Device,
    kernel: &str,
    texture: u64,
    at: &[[f32; 2]],
) -> Result<Vec<f32>, String> {
    let at_address = upload(device, &bytes_of(at.as_flattened()))?;
    let words = run(device, kernel, &[texture, at_address], at.len())?;
    Ok(words.into_iter().map(f32::from_bits).collect())
}

/// Creates an array of 32-bit floats with these values.
fn filled(device: &dyn Device, extent: [u64; 3], values: &[f32]) -> Result<RawArray, String> {
    let array = worked("array", device.create_array(&shape(extent, FLOAT, 1, 0)?))?;
    let source = upload(device, &bytes_of(values))?;
    let [width, height, depth] = extent.map(|extent| extent.max(1));
    copy(
        device,
        of(array, [0; 3]),
        memory(source, width * 4, height),
        [width * 4, height, depth],
    )?;
    Ok(array)
}

fn linear_memory(device: &dyn Device) -> Outcome {
    let words: Vec<u8> = (0..8_u32).flat_map(|n| (n * 7).to_le_bytes()).collect();
    let address = upload(device, &words)?;
    let texels = Texels::new(UNSIGNED_INT32, 1).map_err(|error| format!("{error:?}"))?;
    let resource = Resource::Linear {
        address,
        texels,
        bytes: 32,
    };
    let sampling = Sampling {
        flags: texture_flags::READ_AS_INTEGER,
        ..POINTS
    };
    let texture = worked("texture", device.create_texture(&resource, &sampling, None))?;
    let found = run(device, "fetch", &[texture], 8)?;
    same("the texels", found, (0..8).map(|n| n * 7).collect())?;
    worked("write", device.write(address + 4, &[99, 0, 0, 0], LEGACY))?;
    let found = run(device, "fetch", &[texture], 8)?;
    same("a texel that was written", found[1], 99)?;
    worked("destroy", device.texture_destroy(texture))
}

fn addressing(device: &dyn Device) -> Outcome {
    let array = filled(device, [4, 1, 0], &[10.0, 11.0, 12.0, 13.0])?;
    let resource = Resource::Array(array);
    let texture = |mode, flags| {
        let sampling = Sampling {
            address_modes: [mode; 3],
            flags,
            border: [(-1.0_f32).to_bits(), 0, 0, 0],
            ..POINTS
        };
        worked("texture", device.create_texture(&resource, &sampling, None))
    };
    let at = [-5.5_f32, -0.5, 0.5, 2.5, 3.5, 4.5, 9.5];
    let texels = at.map(|x| [x, 0.5]);
    let normalized = at.map(|x| [x / 4.0, 0.5]);
    for (mode, flags, at, expected) in [
        (
            address_mode::CLAMP,
            0,
            texels,
            [10.0, 10.0, 10.0, 12.0, 13.0, 13.0, 13.0],
        ),
        (
            address_mode::BORDER,
            0,
            texels,
            [-1.0, -1.0, 10.0, 12.0, 13.0, -1.0, -1.0],
        ),
        (
            address_mode::WRAP,
            texture_flags::NORMALIZED_COORDINATES,
            normalized,
            [12.0, 13.0, 10.0, 12.0, 13.0, 10.0, 11.0],
        ),
        (
            address_mode::MIRROR,
            texture_flags::NORMALIZED_COORDINATES,
            normalized,
            [12.0, 10.0, 10.0, 12.0, 13.0, 13.0, 11.0],
        ),
    ] {
        let texture = texture(mode, flags)?;
        let found = sample(device, "plane", texture, &at)?;
        same(&format!("mode {mode}"), found, expected.to_vec())?;
        worked("destroy", device.texture_destroy(texture))?;
    }
    worked("destroy", device.array_destroy(array))
}

fn filtering(device: &dyn Device) -> Outcome {
    let values = [0.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0];
    let array = filled(device, [3, 2, 0], &values)?;
    let sampling = Sampling {
        filter: filter_mode::LINEAR,
        ..POINTS
    };
    let texture = worked(
        "texture",
        device.create_texture(&Resource::Array(array), &sampling, None),
    )?;
    // The fractions are multiples of 1/256, so that the results are exact.
    let at = [
        [0.5, 0.5],
        [0.75, 0.5],
        [1.5, 1.5],
        [1.0, 1.0],
        [0.5 + 3.0 / 256.0, 0.5],
        [0.5, 1.25],
        [9.0, 9.0],
    ];
    let expected = [0.0, 64.0, 2048.0, 832.0, 3.0, 768.0, 4096.0];
    let found = sample(device, "plane", texture, &at)?;
    same("filtered", found, expected.to_vec())?;
    // A coordinate between two fractions is rounded to one of them.
    let between = sample(device, "plane", texture, &[[0.5 + 1.3 / 256.0, 0.5]])?;
    holds(
        &format!("{between:?} is of a fraction of 8 bits"),
        between[0] == 1.0 || between[0] == 2.0,
    )?;
    worked("destroy", device.texture_destroy(texture))?;
    worked("destroy", device.array_destroy(array))
}

fn rows_of_memory(device: &dyn Device) -> Outcome {
    let mut bytes = vec![0; 512 * 3];
    for row in 0..3_u8 {
        bytes[512 * usize::from(row)..][..4].copy_from_slice(&[row, row + 10, row + 20, row + 30]);
    }
    let address = upload(device, &bytes)?;
    let resource = Resource::Rows {
        address,
        texels: Texels::new(UNSIGNED_INT8, 1).map_err(|error| format!("{error:?}"))?,
        width: 4,
        height: 3,
        pitch: 512,
    };
    let texture = worked("texture", device.create_texture(&resource, &POINTS, None))?;
    let at = [[0.5, 0.5], [3.5, 1.5], [2.5, 2.5], [9.0, 9.0]];
    let found = sample(device, "plane", texture, &at)?;
    let expected = [0.0_f32, 31.0, 22.0, 32.0].map(|texel| texel / 255.0);
    close("texels", &found, &expected)?;
    worked("destroy", device.texture_destroy(texture))
}

fn close(what: &str, found: &[f32], expected: &[f32]) -> Outcome {
    let near = |(found, expected): (&f32, &f32)| (found - expected).abs() < 2e-3;
    holds(
        &format!("{what} are near {expected:?}: {found:?}"),
        found.len() == expected.len() && found.iter().zip(expected).all(near),
    )
}

fn reading(device: &dyn Device) -> Outcome {
    let array = worked(
        "array",
        device.create_array(&shape([4, 1, 0], UNSIGNED_INT8, 4, 0)?),
    )?;
    let mut bytes = [0; 16];
    for (texel, value) in [0, 51, 128, 255].into_iter().enumerate() {
        bytes[4 * texel] = value;
    }
    let source = upload(device, &bytes)?;
    copy(device, of(array, [0; 3]), memory(source, 16, 1), [16, 1, 1])?;
    let at = [0.5, 1.5, 2.5, 3.5].map(|x| [x, 0.5]);
    let read = |flags| {
        let sampling = Sampling { flags, ..POINTS };
        let made = device.create_texture(&Resource::Array(array), &sampling, None);
        let texture = worked("texture", made)?;
        let found = sample(device, "plane", texture, &at)?;
        worked("destroy", device.texture_destroy(texture))?;
        Ok::<_, String>(found)
    };
    let integers: Vec<u32> = read(texture_flags::READ_AS_INTEGER)?
        .into_iter()
        .map(f32::to_bits)
        .collect();
    same("integers", integers, vec![0, 51, 128, 255])?;
    close("parts of one", &read(0)?, &[0.0, 0.2, 0.501_96, 1.0])?;
    close(
        "colours",
        &read(texture_flags::SRGB)?,
        &[0.0, 0.033_1, 0.215_86, 1.0],
    )?;
    worked("destroy", device.array_destroy(array))
}

fn surfaces(device: &dyn Device) -> Outcome {
    let shape = shape([8, 2, 0], UNSIGNED_INT32, 1, SURFACE_LDST)?;
    let array = worked("array", device.create_array(&shape))?;
    let target = upload(device, &[0xEE; 64])?;
    let (whole, packed) = ([32, 2, 1], memory(target, 32, 2));
    copy(device, of(array, [0; 3]), packed, whole)?;
    let surface = worked("surface", device.create_surface(array))?;
    let module = load(device, KERNELS)?;
    let kernel = super::function(device, &module, "write")?;
    let threads = Shape {
        block: 8,
        ..ONE_THREAD
    };
    worked(
        "launch",
        launch(device, LEGACY, &kernel, threads, &[surface]),
    )?;
    copy(device, packed, of(array, [0; 3]), whole)?;
    let found = download(device, target, 64)?;
    same("the row beside", &found[..32], &[0xEE; 32])?;
    let expected: Vec<u8> = (100..108_u32).flat_map(u32::to_le_bytes).collect();
    same("the row that was written", &found[32..], &expected[..])?;
    worked("destroy", device.surface_destroy(surface))?;
    worked("destroy", device.array_destroy(array))
}

fn layers(device: &dyn Device) -> Outcome {
    let array = worked(
        "array",
        device.create_array(&shape([2, 2, 3], FLOAT, 1, LAYERED)?),
    )?;
    let values: Vec<f32> = (0..12_u8).map(f32::from).collect();
    let source = upload(device, &bytes_of(&values))?;
    copy(device, of(array, [0; 3]), memory(source, 8, 2), [8, 2, 3])?;
    let texture = worked(
        "texture",
        device.create_texture(&Resource::Array(array), &POINTS, None),
    )?;
    let found: Vec<f32> = run(device, "layer", &[texture], 3)?
        .into_iter()
        .map(f32::from_bits)
        .collect();
    same("the layers", found, vec![1.0, 5.0, 9.0])?;
    worked("destroy", device.texture_destroy(texture))?;
    worked("destroy", device.array_destroy(array))
}

fn levels(device: &dyn Device) -> Outcome {
    let shape = shape([8, 4, 0], FLOAT, 1, 0)?;
    same("the most levels", shape.most_levels(), 4)?;
    let mipmap = worked("mipmap", device.create_mipmap(&shape, 3))?;
    for level in 0..3_u8 {
        let array = worked("level", device.mipmap_get_level(mipmap, level.into()))?;
        let [row, rows, _] = shape.level(level.into()).copied();
        let texels = usize::try_from(row * rows / 4).map_err(|error| error.to_string())?;
        let value = f32::from(level) * 10.0 + 1.0;
        let source = upload(device, &bytes_of(&vec![value; texels]))?;
        copy(
            device,
            of(array, [0; 3]),
            memory(source, row, rows),
            [row, rows, 1],
        )?;
    }
    let resource = Resource::Mipmap(mipmap);
    let at = [0.0, 1.0, 2.0, 9.0].map(|level| [0.5, level]);
    let nearest = Sampling {
        flags: texture_flags::NORMALIZED_COORDINATES,
        ..POINTS
    };
    let texture = worked("texture", device.create_texture(&resource, &nearest, None))?;
    let found = sample(device, "detail", texture, &at)?;
    same("levels", found, vec![1.0, 11.0, 21.0, 21.0])?;
    worked("destroy", device.texture_destroy(texture))?;
    let between = Sampling {
        level_filter: filter_mode::LINEAR,
        ..nearest
    };
    let texture = worked("texture", device.create_texture(&resource, &between, None))?;
    let found = sample(device, "detail", texture, &[[0.5, 0.5], [0.5, 1.25]])?;
    same("between levels", found, vec![6.0, 13.5])?;
    worked("destroy", device.texture_destroy(texture))?;
    worked("destroy", device.mipmap_destroy(mipmap))
}

fn longest(device: &dyn Device) -> Outcome {
    let width = |format, channels| device.texture_linear_width(format, channels);
    let (one, four) = (
        worked("one channel", width(FLOAT, 1))?,
        worked("four channels", width(FLOAT, 4))?,
    );
    holds("texels of 16 bytes are fewer", (1..one).contains(&four))?;
    let invalid = Err(CuError::INVALID_VALUE);
    same("three channels", width(FLOAT, 3), invalid)?;
    same("a format of no number", width(0, 1), invalid)?;
    same("any other number", width(u32::MAX, 1), invalid)
}

fn refusals(device: &dyn Device) -> Outcome {
    let invalid = CuError::INVALID_VALUE;
    let wide = shape([1 << 20, 1, 0], FLOAT, 1, 0)?;
    same(
        "too wide",
        device.create_array(&wide).map(drop),
        Err(invalid),
    )?;
    let array = filled(device, [4, 4, 0], &[0.0; 16])?;
    let strange = Sampling {
        address_modes: [77; 3],
        ..POINTS
    };
    let made = device.create_texture(&Resource::Array(array), &strange, None);
    same("no such mode", made.map(drop), Err(invalid))?;
    worked("destroy", device.array_destroy(array))?;
    let (free, _) = worked("memory info", device.mem_get_info())?;
    let large = shape([4096, 4096, 0], UNSIGNED_INT8, 4, 0)?;
    let array = worked("array", device.create_array(&large))?;
    let (during, _) = worked("memory info", device.mem_get_info())?;
    holds("an array takes memory", during + (64 << 20) <= free)?;
    worked("destroy", device.array_destroy(array))?;
    let (after, _) = worked("memory info", device.mem_get_info())?;
    holds("and gives it back", after >= during + (64 << 20))
}
