//! Launches: their results, and the errors of the call.

use std::sync::atomic::Ordering;

use wormhole_api::constants::function_attribute::MAX_DYNAMIC_SHARED_SIZE_BYTES;
use wormhole_api::constants::launch_attribute::COOPERATIVE;
use wormhole_api::constants::limit::{MALLOC_HEAP_SIZE, STACK_SIZE};

use super::{
    Check, HostMemory, ONE_THREAD, Outcome, Shape, function, holds, kernel, kernels, launch, load,
    same, worked,
};
use crate::{CuError, Device, ImageOutput, LaunchAttribute, RawStream};

pub const CHECKS: &[Check] = &[
    Check {
        name: "a kernel computes",
        run: saxpy,
    },
    Check {
        name: "a block shares memory and meets at barriers",
        run: rotate,
    },
    Check {
        name: "an impossible geometry is refused at the call",
        run: geometry,
    },
    Check {
        name: "dynamic shared memory is limited by the kernel's attribute",
        run: dynamic_shared,
    },
    Check {
        name: "a cooperative launch must fit the device",
        run: cooperative,
    },
    Check {
        name: "occupancy falls with what a block takes",
        run: occupancy,
    },
    Check {
        name: "a kernel's text reaches the host after a synchronization",
        run: printf,
    },
    Check {
        name: "limits are kept",
        run: limits,
    },
];

const LEGACY: RawStream = RawStream::LEGACY;

fn saxpy(device: &dyn Device) -> Outcome {
    const N: u16 = 1000;
    let host = HostMemory::new(device, 1)?;
    let saxpy = kernel(device, "saxpy")?;
    let layout: Vec<_> = saxpy
        .parameters
        .iter()
        .map(|p| (p.offset, p.size))
        .collect();
    same(
        "the parameters",
        layout,
        vec![(0, 4), (4, 4), (8, 8), (16, 8)],
    )?;
    let bytes = |f: fn(f32) -> f32| -> Vec<u8> {
        (0..N).flat_map(|i| f(f32::from(i)).to_le_bytes()).collect()
    };
    let (x, y) = (
        worked("allocate", device.mem_alloc(4 * u64::from(N)))?,
        worked("allocate", device.mem_alloc(4 * u64::from(N)))?,
    );
    worked("write", device.write(x, &bytes(|i| i), LEGACY))?;
    worked("write", device.write(y, &bytes(|i| 2.0 * i), LEGACY))?;
    let a = u64::from(0.5_f32.to_bits());
    let shape = Shape {
        grid: 8,
        block: 128,
        ..ONE_THREAD
    };
    worked(
        "launch",
        launch(device, LEGACY, &saxpy, shape, &[N.into(), a, x, y]),
    )?;
    worked(
        "copy",
        device.mem_copy(host.address(0), y, 4 * u64::from(N), LEGACY),
    )?;
    worked("synchronize", device.synchronize_stream(LEGACY))?;
    holds(
        "y = a x + y",
        host.read(4 * usize::from(N)) == bytes(|i| 2.5 * i),
    )
}

fn rotate(device: &dyn Device) -> Outcome {
    const THREADS: u32 = 256;
    let host = HostMemory::new(device, 1)?;
    let rotate = kernel(device, "rotate")?;
    let shape = Shape {
        block: THREADS,
        shared: 4 * THREADS,
        ..ONE_THREAD
    };
    worked(
        "launch",
        launch(device, LEGACY, &rotate, shape, &[host.address(0)]),
    )?;
    worked("synchronize", device.synchronize())?;
    (0..THREADS).try_for_each(|thread| {
        let found = host.half_word(thread as usize).load(Ordering::Acquire);
        same("the neighbour", found, (thread + 1) % THREADS)
    })
}

