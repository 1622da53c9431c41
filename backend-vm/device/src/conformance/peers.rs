//! Several devices behind one object, and access between them.
//!
//! Each check gets a set of at least two devices, of which the first is the calling thread's current one.

use super::{
    Check, HostMemory, NON_BLOCKING, ONE_THREAD, Outcome, PAGE, eventually, holds, in_bands,
    kernel, launch, pack, same, worked,
};
use crate::{
    Access, ArrayShape, BoxCopy, BoxEnd, CuError, Device, Fill, GraphDescription, GraphKernel,
    GraphNode, LoadedFunction, MemoryOperation, MemoryOperationKind, Peer, RawStream, condition,
};

/// What two devices of one process must keep.
pub fn peer_checks() -> Vec<Check> {
    CHECKS.to_vec()
}

const CHECKS: &[Check] = &[
    Check {
        name: "devices of a set differ in identity and address",
        run: identities,
    },
    Check {
        name: "what a thread makes is of its current device",
        run: current_devices,
    },
    Check {
        name: "copies reach every device's memory without access",
        run: copies,
    },
    Check {
        name: "a kernel reaches a peer's memory while that is enabled",
        run: enabled,
    },
    Check {
        name: "a kernel without access to a peer's memory faults",
        run: no_access,
    },
    Check {
        name: "a stream waits for an event of another device",
        run: events,
    },
    Check {
        name: "objects of two devices do not go together",
        run: mixtures,
    },
    Check {
        name: "arrays of two devices are copied to each other",
        run: arrays,
    },
    Check {
        name: "a graph is launched in the place of another device's stream",
        run: graphs,
    },
    Check {
        name: "registered memory is every device's",
        run: registered,
    },
    Check {
        name: "a pool's memory is a peer's when its access is set",
        run: pools,
    },
    Check {
        name: "memory of a pool serves streams of other devices",
        run: pools_across,
    },
    Check {
        name: "mapped memory is of the devices that were given access",
        run: mapped,
    },
    Check {
        name: "a reset begins all devices afresh",
        run: reset,
    },
];

const FIRST: u8 = 0;
const SECOND: u8 = 1;

fn select(device: &dyn Device, number: u8) -> Outcome {
    worked("select", device.select(number.into()))
}

const fn peer(number: u8) -> Peer {
    Peer {
        ordinal: number as i32,
        context: 0,
    }
}

fn legacy(number: u8) -> RawStream {
    RawStream::legacy_of(number)
}

/// A page of memory of a device.
fn page(device: &dyn Device, number: u8) -> Result<u64, String> {
    select(device, number)?;
    let address = worked("allocate", device.allocate(PAGE as u64))?;
    holds("memory lies in the bands", in_bands(address))?;
    Ok(address)
}

