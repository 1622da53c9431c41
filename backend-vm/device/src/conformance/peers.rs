//! Checks of two devices of one process, and of access between them.

use wormhole_api::constants::array_format::UNSIGNED_INT8;

use super::{
    HostMemory, NON_BLOCKING, ONE_THREAD, Outcome, PAGE, eventually, holds, in_bands, kernel,
    launch, same, worked,
};
use crate::{
    Access, ArrayShape, Copy3dEnd, CuError, Device, Fill, LoadedFunction, MemCopy3d,
    MemoryOperation, MemoryOperationKind, RawStream, condition,
};

const LEGACY: RawStream = RawStream::LEGACY;

/// First two devices of a process, in the order in which they were opened.
pub type Pair<'a> = [&'a dyn Device; 2];

/// Check of two devices.
#[derive(Clone, Copy, Debug)]
pub struct PeerCheck {
    /// Property that must hold.
    pub name: &'static str,
    /// Function that checks it on fresh devices.
    pub run: fn(Pair<'_>) -> Outcome,
}

/// Lists all checks of two devices.
pub fn peer_checks() -> Vec<PeerCheck> {
    CHECKS.to_vec()
}

const CHECKS: &[PeerCheck] = &[
    PeerCheck {
        name: "devices of a process differ in identity and address",
        run: identities,
    },
    PeerCheck {
        name: "a thread uses devices in turn",
        run: turns,
    },
    PeerCheck {
        name: "copies reach every device's memory without access",
        run: copies,
    },
    PeerCheck {
        name: "a kernel reaches a peer's memory while that is enabled",
        run: enabled,
    },
    PeerCheck {
        name: "a kernel without access to a peer's memory faults",
        run: no_access,
    },
    PeerCheck {
        name: "a stream waits for an event of another device",
        run: events,
    },
    PeerCheck {
        name: "arrays of two devices are copied to each other",
        run: arrays,
    },
    PeerCheck {
        name: "memory that the first device registers is every device's",
        run: registered,
    },
    PeerCheck {
        name: "a pool's memory is a peer's when its access is set",
        run: pools,
    },
    PeerCheck {
        name: "memory of a pool serves streams of other devices",
        run: pools_across,
    },
    PeerCheck {
        name: "mapped memory is of the devices that were given access",
        run: mapped,
    },
    PeerCheck {
        name: "a reset leaves the other device alone",
        run: reset,
    },
];

/// Allocates a page of a device's memory.
fn page(device: &dyn Device) -> Result<u64, String> {
    let address = worked("allocate", device.mem_alloc(PAGE as u64))?;
    holds("memory lies in the bands", in_bands(address))?;
    Ok(address)
}

/// Loads the kernel that stores a word.
fn store(device: &dyn Device) -> Result<LoadedFunction, String> {
    kernel(device, "store")
}

fn fill(destination: u64, value: u32) -> Fill {
    Fill {
        destination,
        pitch: 0,
        width: PAGE as u64 / 4,
        height: 1,
        value,
        element: 4,
    }
}

/// Reads the word at an address, by a stream of a device.
fn word(device: &dyn Device, host: &HostMemory<'_>, at: u64) -> Result<u32, String> {
    worked("copy", device.mem_copy(host.address(0), at, 4, LEGACY))?;
    worked("synchronize", device.synchronize_stream(LEGACY))?;
    Ok(host.half_word(0).load(std::sync::atomic::Ordering::Acquire))
}

/// Returns the free memory of a device in bytes.
fn free(device: &dyn Device) -> Result<u64, String> {
    worked("memory", device.mem_get_info()).map(|(free, _)| free)
}

fn identities([first, second]: Pair<'_>) -> Outcome {
    let place = |device: &dyn Device| {
        let attribute = |id| {
            let all = device.describe().attributes.iter();
            all.clone()
                .find(|(known, _)| *known == id)
                .map(|(_, value)| *value)
        };
        [50, 33, 34].map(attribute)
    };
    holds(
        "UUIDs differ",
        first.describe().uuid != second.describe().uuid,
    )?;
    holds("PCI addresses differ", place(first) != place(second))
}

/// One that has used neither, and one that has used both.
fn turns([first, second]: Pair<'_>) -> Outcome {
    const BYTES: u64 = 64 << 20;
    let turn = || {
        for (device, other) in [(first, second), (second, first), (first, second)] {
            let before = [free(device)?, free(other)?];
            let address = worked("allocate", device.mem_alloc(BYTES))?;
            let after = [free(device)?, free(other)?];
            holds("the device has less memory", after[0] + BYTES <= before[0])?;
            same("the other device's memory", after[1], before[1])?;
            let stream = worked("stream", device.stream_create(NON_BLOCKING, 0))?;
            let _ = free(other)?;
            worked("fill", device.fill(fill(address, 1), stream))?;
            worked("fill", device.fill(fill(address, 2), LEGACY))?;
            worked("synchronize", device.synchronize())?;
            let _ = free(other)?;
            worked("destroy", device.destroy_stream(stream))?;
            worked("free", device.mem_free(address))?;
        }
        Ok(())
    };
    turn()?;
    std::thread::scope(|scope| scope.spawn(turn).join().map_err(|_| "a panic".to_owned())?)
}

fn copies(pair: Pair<'_>) -> Outcome {
    let host = HostMemory::new(pair[0], 1)?;
    let pages = [page(pair[0])?, page(pair[1])?];
    for (by, from, to) in [(0, 0, 1), (1, 0, 1), (0, 1, 0), (1, 1, 0)] {
        let value = 0x100 + u32::from(by == 1) * 16 + u32::from(to == 1);
        worked("fill", pair[from].fill(fill(pages[from], value), LEGACY))?;
        worked("synchronize", pair[from].synchronize_stream(LEGACY))?;
        let copied = pair[by].mem_copy(pages[to], pages[from], PAGE as u64, LEGACY);
        worked("copy", copied)?;
        same("what was copied", word(pair[by], &host, pages[to])?, value)?;
    }
    worked(
        "write",
        pair[0].write(pages[1], &7_u32.to_le_bytes(), LEGACY),
    )?;
    same("what was written", word(pair[0], &host, pages[1])?, 7)
}

fn enabled([first, second]: Pair<'_>) -> Outcome {
    let host = HostMemory::new(first, 1)?;
    let store = store(first)?;
    let theirs = page(second)?;
    let peer = second.as_peer();
    let supported = worked("attribute", first.peer_attribute(peer, 2))?;
    same("whether access is supported", supported, 1)?;
    same(
        "an attribute that is none",
        first.peer_attribute(peer, 99),
        Err(CuError::INVALID_VALUE),
    )?;
    same(
        "ending what was not begun",
        first.disable_peer(peer),
        Err(CuError::PEER_ACCESS_NOT_ENABLED),
    )?;
    worked("enable", first.enable_peer(peer))?;
    same(
        "enabling twice",
        first.enable_peer(peer),
        Err(CuError::PEER_ACCESS_ALREADY_ENABLED),
    )?;
    let run = |address, value| {
        let values = [address, value];
        worked("launch", launch(first, LEGACY, &store, ONE_THREAD, &values))?;
        worked("synchronize", first.synchronize_stream(LEGACY))
    };
    run(theirs, 42)?;
    same("the word", word(second, &host, theirs)?, 42)?;
    // Memory allocated later is accessible, too.
    let later = page(second)?;
    run(later, 43)?;
    same("the later word", word(second, &host, later)?, 43)?;
    worked("disable", first.disable_peer(peer))
}

fn no_access([first, second]: Pair<'_>) -> Outcome {
    let store = store(first)?;
    let theirs = page(second)?;
    let launched = launch(first, LEGACY, &store, ONE_THREAD, &[theirs, 1]);
    worked("launch", launched)?;
    same(
        "what the stream says",
        first.synchronize_stream(LEGACY),
        Err(CuError::ILLEGAL_ADDRESS),
    )?;
    same(
        "what the device says",
        first.health(&[]),
        Some(CuError::ILLEGAL_ADDRESS),
    )
}

fn events([first, second]: Pair<'_>) -> Outcome {
    let host = HostMemory::new(first, 1)?;
    let slow = worked("stream", second.stream_create(NON_BLOCKING, 0))?;
    let event = worked("event", second.create_event(0))?;
    let quick = worked("stream", first.stream_create(NON_BLOCKING, 0))?;
    let held = MemoryOperation {
        kind: MemoryOperationKind::Wait64,
        flags: condition::EQ,
        address: host.address(8),
        value: 1,
    };
    worked("hold", second.memory_operations(slow, &[held]))?;
    worked("record", second.record_event(event, slow, 0))?;
    worked("wait", first.wait_event(quick, event, 0))?;
    worked("fence", first.write_fence(quick, host.address(0), 5))?;
    same(
        "whether the event happened",
        second.query_event(event),
        Ok(false),
    )?;
    same(
        "whether the stream is done",
        first.query_stream(quick),
        Ok(false),
    )?;
    let fence = || host.word(0).load(std::sync::atomic::Ordering::Acquire);
    same("the fence", fence(), 0)?;
    host.word(1).store(1, std::sync::atomic::Ordering::Release);
    eventually("the fence is written", || fence() == 5)?;
    worked("synchronize", second.synchronize_event(event))?;
    worked("destroy", second.destroy_event(event))?;
    worked("destroy", second.destroy_stream(slow))?;
    worked("destroy", first.destroy_stream(quick))
}

fn arrays(pair: Pair<'_>) -> Outcome {
    const ROW: u64 = 64;
    const ROWS: u64 = 8;
    let host = HostMemory::new(pair[0], 1)?;
    let shape = ArrayShape::new([ROW, ROWS, 0], UNSIGNED_INT8, 1, 0);
    let shape = shape.map_err(|error| format!("a shape: {error:?}"))?;
    let make = |device: &dyn Device| worked("array", device.create_array(&shape));
    let arrays = [make(pair[0])?, make(pair[1])?];
    let in_array = |array| Copy3dEnd::Array {
        array,
        origin: [0; 3],
    };
    let in_host = |address| Copy3dEnd::Memory {
        address,
        pitch: ROW,
        rows: ROWS,
    };
    let half = PAGE / 2;
    let pattern: Vec<u8> = (0..ROW * ROWS).map(|at| (at % 251) as u8).collect();
    for (index, bytes) in pattern.as_chunks::<4>().0.iter().enumerate() {
        let word = u32::from_ne_bytes(*bytes);
        host.half_word(index)
            .store(word, std::sync::atomic::Ordering::Release);
    }
    // Devices of the two ends; memory belongs to the copying device.
    let steps = [
        (in_array(arrays[0]), in_host(host.address(0)), [0, 0]),
        (in_array(arrays[1]), in_array(arrays[0]), [1, 0]),
        (in_host(host.address(half)), in_array(arrays[1]), [0, 1]),
    ];
    for (to, from, owners) in steps {
        let copy = MemCopy3d {
            to,
            from,
            extent: [ROW, ROWS, 1],
        };
        let [to, from] = owners.map(|owner: usize| pair[owner].as_peer());
        let copied = match owners {
            [0, 0] => pair[0].copy_3d(&copy, LEGACY),
            _ => pair[0].copy_between(&copy, to, from, LEGACY),
        };
        worked("copy", copied)?;
    }
    worked("synchronize", pair[0].synchronize_stream(LEGACY))?;
    same(
        "what came back",
        host.read(half + pattern.len())[half..].to_vec(),
        pattern,
    )?;
    for (device, array) in pair.into_iter().zip(arrays) {
        worked("destroy", device.array_destroy(array))?;
    }
    Ok(())
}

fn registered(pair: Pair<'_>) -> Outcome {
    let host = HostMemory::new(pair[0], 1)?;
    for (number, device) in (0_u64..).zip(pair) {
        let store = store(device)?;
        let offset = if number == 0 { 0 } else { 8 };
        let values = [host.address(offset), 0x50 + number];
        worked(
            "launch",
            launch(device, LEGACY, &store, ONE_THREAD, &values),
        )?;
        worked("synchronize", device.synchronize_stream(LEGACY))?;
        let found = host
            .half_word(offset / 4)
            .load(std::sync::atomic::Ordering::Acquire);
        same("the word", u64::from(found), values[1])?;
    }
    Ok(())
}

fn pools([first, second]: Pair<'_>) -> Outcome {
    let host = HostMemory::new(first, 1)?;
    let store = store(first)?;
    let pool = worked("pool", second.pool_default())?;
    let allocate = || {
        let made = second.pool_alloc(pool, LEGACY, PAGE as u64);
        let made = worked("allocate", made)?;
        worked("synchronize", second.synchronize_stream(LEGACY))?;
        Ok::<u64, String>(made)
    };
    let before = allocate()?;
    let access = second.set_pool_access(pool, first.as_peer(), Access::ReadWrite);
    worked("access", access)?;
    for address in [before, allocate()?] {
        let values = [address, 9];
        worked("launch", launch(first, LEGACY, &store, ONE_THREAD, &values))?;
        worked("synchronize", first.synchronize_stream(LEGACY))?;
        same("the word", word(second, &host, address)?, 9)?;
        worked("free", second.pool_free(address, LEGACY))?;
    }
    worked("synchronize", second.synchronize_stream(LEGACY))
}

fn pools_across([first, second]: Pair<'_>) -> Outcome {
    let host = HostMemory::new(first, 1)?;
    let pool = worked("pool", second.pool_default())?;
    let access = second.set_pool_access(pool, first.as_peer(), Access::ReadWrite);
    worked("access", access)?;
    let stream = worked("stream", first.stream_create(NON_BLOCKING, 0))?;
    let made = second.pool_alloc(pool, LEGACY, PAGE as u64);
    let made = worked("allocate", made)?;
    worked("synchronize", second.synchronize_stream(LEGACY))?;
    worked("fill", first.fill(fill(made, 11), stream))?;
    worked("copy", first.mem_copy(host.address(0), made, 4, stream))?;
    // A device that reports that it may free the memory frees it.
    let frees = first.holds(made);
    if frees {
        worked("free", first.pool_free(made, stream))?;
    }
    worked("synchronize", first.synchronize_stream(stream))?;
    let found = host.half_word(0).load(std::sync::atomic::Ordering::Acquire);
    same("the word", found, 11)?;
    if !frees {
        worked("free", second.pool_free(made, LEGACY))?;
    }
    worked("synchronize", second.synchronize_stream(LEGACY))?;
    worked("destroy", first.destroy_stream(stream))
}

fn mapped(pair: Pair<'_>) -> Outcome {
    let [first, second] = pair;
    let host = HostMemory::new(first, 1)?;
    let stores = [store(first)?, store(second)?];
    let unit = worked("granularity", second.granularity())?.minimum;
    let before = free(second)?;
    let memory = worked("create", second.create_memory(unit, 0))?;
    holds("the memory is the second device's", free(second)? < before)?;
    let address = worked("reserve", second.address_reserve(unit, 0, 0))?;
    worked("map", second.map(address, unit, memory))?;
    for device in pair {
        let set = device.set_access(address, unit, Access::ReadWrite);
        worked("access", set)?;
    }
    for ((number, device), store) in (0x70..).zip(pair).zip(&stores) {
        let values = [address, number];
        worked("launch", launch(device, LEGACY, store, ONE_THREAD, &values))?;
        worked("synchronize", device.synchronize_stream(LEGACY))?;
        let found = u64::from(word(device, &host, address)?);
        same("the word", found, number)?;
    }
    worked("unmap", second.mem_unmap(address, unit))?;
    worked("release", second.mem_release(memory))?;
    worked("unreserve", second.address_free(address, unit))?;
    same("the second device's memory", free(second)?, before)
}

fn reset([first, second]: Pair<'_>) -> Outcome {
    let host = HostMemory::new(second, 1)?;
    let (gone, theirs) = (page(first)?, page(second)?);
    let peer = second.as_peer();
    worked("enable", first.enable_peer(peer))?;
    worked("fill", second.fill(fill(theirs, 4), LEGACY))?;
    worked("synchronize", first.synchronize())?;
    worked("synchronize", second.synchronize())?;
    worked("reset", first.reset())?;
    same(
        "freeing what a reset freed",
        first.mem_free(gone),
        Err(CuError::INVALID_VALUE),
    )?;
    same(
        "ending what a reset ended",
        first.disable_peer(peer),
        Err(CuError::PEER_ACCESS_NOT_ENABLED),
    )?;
    same("the other's word", word(second, &host, theirs)?, 4)?;
    let address = page(first)?;
    worked("fill", first.fill(fill(address, 3), LEGACY))?;
    worked("synchronize", first.synchronize_stream(LEGACY))?;
    worked("free", first.mem_free(address))?;
    worked("free", second.mem_free(theirs))
}
