//! Device memory, copies and fills.

use std::sync::atomic::Ordering;

use super::{Check, HostMemory, Outcome, PAGE, holds, in_bands, same, worked};
use crate::{CuError, Device, Fill, RawStream};

pub const CHECKS: &[Check] = &[
    Check {
        name: "the device describes itself",
        run: description,
    },
    Check {
        name: "bytes that are copied in come out again",
        run: round_trip,
    },
    Check {
        name: "the source of a write may be reused",
        run: write_takes_the_data,
    },
    Check {
        name: "fills set each element and nothing else",
        run: fills,
    },
    Check {
        name: "device addresses lie in the device's bands",
        run: bands,
    },
    Check {
        name: "an allocation is freed once, by its first address",
        run: frees,
    },
    Check {
        name: "an allocation takes memory and gives it back",
        run: accounting,
    },
    Check {
        name: "host memory is registered once and unregistered once",
        run: registrations,
    },
    Check {
        name: "a reset empties the context and leaves it usable",
        run: reset,
    },
];

const LEGACY: RawStream = RawStream::LEGACY;

fn description(device: &dyn Device) -> Outcome {
    let description = device.describe();
    let attribute = |id| {
        description
            .attributes
            .iter()
            .find(|(known, _)| *known == id)
            .map(|x| x.1)
    };
    holds("it has a name", !description.name.is_empty())?;
    holds("it has memory", description.total_memory > 0)?;
    holds(
        "it has CUDA 12 or later",
        description.driver_version >= 12_000,
    )?;
    same("warp size", attribute(10), Some(32))?;
    same("most threads of a block", attribute(1), Some(1024))?;
    same("unified addressing", attribute(41), Some(1))?;
    holds(
        "it has multiprocessors",
        attribute(16).is_some_and(|count| count > 0),
    )?;
    let (least, greatest) = description.stream_priorities;
    holds("priorities are in order", greatest <= least)
}

fn round_trip(device: &dyn Device) -> Outcome {
    let bytes = 3 * PAGE + 5;
    let host = HostMemory::new(device, 4)?;
    let first = worked("allocate", device.mem_alloc(bytes as u64))?;
    let second = worked("allocate", device.mem_alloc(bytes as u64))?;
    let data: Vec<u8> = (0..=250).cycle().take(bytes).collect();
    worked("write", device.write(first, &data, LEGACY))?;
    worked("copy", device.mem_copy(second, first, bytes as u64, LEGACY))?;
    worked(
        "copy",
        device.mem_copy(host.address(0), second, bytes as u64, LEGACY),
    )?;
    worked("synchronize", device.synchronize_stream(LEGACY))?;
    holds("the bytes are the same", host.read(bytes) == data)
}

fn write_takes_the_data(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let stream = worked("stream", device.stream_create(super::NON_BLOCKING, 0))?;
    let address = worked("allocate", device.mem_alloc(PAGE as u64))?;
    let mut data = vec![1_u8; PAGE];
    worked("write", device.write(address, &data, stream))?;
    data.fill(2);
    worked(
        "copy",
        device.mem_copy(host.address(0), address, PAGE as u64, stream),
    )?;
    worked("synchronize", device.synchronize_stream(stream))?;
    holds("the first bytes arrived", host.read(PAGE) == vec![1; PAGE])
}

