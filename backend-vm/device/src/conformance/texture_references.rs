//! Texture and surface references.

use wormhole_api::constants::array_format::UNSIGNED_INT32;
use wormhole_api::constants::texture_flags;

use super::arrays::{POINTS, copy, download, memory, of, shape, upload};
use super::{Check, ONE_THREAD, Outcome, function, launch, load, same, worked};
use crate::array::SURFACE_LDST;
use crate::{CuError, Device, LoadedModule, RawStream, Resource, Sampling, TexRefTarget, Texels};

pub const CHECKS: &[Check] = &[
    Check {
        name: "references are found by name and kind",
        run: found,
    },
    Check {
        name: "a texture reference reads what is bound when the kernel is launched",
        run: textures,
    },
    Check {
        name: "a surface reference writes the array that is bound",
        run: surfaces,
    },
];

const LEGACY: RawStream = RawStream::LEGACY;

const KERNELS: &str = r"
.version 7.0
.target sm_70
.address_size 64
.visible .global .texref words;
.visible .global .surfref canvas;
.visible .global .u32 plain;

// out = texel 1
.visible .entry fetch(.param .u64 out)
{
    .reg .b32 %r<6>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, 1;
    tex.1d.v4.u32.s32 {%r2, %r3, %r4, %r5}, [words, {%r1}];
    st.global.u32 [%rd1], %r2;
    ret;
}

// the second texel of the second row is 77
.visible .entry store()
{
    .reg .b32 %r<4>;
    mov.u32 %r1, 4;
    mov.u32 %r2, 1;
    mov.u32 %r3, 77;
    sust.b.2d.b32.trap [canvas, {%r1, %r2}], {%r3};
    ret;
}
";

fn find(device: &dyn Device, module: &LoadedModule, name: &str, kind: TexRefTarget) -> u32 {
    match device.find_reference(module.module, name, kind) {
        Ok(()) => 0,
        Err(error) => error.0,
    }
}

fn found(device: &dyn Device) -> Outcome {
    let module = load(device, KERNELS)?;
    let missing = CuError::NOT_FOUND.0;
    for (name, texture, surface) in [
        ("words", 0, missing),
        ("canvas", missing, 0),
        ("plain", missing, missing),
        ("absent", missing, missing),
    ] {
        let answers = [
            find(device, &module, name, TexRefTarget::Texture),
            find(device, &module, name, TexRefTarget::Surface),
        ];
        same(name, answers, [texture, surface])?;
    }
    let variable = device.global(module.module, "words").is_ok();
    same("whether a reference is a variable", variable, false)
}

fn textures(device: &dyn Device) -> Outcome {
    let module = load(device, KERNELS)?;
    let fetch = function(device, &module, "fetch")?;
    let texels = Texels::new(UNSIGNED_INT32, 1).map_err(|error| format!("{error:?}"))?;
    let out = upload(device, &[0; 8])?;
    let sampling = Sampling {
        flags: texture_flags::READ_AS_INTEGER,
        ..POINTS
    };
    for (place, value) in [(0, 41_u32), (1, 42)] {
        let words: Vec<u8> = [7, value].into_iter().flat_map(u32::to_le_bytes).collect();
        let resource = Resource::Linear {
            address: upload(device, &words)?,
            texels,
            bytes: 8,
        };
        let bound = device.bind_texture(module.module, "words", Some(&resource), &sampling);
        worked("bind", bound)?;
        let out = out + 4 * place;
        worked("launch", launch(device, LEGACY, &fetch, ONE_THREAD, &[out]))?;
    }
    let expected: Vec<u8> = [41, 42_u32]
        .into_iter()
        .flat_map(u32::to_le_bytes)
        .collect();
    same("what was read", download(device, out, 8)?, expected)?;
    worked(
        "unbind",
        device.bind_texture(module.module, "words", None, &sampling),
    )
}

fn surfaces(device: &dyn Device) -> Outcome {
    let module = load(device, KERNELS)?;
    let array = worked(
        "array",
        device.create_array(&shape([4, 2, 0], UNSIGNED_INT32, 1, SURFACE_LDST)?),
    )?;
    let target = upload(device, &[0; 32])?;
    let (whole, packed) = ([16, 2, 1], memory(target, 16, 2));
    copy(device, of(array, [0; 3]), packed, whole)?;
    worked("bind", device.bind_surface(module.module, "canvas", array))?;
    let store = function(device, &module, "store")?;
    worked("launch", launch(device, LEGACY, &store, ONE_THREAD, &[]))?;
    copy(device, packed, of(array, [0; 3]), whole)?;
    let mut expected = vec![0; 32];
    expected[20] = 77;
    same("the array", download(device, target, 32)?, expected)?;
    worked("unload", device.unload(module.module))?;
    worked("destroy", device.array_destroy(array))
}
