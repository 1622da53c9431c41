//! Modules, their functions and their variables.

use std::sync::atomic::Ordering;

use super::{
    Check, HostMemory, ONE_THREAD, Outcome, function, holds, in_bands, kernels, launch, load,
    load_image, same, worked,
};
use crate::{CuError, Device, ImageKind, Jit, LoadedModule, Loading, ManagedPlace, RawStream};

pub const CHECKS: &[Check] = &[
    Check {
        name: "a module's variables have addresses and first values",
        run: variables,
    },
    Check {
        name: "each loading has variables of its own",
        run: loadings,
    },
    Check {
        name: "names that a module lacks are not found",
        run: missing,
    },
    Check {
        name: "an unloaded module is no module",
        run: unloaded,
    },
    Check {
        name: "a library is loaded like a module",
        run: library,
    },
    Check {
        name: "managed variables lie in the given place",
        run: managed,
    },
    Check {
        name: "a managed variable that nothing uses lies in the given place, or nowhere",
        run: unused,
    },
    Check {
        name: "an image that is none is refused",
        run: garbage,
    },
    Check {
        name: "a function has attributes",
        run: attributes,
    },
];

const LEGACY: RawStream = RawStream::LEGACY;

fn read(device: &dyn Device, address: u64) -> Result<u32, String> {
    let host = HostMemory::new(device, 1)?;
    worked("copy", device.mem_copy(host.address(0), address, 4, LEGACY))?;
    worked("synchronize", device.synchronize_stream(LEGACY))?;
    Ok(host.half_word(0).load(Ordering::Acquire))
}

fn variables(device: &dyn Device) -> Outcome {
    let module = load(device, kernels::PLAIN)?;
    let (counter, bytes) = worked("global", device.global(module.module, "counter"))?;
    same("its size", bytes, 4)?;
    let (table, bytes) = worked("global", device.global(module.module, "table"))?;
    same("its size", bytes, 16)?;
    holds(
        "variables lie in the bands",
        in_bands(counter) && in_bands(table + 15),
    )?;
    same("the counter", read(device, counter)?, 7)?;
    same("the table's end", read(device, table + 12)?, 4)?;
    let bump = function(device, &module, "bump")?;
    worked("launch", launch(device, LEGACY, &bump, ONE_THREAD, &[]))?;
    same("the counter", read(device, counter)?, 8)?;
    same(
        "freeing it",
        device.mem_free(counter),
        Err(CuError::INVALID_VALUE),
    )
}

fn loadings(device: &dyn Device) -> Outcome {
    let (first, second) = (load(device, kernels::PLAIN)?, load(device, kernels::PLAIN)?);
    let bump = function(device, &first, "bump")?;
    worked("launch", launch(device, LEGACY, &bump, ONE_THREAD, &[]))?;
    let value = |module| {
        let (address, _) = worked("global", device.global(module, "counter"))?;
        read(device, address)
    };
    same("bumped", value(first.module)?, 8)?;
    same("not bumped", value(second.module)?, 7)
}

fn missing(device: &dyn Device) -> Outcome {
    let module = load(device, kernels::PLAIN)?.module;
    same(
        "a function",
        device.function(module, "nothing").err(),
        Some(CuError::NOT_FOUND),
    )?;
    same(
        "a variable",
        device.global(module, "nothing").err(),
        Some(CuError::NOT_FOUND),
    )
}

fn unloaded(device: &dyn Device) -> Outcome {
    let module = load(device, kernels::PLAIN)?.module;
    worked("unload", device.unload(module))?;
    same(
        "unloading again",
        device.unload(module),
        Err(CuError::INVALID_HANDLE),
    )?;
    same(
        "a function",
        device.function(module, "store").err(),
        Some(CuError::INVALID_HANDLE),
    )
}

fn library(device: &dyn Device) -> Outcome {
    let library = load_image(device, kernels::PLAIN.as_bytes(), ImageKind::Library)?;
    let bump = function(device, &library, "bump")?;
    worked("launch", launch(device, LEGACY, &bump, ONE_THREAD, &[]))?;
    let (counter, _) = worked("global", device.global(library.module, "counter"))?;
    same("the counter", read(device, counter)?, 8)?;
    worked("unload", device.unload(library.module))
}