fn geometry(device: &dyn Device) -> Outcome {
    let store = kernel(device, "store")?;
    let address = worked("allocate", device.mem_alloc(4))?;
    for (grid, block) in [(0, 1), (1, 0), (1, 1025)] {
        let shape = Shape {
            grid,
            block,
            ..ONE_THREAD
        };
        let result = launch(device, LEGACY, &store, shape, &[address, 1]);
        same(
            &format!("grid {grid}, block {block}"),
            result,
            Err(CuError::INVALID_VALUE),
        )?;
    }
    worked(
        "launch",
        launch(device, LEGACY, &store, ONE_THREAD, &[address, 1]),
    )?;
    worked("synchronize", device.synchronize())
}

fn dynamic_shared(device: &dyn Device) -> Outcome {
    const LARGE: i32 = 64 << 10;
    let host = HostMemory::new(device, 1)?;
    let rotate = kernel(device, "rotate")?;
    let shape = Shape {
        shared: LARGE.cast_unsigned(),
        ..ONE_THREAD
    };
    let run = || launch(device, LEGACY, &rotate, shape, &[host.address(0)]);
    same("more than the default", run(), Err(CuError::INVALID_VALUE))?;
    let set = |value| {
        device.function_set_attribute(rotate.function, MAX_DYNAMIC_SHARED_SIZE_BYTES, value)
    };
    same(
        "more than there is",
        set(1 << 20),
        Err(CuError::INVALID_VALUE),
    )?;
    worked("set the attribute", set(LARGE))?;
    let kept = device.function_get_attribute(rotate.function, MAX_DYNAMIC_SHARED_SIZE_BYTES);
    same("the attribute", kept, Ok(LARGE))?;
    worked("launch", run())?;
    worked("synchronize", device.synchronize())
}

fn cooperative(device: &dyn Device) -> Outcome {
    let add_one = kernel(device, "add_one")?;
    let address = worked("allocate", device.mem_alloc(4 << 20))?;
    let mut value = [0; 64];
    value[0] = 1;
    let attributes = [LaunchAttribute::new(COOPERATIVE, value)];
    let shape = |grid| Shape {
        grid,
        block: 1024,
        shared: 0,
        attributes: &attributes,
    };
    let run = |grid| launch(device, LEGACY, &add_one, shape(grid), &[address]);
    same(
        "too large",
        run(1 << 20),
        Err(CuError::COOPERATIVE_LAUNCH_TOO_LARGE),
    )?;
    worked("one block", run(1))?;
    worked("synchronize", device.synchronize())
}

fn occupancy(device: &dyn Device) -> Outcome {
    let rotate = kernel(device, "rotate")?;
    let blocks = |block, shared| {
        worked(
            "occupancy",
            device.occupancy(rotate.function, block, 0, shared),
        )
    };
    let (small, large, shared) = (blocks(64, 0)?, blocks(1024, 0)?, blocks(64, 40 << 10)?);
    same("blocks of 1024 threads", large, 2)?;
    holds(&format!("{small} small blocks are more than 2"), small > 2)?;
    holds(
        &format!("{shared} sharing blocks are fewer than {small}"),
        (1..small).contains(&shared),
    )
}

fn printf(device: &dyn Device) -> Outcome {
    let module = load(device, kernels::TALKING)?;
    holds("the module uses output", module.output != ImageOutput::None)?;
    let say = function(device, &module, "say")?;
    holds("the kernel prints", say.prints)?;
    worked("launch", launch(device, LEGACY, &say, ONE_THREAD, &[42]))?;
    worked("synchronize", device.synchronize())?;
    let output = device.take_output();
    same(
        "printed",
        String::from_utf8_lossy(&output.stdout).into_owned(),
        "thread 42\n".to_owned(),
    )?;
    holds("it is taken once", device.take_output().stdout.is_empty())
}

fn limits(device: &dyn Device) -> Outcome {
    worked("set", device.set_limit(STACK_SIZE, 4096))?;
    same("the stack", device.context_get_limit(STACK_SIZE), Ok(4096))?;
    same(
        "the heap",
        device.context_get_limit(MALLOC_HEAP_SIZE),
        Ok(8 << 20),
    )?;
    same(
        "no such limit",
        device.context_get_limit(999),
        Err(CuError::INVALID_VALUE),
    )
}
