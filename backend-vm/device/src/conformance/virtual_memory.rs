//! Address reservations, and physical memory that is mapped there.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{
    Check, HostMemory, NON_BLOCKING, ONE_THREAD, Outcome, PAGE, eventually, function, holds,
    in_bands, kernel, launch, load_image, same, worked,
};
use crate::{
    Access, Comparison, CuError, Device, Fill, ImageKind, Launch, LaunchEvents, RawMemory,
    RawStream,
};

pub const CHECKS: &[Check] = &[
    Check {
        name: "memory that is mapped side by side is one range",
        run: side_by_side,
    },
    Check {
        name: "one memory is seen at two addresses",
        run: two_views,
    },
    Check {
        name: "mapped memory keeps its contents where it is mapped next",
        run: moves,
    },
    Check {
        name: "memory that can be mapped takes memory until it is released and unmapped",
        run: accounting,
    },
    Check {
        name: "impossible reservations, allocations and mappings are refused",
        run: refusals,
    },
    Check {
        name: "reserved addresses lie in the device's bands",
        run: bands,
    },
    Check {
        name: "a kernel faults where nothing is mapped",
        run: unmapped,
    },
    Check {
        name: "a kernel faults where it has no access",
        run: inaccessible,
    },
    Check {
        name: "a kernel faults where it may only read",
        run: read_only,
    },
    Check {
        name: "memory is placed at addresses of the caller's choice",
        run: placed,
    },
    Check {
        name: "a comparison finds the parts that differ",
        run: comparisons,
    },
    Check {
        name: "the kernel that compares finds the parts that differ",
        run: comparing_kernel,
    },
    Check {
        name: "mapped memory outlives the context",
        run: outlives_the_context,
    },
];

const LEGACY: RawStream = RawStream::LEGACY;

fn unit(device: &dyn Device) -> Result<u64, String> {
    let found = worked("granularity", device.granularity())?;
    holds(
        "granularities are powers of two",
        found.minimum.is_power_of_two() && found.recommended >= found.minimum,
    )?;
    Ok(found.minimum)
}

fn create(device: &dyn Device, bytes: u64) -> Result<RawMemory, String> {
    worked("create", device.create_memory(bytes, 0))
}

/// Reserves `units` granules and maps new memory at each of `filled`, with access to all of them.
fn mapped(
    device: &dyn Device,
    units: u64,
    filled: &[u64],
) -> Result<(u64, u64, Vec<RawMemory>), String> {
    let unit = unit(device)?;
    let base = worked("reserve", device.address_reserve(units * unit, 0, 0))?;
    let mut made = Vec::new();
    for index in filled {
        let memory = create(device, unit)?;
        let address = base + index * unit;
        worked("map", device.map(address, unit, memory))?;
        worked(
            "access",
            device.set_access(address, unit, Access::ReadWrite),
        )?;
        made.push(memory);
    }
    Ok((base, unit, made))
}

fn fill(device: &dyn Device, destination: u64, value: u32, width: u64) -> Outcome {
    let fill = Fill {
        destination,
        pitch: 0,
        width,
        height: 1,
        value,
        element: 1,
    };
    worked("fill", device.fill(fill, LEGACY))
}

/// Reads the bytes at an address.
fn read(device: &dyn Device, address: u64, bytes: usize) -> Result<Vec<u8>, String> {
    let host = HostMemory::new(device, bytes.div_ceil(PAGE))?;
    worked(
        "copy",
        device.mem_copy(host.address(0), address, bytes as u64, LEGACY),
    )?;
    worked("synchronize", device.synchronize_stream(LEGACY))?;
    Ok(host.read(bytes))
}

fn side_by_side(device: &dyn Device) -> Outcome {
    let (base, unit, made) = mapped(device, 4, &[0, 1, 2])?;
    fill(device, base, 1, 3 * unit)?;
    fill(device, base + unit - 16, 2, 32)?;
    let bytes = read(device, base + unit - 32, 64)?;
    let expected = [vec![1; 16], vec![2; 32], vec![1; 16]].concat();
    same("bytes around the seam", bytes, expected)?;
    let store = kernel(device, "store")?;
    let values = [base + 2 * unit + 8, 77];
    worked(
        "launch",
        launch(device, LEGACY, &store, ONE_THREAD, &values),
    )?;
    same(
        "what the kernel stored",
        read(device, base + 2 * unit + 8, 4)?,
        vec![77, 0, 0, 0],
    )?;
    worked("unmap", device.mem_unmap(base, 3 * unit))?;
    for memory in made {
        worked("release", device.mem_release(memory))?;
    }
    worked("unreserve", device.address_free(base, 4 * unit))
}