/// Loads an image with managed variables. Returns the size that they need, too.
fn load_managed(
    device: &dyn Device,
    text: &str,
    kind: ImageKind,
    host: &HostMemory<'_>,
) -> Result<(LoadedModule, u64), String> {
    let load = |place| device.load(text.as_bytes(), kind, &mut Jit::default(), place);
    let Loading::NeedsPlace(bytes) = worked("load without a place", load(None))? else {
        return Err("the image was loaded without a place for its managed variables".to_owned());
    };
    let address = host.address(0);
    let small = ManagedPlace {
        address,
        bytes: bytes - 1,
    };
    holds(
        "a place that is too small is refused",
        matches!(load(Some(small)), Ok(Loading::NeedsPlace(needed)) if needed == bytes),
    )?;
    let loaded = load(Some(ManagedPlace { address, bytes })).and_then(Loading::done);
    let loaded = worked("load", loaded)?;
    for (address, values) in &loaded.initial {
        // A worker does the same.
        for (index, byte) in values.iter().enumerate() {
            host.set_byte(*address + index as u64, *byte);
        }
    }
    Ok((loaded, bytes))
}

fn managed(device: &dyn Device) -> Outcome {
    for kind in [ImageKind::Module, ImageKind::Library] {
        let host = HostMemory::new(device, 1)?;
        let (module, bytes) = load_managed(device, kernels::MANAGED, kind, &host)?;
        holds("the bytes are enough", bytes >= 4 + 24 + 400)?;
        let mut offsets = Vec::new();
        for (name, size) in [("first", 4), ("second", 24), ("unset", 400)] {
            let (address, bytes) = worked("global", device.global(module.module, name))?;
            same(name, bytes, size)?;
            let offset = address.wrapping_sub(host.address(0));
            holds("it lies in its place", offset + size <= 4096)?;
            offsets.push(usize::try_from(offset).unwrap_or(0));
        }
        let word = |variable: usize, index: usize| {
            let place = host.half_word(offsets[variable] / 4 + index);
            place.load(Ordering::Acquire)
        };
        same("first before", word(0, 0), 5)?;
        same("second[2] before", word(1, 4), 3)?;
        same("unset before", word(2, 99), 0)?;
        let (own, _) = worked("global", device.global(module.module, "own"))?;
        same("a variable of the device", read(device, own)?, 7)?;
        let kernel = function(device, &module, "use")?;
        for (first, second) in [(12, 12), (20, 22)] {
            worked("launch", launch(device, LEGACY, &kernel, ONE_THREAD, &[]))?;
            worked("synchronize", device.synchronize_stream(LEGACY))?;
            same("first", word(0, 0), first)?;
            same("second[1]", word(1, 2), second)?;
            same("what the pointer leads to", word(2, 99), first)?;
        }
        worked("unload", device.unload(module.module))?;
        let (module, _) = load_managed(device, kernels::MANAGED_ALONE, kind, &host)?;
        let kernel = function(device, &module, "use")?;
        worked("launch", launch(device, LEGACY, &kernel, ONE_THREAD, &[]))?;
        worked("synchronize", device.synchronize_stream(LEGACY))?;
        let (address, _) = worked("global", device.global(module.module, "alone"))?;
        same("a variable alone", read(device, address)?, 4)?;
        worked("unload", device.unload(module.module))?;
    }
    Ok(())
}

fn unused(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let place = ManagedPlace {
        address: host.address(0),
        bytes: 4096,
    };
    let image = kernels::MANAGED_UNUSED.as_bytes();
    let (kind, mut jit) = (ImageKind::Module, Jit::default());
    let loaded = device.load(image, kind, &mut jit, Some(place));
    let module = worked("load", loaded.and_then(Loading::done))?;
    let idle = function(device, &module, "idle")?;
    worked("launch", launch(device, LEGACY, &idle, ONE_THREAD, &[]))?;
    match device.global(module.module, "unused") {
        Ok((address, bytes)) => holds(
            "it lies in its place",
            address >= place.address && address + bytes <= place.address + place.bytes,
        )?,
        Err(error) => same("a variable that is not there", error, CuError::NOT_FOUND)?,
    }
    worked("unload", device.unload(module.module))
}

fn garbage(device: &dyn Device) -> Outcome {
    let text = b".version 7.0\n.target sm_70\n.address_size 64\nthis is no PTX\n";
    let result = device
        .load(text, ImageKind::Module, &mut Jit::default(), None)
        .err();
    same("nonsense", result, Some(CuError::INVALID_PTX))
}

fn attributes(device: &dyn Device) -> Outcome {
    let module = load(device, kernels::PLAIN)?;
    let rotate = function(device, &module, "rotate")?;
    let get = |id| {
        rotate
            .attributes
            .iter()
            .find(|(known, _)| *known == id)
            .map(|x| x.1)
    };
    same("most threads of a block", get(0), Some(1024))?;
    same("static shared memory", get(1), Some(0))?;
    holds("it has registers", get(4).is_some_and(|count| count > 0))?;
    same("the PTX version", get(5), Some(70))?;
    same("most dynamic shared memory", get(8), Some(48 << 10))
}
