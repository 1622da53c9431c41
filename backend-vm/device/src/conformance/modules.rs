//! Modules, their functions and their variables.

use std::sync::atomic::Ordering;

use super::{
    Check, HostMemory, ONE_THREAD, Outcome, function, holds, kernels, launch, load, same, worked,
};
use crate::{CuError, Device, ImageKind, Jit, RawStream};

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
        name: "what a module does not have is not found",
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
    worked("copy", device.copy(host.address(0), address, 4, LEGACY))?;
    worked("synchronize", device.synchronize_stream(LEGACY))?;
    Ok(host.half_word(0).load(Ordering::Acquire))
}

fn variables(device: &dyn Device) -> Outcome {
    let module = load(device, kernels::PLAIN)?;
    let (counter, bytes) = worked("global", device.global(module.module, "counter"))?;
    same("its size", bytes, 4)?;
    let (table, bytes) = worked("global", device.global(module.module, "table"))?;
    same("its size", bytes, 16)?;
    same("the counter", read(device, counter)?, 7)?;
    same("the table's end", read(device, table + 12)?, 4)?;
    let bump = function(device, &module, "bump")?;
    worked("launch", launch(device, LEGACY, &bump, ONE_THREAD, &[]))?;
    same("the counter", read(device, counter)?, 8)?;
    same(
        "freeing it",
        device.free(counter),
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
    let library = worked(
        "load",
        device.load(
            kernels::PLAIN.as_bytes(),
            ImageKind::Library,
            &mut Jit::default(),
        ),
    )?;
    let bump = function(device, &library, "bump")?;
    worked("launch", launch(device, LEGACY, &bump, ONE_THREAD, &[]))?;
    let (counter, _) = worked("global", device.global(library.module, "counter"))?;
    same("the counter", read(device, counter)?, 8)?;
    worked("unload", device.unload(library.module))
}

fn garbage(device: &dyn Device) -> Outcome {
    let text = b".version 7.0\n.target sm_70\n.address_size 64\nthis is no PTX\n";
    let result = device
        .load(text, ImageKind::Module, &mut Jit::default())
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