/// A kernel of a device that stores a word.
fn store(device: &dyn Device, number: u8) -> Result<LoadedFunction, String> {
    select(device, number)?;
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

/// The first word at an address, read by a stream of a device.
fn word(device: &dyn Device, host: &HostMemory<'_>, at: u64, by: u8) -> Result<u32, String> {
    worked("copy", device.copy(host.address(0), at, 4, legacy(by)))?;
    worked("synchronize", device.synchronize_stream(legacy(by)))?;
    Ok(host.half_word(0).load(std::sync::atomic::Ordering::Acquire))
}

fn identities(device: &dyn Device) -> Outcome {
    let members = device.members();
    holds("there are two devices", members.len() >= 2)?;
    let place = |member: &dyn Device| {
        let attribute = |id| {
            let all = member.describe().attributes.iter();
            all.clone()
                .find(|(known, _)| *known == id)
                .map(|(_, value)| *value)
        };
        [50, 33, 34].map(attribute)
    };
    let [first, second] = [&members[0], &members[1]].map(std::sync::Arc::as_ref);
    holds(
        "UUIDs differ",
        first.describe().uuid != second.describe().uuid,
    )?;
    holds("PCI addresses differ", place(first) != place(second))?;
    same(
        "selecting a device that is not there",
        device.select(members.len()),
        Err(CuError::INVALID_DEVICE),
    )
}

fn current_devices(device: &dyn Device) -> Outcome {
    let free = |number| {
        select(device, number)?;
        worked("memory", device.memory_info()).map(|(free, _)| free)
    };
    let before = [free(FIRST)?, free(SECOND)?];
    const BYTES: u64 = 64 << 20;
    select(device, SECOND)?;
    let address = worked("allocate", device.allocate(BYTES))?;
    let after = [free(FIRST)?, free(SECOND)?];
    same("the first device's memory", after[0], before[0])?;
    holds(
        "the second device has less memory",
        after[1] + BYTES <= before[1],
    )?;
    // Freed whichever device is the current one.
    select(device, FIRST)?;
    worked("free", device.free(address))?;
    same("the second device's memory", free(SECOND)?, before[1])?;
    let other = std::thread::scope(|scope| {
        let ask = || worked("memory", device.memory_info());
        scope.spawn(ask).join().map_err(|_| "a panic".to_owned())?
    })?;
    select(device, FIRST)?;
    same(
        "another thread's current device",
        other.1,
        worked("memory", device.memory_info())?.1,
    )
}

fn copies(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let pages = [page(device, FIRST)?, page(device, SECOND)?];
    for (by, from, to) in [(0, 0, 1), (1, 0, 1), (0, 1, 0), (1, 1, 0)] {
        let numbers = [FIRST, SECOND];
        let (value, owner, by) = (0x100 + by * 16 + to, numbers[from], numbers[by as usize]);
        let (from, to) = (pages[from], pages[to as usize]);
        worked("fill", device.fill(fill(from, value), legacy(owner)))?;
        worked("synchronize", device.synchronize_stream(legacy(owner)))?;
        let bytes = PAGE as u64;
        let copied = device.copy(to, from, bytes, legacy(by));
        worked("copy", copied)?;
        same("what was copied", word(device, &host, to, by)?, value)?;
    }
    worked(
        "write",
        device.write(pages[1], &7_u32.to_le_bytes(), legacy(FIRST)),
    )?;
    same("what was written", word(device, &host, pages[1], FIRST)?, 7)
}

fn enabled(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let store = store(device, FIRST)?;
    let theirs = page(device, SECOND)?;
    select(device, FIRST)?;
    let supported = worked("attribute", device.peer_attribute(peer(SECOND), 2))?;
    same("whether access is supported", supported, 1)?;
    same(
        "an attribute that is none",
        device.peer_attribute(peer(SECOND), 99),
        Err(CuError::INVALID_VALUE),
    )?;
    same(
        "ending what was not begun",
        device.disable_peer(peer(SECOND)),
        Err(CuError::PEER_ACCESS_NOT_ENABLED),
    )?;
    worked("enable", device.enable_peer(peer(SECOND)))?;
    same(
        "enabling twice",
        device.enable_peer(peer(SECOND)),
        Err(CuError::PEER_ACCESS_ALREADY_ENABLED),
    )?;
    let run = |address, value| {
        let values = [address, value];
        worked(
            "launch",
            launch(device, legacy(FIRST), &store, ONE_THREAD, &values),
        )?;
        worked("synchronize", device.synchronize_stream(legacy(FIRST)))
    };
    run(theirs, 42)?;
    same("the word", word(device, &host, theirs, SECOND)?, 42)?;
    // What is allocated later is reached too.
    let later = page(device, SECOND)?;
    run(later, 43)?;
    same("the later word", word(device, &host, later, SECOND)?, 43)?;
    select(device, FIRST)?;
    worked("disable", device.disable_peer(peer(SECOND)))
}

fn no_access(device: &dyn Device) -> Outcome {
    let store = store(device, FIRST)?;
    let theirs = page(device, SECOND)?;
    worked(
        "launch",
        launch(device, legacy(FIRST), &store, ONE_THREAD, &[theirs, 1]),
    )?;
    same(
        "what the stream says",
        device.synchronize_stream(legacy(FIRST)),
        Err(CuError::ILLEGAL_ADDRESS),
    )?;
    same(
        "what the set says",
        device.health(&[]),
        Some(CuError::ILLEGAL_ADDRESS),
    )
}

fn events(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    select(device, SECOND)?;
    let slow = worked("stream", device.create_stream(NON_BLOCKING, 0))?;
    let event = worked("event", device.create_event(0))?;
    select(device, FIRST)?;
    let quick = worked("stream", device.create_stream(NON_BLOCKING, 0))?;
    let held = MemoryOperation {
        kind: MemoryOperationKind::Wait64,
        flags: condition::EQ,
        address: host.address(8),
        value: 1,
    };
    worked("hold", device.memory_operations(slow, &[held]))?;
    worked("record", device.record_event(event, slow, 0))?;
    worked("wait", device.wait_event(quick, event, 0))?;
    worked("fence", device.write_fence(quick, host.address(0), 5))?;
    same(
        "whether the event happened",
        device.query_event(event),
        Ok(false),
    )?;
    same(
        "whether the stream is done",
        device.query_stream(quick),
        Ok(false),
    )?;
    let fence = || host.word(0).load(std::sync::atomic::Ordering::Acquire);
    same("the fence", fence(), 0)?;
    host.word(1).store(1, std::sync::atomic::Ordering::Release);
    eventually("the fence is written", || fence() == 5)?;
    worked("synchronize", device.synchronize_event(event))?;
    worked("destroy", device.destroy_event(event))?;
    worked("destroy", device.destroy_stream(slow))?;
    worked("destroy", device.destroy_stream(quick))
}

fn mixtures(device: &dyn Device) -> Outcome {
    let store = store(device, FIRST)?;
    let theirs = page(device, SECOND)?;
    let event = worked("event", device.create_event(0))?;
    let refused = Err(CuError::INVALID_HANDLE);
    same(
        "a kernel on another device's stream",
        launch(device, legacy(SECOND), &store, ONE_THREAD, &[theirs, 1]),
        refused,
    )?;
    same(
        "an event recorded on another device's stream",
        device.record_event(event, legacy(FIRST), 0),
        refused,
    )?;
    worked("record", device.record_event(event, legacy(SECOND), 0))?;
    select(device, FIRST)?;
    let own = worked("event", device.create_event(0))?;
    worked("record", device.record_event(own, legacy(FIRST), 0))?;
    same(
        "the time between events of two devices",
        device.elapsed(event, own).map(drop),
        refused,
    )
}

fn arrays(device: &dyn Device) -> Outcome {
    const ROW: u64 = 64;
    const ROWS: u64 = 8;
    /// `CU_AD_FORMAT_UNSIGNED_INT8`.
    const BYTE: u32 = 1;
    let host = HostMemory::new(device, 1)?;
    let shape = ArrayShape::new([ROW, ROWS, 0], BYTE, 1, 0);
    let shape = shape.map_err(|error| format!("a shape: {error:?}"))?;
    let make = |number| {
        select(device, number)?;
        worked("array", device.create_array(&shape))
    };
    let arrays = [make(FIRST)?, make(SECOND)?];
    let in_array = |array| BoxEnd::Array {
        array,
        origin: [0; 3],
    };
    let in_host = |address| BoxEnd::Memory {
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
    let steps = [
        (in_array(arrays[0]), in_host(host.address(0))),
        (in_array(arrays[1]), in_array(arrays[0])),
        (in_host(host.address(half)), in_array(arrays[1])),
    ];
    for (to, from) in steps {
        let copy = BoxCopy {
            to,
            from,
            extent: [ROW, ROWS, 1],
        };
        worked("copy", device.copy_box(&copy, legacy(FIRST)))?;
    }
    worked("synchronize", device.synchronize_stream(legacy(FIRST)))?;
    same(
        "what came back",
        host.read(half + pattern.len())[half..].to_vec(),
        pattern,
    )?;
    for array in arrays {
        worked("destroy", device.destroy_array(array))?;
    }
    Ok(())
}

fn graphs(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let store = store(device, SECOND)?;
    let theirs = page(device, SECOND)?;
    let description = GraphDescription {
        nodes: vec![GraphNode::Kernel(GraphKernel {
            function: store.function,
            grid: [1; 3],
            block: [1; 3],
            shared: 0,
            attributes: Vec::new(),
            parameters: pack(&store, &[theirs, 77]),
        })],
        ..GraphDescription::default()
    };
    select(device, FIRST)?;
    let graph = worked("instantiate", device.instantiate(&description, 0))?;
    let stream = worked("stream", device.create_stream(NON_BLOCKING, 0))?;
    worked("launch", device.launch_graph(graph, stream))?;
    worked("copy", device.copy(host.address(0), theirs, 4, stream))?;
    worked("synchronize", device.synchronize_stream(stream))?;
    let found = host.half_word(0).load(std::sync::atomic::Ordering::Acquire);
    same("the word", found, 77)?;
    worked("destroy", device.destroy_graph(graph))?;
    worked("destroy", device.destroy_stream(stream))
}

fn registered(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    for number in [FIRST, SECOND] {
        let store = store(device, number)?;
        let offset = 8 * usize::from(number);
        let values = [host.address(offset), 0x50 + u64::from(number)];
        worked(
            "launch",
            launch(device, legacy(number), &store, ONE_THREAD, &values),
        )?;
        worked("synchronize", device.synchronize_stream(legacy(number)))?;
        let found = host
            .half_word(offset / 4)
            .load(std::sync::atomic::Ordering::Acquire);
        same("the word", u64::from(found), values[1])?;
    }
    Ok(())
}

fn pools(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let store = store(device, FIRST)?;
    select(device, SECOND)?;
    let pool = worked("pool", device.default_pool())?;
    let allocate = || {
        let made = device.allocate_async(pool, PAGE as u64, legacy(SECOND));
        let made = worked("allocate", made)?;
        worked("synchronize", device.synchronize_stream(legacy(SECOND)))?;
        Ok::<u64, String>(made)
    };
    let before = allocate()?;
    let access = Access::ReadWrite;
    worked("access", device.set_pool_access(pool, peer(FIRST), access))?;
    for address in [before, allocate()?] {
        let values = [address, 9];
        worked(
            "launch",
            launch(device, legacy(FIRST), &store, ONE_THREAD, &values),
        )?;
        worked("synchronize", device.synchronize_stream(legacy(FIRST)))?;
        same("the word", word(device, &host, address, SECOND)?, 9)?;
        worked("free", device.free_async(address, legacy(SECOND)))?;
    }
    worked("synchronize", device.synchronize_stream(legacy(SECOND)))
}

fn pools_across(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    select(device, SECOND)?;
    let pool = worked("pool", device.default_pool())?;
    let access = Access::ReadWrite;
    worked("access", device.set_pool_access(pool, peer(FIRST), access))?;
    select(device, FIRST)?;
    let stream = worked("stream", device.create_stream(NON_BLOCKING, 0))?;
    let made = device.allocate_async(pool, PAGE as u64, stream);
    let made = worked("allocate", made)?;
    worked("fill", device.fill(fill(made, 11), stream))?;
    worked("copy", device.copy(host.address(0), made, 4, stream))?;
    worked("free", device.free_async(made, stream))?;
    worked("synchronize", device.synchronize_stream(stream))?;
    let found = host.half_word(0).load(std::sync::atomic::Ordering::Acquire);
    same("the word", found, 11)?;
    worked("synchronize", device.synchronize_stream(legacy(SECOND)))?;
    worked("destroy", device.destroy_stream(stream))
}

fn mapped(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let stores = [store(device, FIRST)?, store(device, SECOND)?];
    let unit = worked("granularity", device.granularity())?.minimum;
    select(device, SECOND)?;
    let free = worked("memory", device.memory_info())?.0;
    let memory = worked("create", device.create_memory(unit, 0))?;
    holds(
        "the memory is the second device's",
        worked("memory", device.memory_info())?.0 < free,
    )?;
    let address = worked("reserve", device.reserve(unit, 0, 0))?;
    worked("map", device.map(address, unit, memory))?;
    for number in [FIRST, SECOND] {
        select(device, number)?;
        let set = device.set_access(address, unit, Access::ReadWrite);
        worked("access", set)?;
    }
    for (number, store) in [FIRST, SECOND].into_iter().zip(&stores) {
        let value = 0x70 + u64::from(number);
        let values = [address, value];
        worked(
            "launch",
            launch(device, legacy(number), store, ONE_THREAD, &values),
        )?;
        worked("synchronize", device.synchronize_stream(legacy(number)))?;
        let found = u64::from(word(device, &host, address, number)?);
        same("the word", found, value)?;
    }
    worked("unmap", device.unmap(address, unit))?;
    worked("release", device.release_memory(memory))?;
    worked("unreserve", device.unreserve(address, unit))?;
    select(device, SECOND)?;
    same(
        "the second device's memory",
        worked("memory", device.memory_info())?.0,
        free,
    )
}

fn reset(device: &dyn Device) -> Outcome {
    let theirs = page(device, SECOND)?;
    select(device, FIRST)?;
    worked("enable", device.enable_peer(peer(SECOND)))?;
    worked("reset", device.reset())?;
    same(
        "freeing what a reset freed",
        device.free(theirs),
        Err(CuError::INVALID_VALUE),
    )?;
    select(device, FIRST)?;
    same(
        "ending what a reset ended",
        device.disable_peer(peer(SECOND)),
        Err(CuError::PEER_ACCESS_NOT_ENABLED),
    )?;
    for number in [FIRST, SECOND] {
        let address = page(device, number)?;
        worked("fill", device.fill(fill(address, 3), legacy(number)))?;
        worked("synchronize", device.synchronize_stream(legacy(number)))?;
        worked("free", device.free(address))?;
    }
    Ok(())
}