fn two_views(device: &dyn Device) -> Outcome {
    let (base, unit, made) = mapped(device, 4, &[0])?;
    let other = base + 2 * unit;
    worked("map again", device.map(other, unit, made[0]))?;
    worked("access", device.set_access(other, unit, Access::Read))?;
    fill(device, base, 3, unit)?;
    same("the other view", read(device, other + 100, 4)?, vec![3; 4])?;
    worked("unmap", device.mem_unmap(base, unit))?;
    same("the view that is left", read(device, other, 4)?, vec![3; 4])?;
    worked("unmap", device.mem_unmap(other, unit))?;
    worked("release", device.mem_release(made[0]))?;
    worked("unreserve", device.address_free(base, 4 * unit))
}

fn moves(device: &dyn Device) -> Outcome {
    let (base, unit, made) = mapped(device, 2, &[0])?;
    fill(device, base, 4, unit)?;
    worked("synchronize", device.synchronize())?;
    worked("unmap", device.mem_unmap(base, unit))?;
    worked("map", device.map(base + unit, unit, made[0]))?;
    worked(
        "access",
        device.set_access(base + unit, unit, Access::ReadWrite),
    )?;
    same(
        "the bytes",
        read(device, base + 2 * unit - 4, 4)?,
        vec![4; 4],
    )
}

fn accounting(device: &dyn Device) -> Outcome {
    let unit = unit(device)?;
    let bytes = (64_u64 << 20).next_multiple_of(unit);
    let free = || worked("memory info", device.mem_get_info()).map(|info| info.0);
    let base = worked("reserve", device.address_reserve(bytes, 0, 0))?;
    let before = free()?;
    let memory = create(device, bytes)?;
    holds("it takes memory", free()? + bytes <= before)?;
    worked("map", device.map(base, bytes, memory))?;
    worked("release", device.mem_release(memory))?;
    holds("what is mapped stays", free()? + bytes <= before)?;
    worked("unmap", device.mem_unmap(base, bytes))?;
    holds("it gives memory back", free()? >= before)?;
    worked("unreserve", device.address_free(base, bytes))
}

fn refusals(device: &dyn Device) -> Outcome {
    let (base, unit, made) = mapped(device, 4, &[0])?;
    let total = worked("memory info", device.mem_get_info())?.1;
    let refused =
        |what: &str, result: crate::Result<()>| same(what, result, Err(CuError::INVALID_VALUE));
    let large = total.next_multiple_of(unit) + unit;
    same(
        "more than there is",
        device.create_memory(large, 0),
        Err(CuError::OUT_OF_MEMORY),
    )?;
    refused("no bytes", device.create_memory(0, 0).map(drop))?;
    refused("odd bytes", device.create_memory(unit + 1, 0).map(drop))?;
    refused("no addresses", device.address_reserve(0, 0, 0).map(drop))?;
    refused(
        "odd alignment",
        device.address_reserve(unit, 3, 0).map(drop),
    )?;
    refused("mapped already", device.map(base, unit, made[0]))?;
    refused("unaligned", device.map(base + 4096, unit, made[0]))?;
    refused(
        "access to a gap",
        device.set_access(base, 2 * unit, Access::Read),
    )?;
    refused("mapped", device.address_free(base, 4 * unit))?;
    refused("a part", device.address_free(base + unit, unit))
}

fn bands(device: &dyn Device) -> Outcome {
    let unit = unit(device)?;
    let total = worked("memory info", device.mem_get_info())?.1;
    let all = total.next_multiple_of(unit);
    for bytes in [unit, all, all + all / 8 / unit * unit] {
        let address = worked("reserve", device.address_reserve(bytes, 0, 0))?;
        holds(
            &format!("{bytes} bytes at {address:#x} are in a band"),
            in_bands(address) && in_bands(address + bytes - 1),
        )?;
    }
    let alignment = 512 * unit;
    let address = worked("reserve", device.address_reserve(unit, alignment, 0))?;
    holds("it is aligned", address.is_multiple_of(alignment))
}