fn fills(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let address = worked("allocate", device.mem_alloc(PAGE as u64))?;
    let mut expected = vec![0_u8; 64];
    let plain = |destination, width, value, element| Fill {
        destination,
        pitch: 0,
        width,
        height: 1,
        value,
        element,
    };
    worked("fill", device.fill(plain(address, 64, 0, 1), LEGACY))?;
    worked(
        "fill",
        device.fill(plain(address + 1, 3, 0x1_23, 1), LEGACY),
    )?;
    expected[1..4].fill(0x23);
    worked(
        "fill",
        device.fill(plain(address + 8, 2, 0x1_2345, 2), LEGACY),
    )?;
    expected[8..12].copy_from_slice(&[0x45, 0x23, 0x45, 0x23]);
    worked(
        "fill",
        device.fill(plain(address + 16, 1, 0x1234_5678, 4), LEGACY),
    )?;
    expected[16..20].copy_from_slice(&[0x78, 0x56, 0x34, 0x12]);
    let rows = Fill {
        destination: address + 32,
        pitch: 16,
        width: 2,
        height: 2,
        value: 5,
        element: 2,
    };
    worked("fill", device.fill(rows, LEGACY))?;
    for row in [32, 48] {
        expected[row..row + 4].copy_from_slice(&[5, 0, 5, 0]);
    }
    worked(
        "copy",
        device.mem_copy(host.address(0), address, 64, LEGACY),
    )?;
    worked("synchronize", device.synchronize_stream(LEGACY))?;
    same("filled bytes", host.read(64), expected)
}

fn bands(device: &dyn Device) -> Outcome {
    for bytes in [1_u64, 1 << 20, 64 << 20] {
        let address = worked("allocate", device.mem_alloc(bytes))?;
        holds(
            &format!("{bytes} bytes at {address:#x} are in a band"),
            in_bands(address),
        )?;
    }
    Ok(())
}

fn frees(device: &dyn Device) -> Outcome {
    same(
        "allocating nothing",
        device.mem_alloc(0),
        Err(CuError::INVALID_VALUE),
    )?;
    let address = worked("allocate", device.mem_alloc(PAGE as u64))?;
    same(
        "freeing the middle",
        device.mem_free(address + 16),
        Err(CuError::INVALID_VALUE),
    )?;
    worked("free", device.mem_free(address))?;
    same(
        "freeing again",
        device.mem_free(address),
        Err(CuError::INVALID_VALUE),
    )
}

fn accounting(device: &dyn Device) -> Outcome {
    let (_, total) = worked("memory info", device.mem_get_info())?;
    same(
        "too much",
        device.mem_alloc(total + PAGE as u64),
        Err(CuError::OUT_OF_MEMORY),
    )?;
    let (before, _) = worked("memory info", device.mem_get_info())?;
    let address = worked("allocate", device.mem_alloc(64 << 20))?;
    let (during, _) = worked("memory info", device.mem_get_info())?;
    worked("free", device.mem_free(address))?;
    let (after, _) = worked("memory info", device.mem_get_info())?;
    holds("it took memory", during + (64 << 20) <= before)?;
    holds("it gave memory back", after >= during + (64 << 20))
}

fn registrations(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 2)?;
    // SAFETY: the range is mapped as long as `host` lives.
    let again = unsafe { device.register(host.address(0), PAGE as u64) };
    same(
        "registering again",
        again,
        Err(CuError::HOST_MEMORY_ALREADY_REGISTERED),
    )?;
    worked("unregister", device.unregister(host.address(0)))?;
    let gone = device.unregister(host.address(0));
    same(
        "unregistering again",
        gone,
        Err(CuError::HOST_MEMORY_NOT_REGISTERED),
    )
}

fn reset(device: &dyn Device) -> Outcome {
    let stream = worked("stream", device.stream_create(super::NON_BLOCKING, 0))?;
    let address = worked("allocate", device.mem_alloc(64 << 20))?;
    worked("write", device.write(address, &[1, 2, 3], stream))?;
    let (before, _) = worked("memory info", device.mem_get_info())?;
    worked("reset", device.reset())?;
    let (after, _) = worked("memory info", device.mem_get_info())?;
    holds("memory came back", after >= before + (64 << 20))?;
    same(
        "freeing what is gone",
        device.mem_free(address),
        Err(CuError::INVALID_VALUE),
    )?;
    let host = HostMemory::new(device, 1)?;
    let stream = worked("stream", device.stream_create(super::NON_BLOCKING, 0))?;
    worked("fence", device.write_fence(stream, host.address(0), 5))?;
    worked("synchronize", device.synchronize())?;
    same("the fence", host.word(0).load(Ordering::Acquire), 5)
}