/// Launches a kernel that stores at `address`, and expects the context to die of an illegal address.
fn store_faults(device: &dyn Device, address: u64) -> Outcome {
    let store = kernel(device, "store")?;
    let stream = worked("stream", device.stream_create(NON_BLOCKING, 0))?;
    worked(
        "launch",
        launch(device, stream, &store, ONE_THREAD, &[address, 1]),
    )?;
    let mut health = None;
    eventually("the context's health says so", || {
        health = device.health(&[stream]);
        health.is_some()
    })?;
    same("the health", health, Some(CuError::ILLEGAL_ADDRESS))
}

fn unmapped(device: &dyn Device) -> Outcome {
    let (base, unit, _) = mapped(device, 2, &[0])?;
    fill(device, base, 0, unit)?;
    worked("synchronize", device.synchronize())?;
    worked("unmap", device.mem_unmap(base, unit))?;
    store_faults(device, base)
}

fn inaccessible(device: &dyn Device) -> Outcome {
    let (base, unit, made) = mapped(device, 2, &[0])?;
    worked("map", device.map(base + unit, unit, made[0]))?;
    store_faults(device, base + unit)
}

fn read_only(device: &dyn Device) -> Outcome {
    let (base, unit, _) = mapped(device, 1, &[0])?;
    fill(device, base, 6, unit)?;
    worked("synchronize", device.synchronize())?;
    worked("access", device.set_access(base, unit, Access::Read))?;
    same("it can be read", read(device, base, 4)?, vec![6; 4])?;
    store_faults(device, base)
}

fn outlives_the_context(device: &dyn Device) -> Outcome {
    let (base, unit, made) = mapped(device, 1, &[0])?;
    fill(device, base, 8, unit)?;
    worked("synchronize", device.synchronize())?;
    worked("reset", device.reset())?;
    same("the bytes", read(device, base, 4)?, vec![8; 4])?;
    worked("unmap", device.mem_unmap(base, unit))?;
    worked("release", device.mem_release(made[0]))?;
    worked("unreserve", device.address_free(base, unit))
}

/// Next address at which [`placed`] places memory, far from everything.
static NEXT: AtomicU64 = AtomicU64::new(0x5A00_0000_0000);

fn placed(device: &dyn Device) -> Outcome {
    let bytes = 2 * unit(device)?;
    let chosen = NEXT.fetch_add(1 << 32, Ordering::Relaxed);
    let free = |device: &dyn Device| worked("memory", device.mem_get_info()).map(|(free, _)| free);
    let before = free(device)?;
    for _ in 0..2 {
        worked("place", device.place(chosen, bytes))?;
        holds("it takes memory", free(device)? + bytes <= before)?;
        fill(device, chosen, 1, bytes)?;
        worked("synchronize", device.synchronize())?;
        worked("reset", device.reset())?;
        fill(device, chosen + bytes - 5, 2, 5)?;
        let ends = read(device, chosen + bytes - 10, 10)?;
        same("bytes", ends, [[1; 5], [2; 5]].concat())?;
        // Nothing is there any more, or the second turn could not place memory there.
        worked("displace", device.displace(chosen, bytes))?;
    }
    Ok(())
}

/// Allocates two ranges of zeros with marks.
fn comparable(device: &dyn Device, parts: u64) -> Result<Comparison, String> {
    let bytes = parts * Comparison::PART;
    let marks = Comparison::marks_of(bytes);
    let first = worked("allocate", device.mem_alloc(bytes))?;
    let second = worked("allocate", device.mem_alloc(bytes + marks))?;
    fill(device, first, 0, bytes)?;
    // The marks hold anything.
    fill(device, second, 0, bytes)?;
    fill(device, second + bytes, 0xAA, marks)?;
    worked("synchronize", device.synchronize())?;
    Ok(Comparison {
        ranges: [first, second],
        bytes,
        marks: second + bytes,
    })
}

/// Makes one byte after the other differ, and expects `find` to tell its part.
fn finds_each(
    device: &dyn Device,
    comparison: &Comparison,
    offsets: &[u64],
    find: impl Fn(&Comparison) -> Result<Vec<bool>, String>,
) -> Outcome {
    let parts = comparison.bytes / Comparison::PART;
    let none = vec![false; usize::try_from(parts).unwrap_or(0)];
    same("nothing differs", find(comparison)?, none.clone())?;
    for (index, offset) in offsets.iter().enumerate() {
        let address = comparison.ranges[index % 2] + offset;
        let expected = (0..parts).map(|part| offset / Comparison::PART == part);
        fill(device, address, 1, 1)?;
        worked("synchronize", device.synchronize())?;
        let what = format!("byte {offset} differs");
        same(&what, find(comparison)?, expected.collect())?;
        fill(device, address, 0, 1)?;
        worked("synchronize", device.synchronize())?;
    }
    same("nothing differs any more", find(comparison)?, none)
}

fn comparisons(device: &dyn Device) -> Outcome {
    const PART: u64 = Comparison::PART;
    let comparison = comparable(device, 5)?;
    let stream = worked("stream", device.stream_create(NON_BLOCKING, 0))?;
    let find = |comparison: &Comparison| worked("compare", device.differing(comparison, stream));
    let last = 5 * PART - 1;
    let offsets = [
        0,
        7,
        8,
        15,
        PART - 1,
        PART,
        3 * PART + 65_535,
        3 * PART + 65_536,
        last,
    ];
    finds_each(device, &comparison, &offsets, find)?;
    // A part of the ranges.
    let [first, second] = comparison.ranges;
    let behind = Comparison {
        ranges: [first + PART, second + PART],
        bytes: 2 * PART,
        ..comparison
    };
    fill(device, first, 1, PART)?;
    fill(device, first + 2 * PART + 9, 1, 1)?;
    worked("synchronize", device.synchronize())?;
    same("the part's parts", find(&behind)?, vec![false, true])?;
    for wrong in [
        Comparison { bytes: 0, ..behind },
        Comparison {
            bytes: PART + 16,
            ..behind
        },
        Comparison {
            ranges: [first + 8, second],
            ..behind
        },
    ] {
        let refused = device.differing(&wrong, stream);
        same("a wrong comparison", refused, Err(CuError::INVALID_VALUE))?;
    }
    worked("reset", device.reset())?;
    let stream = worked("stream", device.stream_create(NON_BLOCKING, 0))?;
    let again = comparable(device, 1)?;
    let found = worked("compare", device.differing(&again, stream))?;
    same("after a reset", found, vec![false])
}

fn comparing_kernel(device: &dyn Device) -> Outcome {
    const PART: u64 = Comparison::PART;
    let comparison = comparable(device, 2)?;
    let text = Comparison::TEXT.as_bytes();
    let module = load_image(device, text, ImageKind::Module)?;
    let kernel = function(device, &module, Comparison::KERNEL)?;
    let grid = worked("grid", comparison.grid())?;
    let find = |comparison: &Comparison| {
        let marks = Comparison::marks_of(comparison.bytes);
        fill(device, comparison.marks, 0, marks)?;
        let launch = Launch {
            function: kernel.function,
            stream: LEGACY,
            grid,
            block: Comparison::BLOCK,
            shared: 0,
            attributes: &[],
            events: LaunchEvents::default(),
            parameters: &comparison.parameters(),
        };
        worked("launch", device.launch(&launch))?;
        let marks = read(
            device,
            comparison.marks,
            usize::try_from(marks).unwrap_or(0),
        )?;
        Ok(marks.chunks(4).map(|mark| mark == [1, 0, 0, 0]).collect())
    };
    // Each byte of a vector, the first and the last vector of a thread, a block and a part.
    let offsets: Vec<u64> = (0..16)
        .chain([4095, 4096, 61_440, 65_535, 65_536, PART - 65_536, PART - 1])
        .chain([PART, PART + 4080, 2 * PART - 16, 2 * PART - 1])
        .collect();
    finds_each(device, &comparison, &offsets, find)
}
