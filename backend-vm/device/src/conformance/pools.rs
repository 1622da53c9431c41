//! Memory pools and stream-ordered allocation.

use super::{
    Check, HostMemory, NON_BLOCKING, ONE_THREAD, Outcome, PAGE, eventually, holds, kernel, launch,
    same, worked,
};
use crate::{
    CuError, Device, Fill, PoolProperties, RawPool, RawStream, pool_attribute as attribute,
};

pub const CHECKS: &[Check] = &[
    Check {
        name: "memory of a pool is used in the order of its stream",
        run: stream_order,
    },
    Check {
        name: "memory that one stream frees is not another's before the work is done",
        run: reuse_waits,
    },
    Check {
        name: "an event makes memory of one stream another's",
        run: across_streams,
    },
    Check {
        name: "a pool counts what is used and what it holds",
        run: statistics,
    },
    Check {
        name: "memory of a pool is freed once, by its first address",
        run: frees,
    },
    Check {
        name: "a pool that was made is destroyed while its memory is in use",
        run: destroyed,
    },
    Check {
        name: "a pool of limited size gives no more",
        run: limited,
    },
    Check {
        name: "memory of pools lies in the device's bands",
        run: bands,
    },
    Check {
        name: "pools and their memory outlive the context",
        run: outlive_the_context,
    },
];

const MIB: u64 = 1 << 20;

fn stream(device: &dyn Device) -> Result<RawStream, String> {
    worked("stream", device.stream_create(NON_BLOCKING, 0))
}

fn default_pool(device: &dyn Device) -> Result<RawPool, String> {
    worked("default pool", device.pool_default())
}

fn allocate(
    device: &dyn Device,
    pool: RawPool,
    bytes: u64,
    stream: RawStream,
) -> Result<u64, String> {
    worked("allocate", device.pool_alloc(pool, stream, bytes))
}

fn bytes_of(destination: u64, value: u32, width: u64) -> Fill {
    Fill {
        destination,
        pitch: 0,
        width,
        height: 1,
        value,
        element: 1,
    }
}

fn stream_order(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let stream = stream(device)?;
    let pool = default_pool(device)?;
    let page = PAGE as u64;
    for round in 1..=20_u8 {
        let address = allocate(device, pool, page, stream)?;
        let fill = bytes_of(address, round.into(), page);
        worked("fill", device.fill(fill, stream))?;
        worked(
            "copy",
            device.mem_copy(host.address(0), address, page, stream),
        )?;
        worked("free", device.pool_free(address, stream))?;
        worked("synchronize", device.synchronize_stream(stream))?;
        holds("the bytes are there", host.read(PAGE) == vec![round; PAGE])?;
    }
    Ok(())
}

/// Makes a stream wait until the first word of `host` is not zero.
fn busy_stream(device: &dyn Device, host: &HostMemory<'_>) -> Result<RawStream, String> {
    let busy = stream(device)?;
    let wait = kernel(device, "wait_for")?;
    let values = [host.address(0)];
    worked("launch", launch(device, busy, &wait, ONE_THREAD, &values))?;
    Ok(busy)
}

fn reuse_waits(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 2)?;
    let page = PAGE as u64;
    let pool = default_pool(device)?;
    let quick = stream(device)?;
    // Allocates before the wait: loading may wait for the device.
    let before = allocate(device, pool, page, quick)?;
    let busy = busy_stream(device, &host)?;
    let late = allocate(device, pool, page, busy)?;
    worked("fill", device.fill(bytes_of(late, 1, page), busy))?;
    worked(
        "copy",
        device.mem_copy(host.address(PAGE), late, page, busy),
    )?;
    worked("free", device.pool_free(late, busy))?;
    for _ in 0..8 {
        let taken = allocate(device, pool, page, quick)?;
        worked("fill", device.fill(bytes_of(taken, 2, page), quick))?;
    }
    worked("free", device.pool_free(before, quick))?;
    host.word(0).store(1, std::sync::atomic::Ordering::Release);
    worked("synchronize", device.synchronize())?;
    let bytes = host.read(2 * PAGE).split_off(PAGE);
    holds("nobody wrote there meanwhile", bytes == vec![1; PAGE])
}

fn across_streams(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let page = PAGE as u64;
    let (first, second) = (stream(device)?, stream(device)?);
    let pool = default_pool(device)?;
    let event = worked("event", device.create_event(0))?;
    for round in 1..=20_u8 {
        let address = allocate(device, pool, page, first)?;
        let fill = bytes_of(address, round.into(), page);
        worked("fill", device.fill(fill, first))?;
        worked("record", device.record_event(event, first, 0))?;
        worked("wait", device.wait_event(second, event, 0))?;
        worked(
            "copy",
            device.mem_copy(host.address(0), address, page, second),
        )?;
        worked("free", device.pool_free(address, second))?;
        worked("synchronize", device.synchronize_stream(second))?;
        holds("the bytes are there", host.read(PAGE) == vec![round; PAGE])?;
    }
    Ok(())
}

fn statistics(device: &dyn Device) -> Outcome {
    let stream = stream(device)?;
    let pool = worked("create", device.create_pool(&PoolProperties::default()))?;
    let value = |id| worked("attribute", device.pool_attribute(pool, id));
    let set = |id, value| worked("set", device.set_pool_attribute(pool, id, value));
    for id in [
        attribute::REUSE_FOLLOW_EVENT_DEPENDENCIES,
        attribute::REUSE_ALLOW_OPPORTUNISTIC,
        attribute::REUSE_ALLOW_INTERNAL_DEPENDENCIES,
    ] {
        same("reuse is allowed", value(id)?, 1)?;
        set(id, 0)?;
        same("reuse is not allowed", value(id)?, 0)?;
        set(id, 1)?;
    }
    for id in attribute::RELEASE_THRESHOLD..=attribute::USED_MEM_HIGH {
        same("a new pool", value(id)?, 0)?;
    }
    set(attribute::RELEASE_THRESHOLD, u64::MAX)?;
    same("threshold", value(attribute::RELEASE_THRESHOLD)?, u64::MAX)?;
    let [large, small] = [64 * MIB, MIB].map(|bytes| device.pool_alloc(pool, stream, bytes));
    let (large, small) = (worked("allocate", large)?, worked("allocate", small)?);
    same("used", value(attribute::USED_MEM_CURRENT)?, 65 * MIB)?;
    holds(
        "as much is held",
        value(attribute::RESERVED_MEM_CURRENT)? >= 65 * MIB,
    )?;
    worked("free", device.pool_free(large, stream))?;
    worked("synchronize", device.synchronize_stream(stream))?;
    same("used", value(attribute::USED_MEM_CURRENT)?, MIB)?;
    same("used most", value(attribute::USED_MEM_HIGH)?, 65 * MIB)?;
    holds(
        "it is still held",
        value(attribute::RESERVED_MEM_CURRENT)? >= 65 * MIB,
    )?;
    worked("trim", device.pool_trim(pool, 0))?;
    let held = value(attribute::RESERVED_MEM_CURRENT)?;
    holds("the small one is held", (MIB..65 * MIB).contains(&held))?;
    same("used", value(attribute::USED_MEM_CURRENT)?, MIB)?;
    set(attribute::USED_MEM_HIGH, 0)?;
    same("used most", value(attribute::USED_MEM_HIGH)?, MIB)?;
    set(attribute::RESERVED_MEM_HIGH, 0)?;
    same("held most", value(attribute::RESERVED_MEM_HIGH)?, held)?;
    for (id, value) in [
        (attribute::USED_MEM_HIGH, 1),
        (attribute::RESERVED_MEM_HIGH, 1),
        (attribute::USED_MEM_CURRENT, 0),
        (attribute::RESERVED_MEM_CURRENT, 0),
        (0, 0),
        (99, 0),
    ] {
        same(
            &format!("setting {id} to {value}"),
            device.set_pool_attribute(pool, id, value),
            Err(CuError::INVALID_VALUE),
        )?;
    }
    set(attribute::RELEASE_THRESHOLD, 0)?;
    worked("free", device.pool_free(small, stream))?;
    // The driver applies the threshold when it finds the free complete.
    eventually("everything is given back", || {
        let synchronized = device.synchronize_stream(stream).is_ok();
        synchronized && device.pool_attribute(pool, attribute::RESERVED_MEM_CURRENT) == Ok(0)
    })?;
    worked("destroy", device.pool_destroy(pool))
}

fn frees(device: &dyn Device) -> Outcome {
    let stream = stream(device)?;
    let pool = default_pool(device)?;
    let address = allocate(device, pool, 4 * MIB, stream)?;
    same(
        "freeing the middle",
        device.pool_free(address + MIB, stream),
        Err(CuError::INVALID_VALUE),
    )?;
    worked("free", device.pool_free(address, stream))?;
    worked("synchronize", device.synchronize_stream(stream))?;
    same(
        "freeing again",
        device.pool_free(address, stream),
        Err(CuError::INVALID_VALUE),
    )?;
    let address = allocate(device, pool, 4 * MIB, stream)?;
    worked("synchronize", device.synchronize_stream(stream))?;
    worked("free as other memory", device.mem_free(address))?;
    same(
        "freeing again",
        device.mem_free(address),
        Err(CuError::INVALID_VALUE),
    )
}

fn destroyed(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let stream = stream(device)?;
    let pool = worked("create", device.create_pool(&PoolProperties::default()))?;
    let page = PAGE as u64;
    let address = allocate(device, pool, page, stream)?;
    worked("destroy", device.pool_destroy(pool))?;
    worked("fill", device.fill(bytes_of(address, 5, page), stream))?;
    worked(
        "copy",
        device.mem_copy(host.address(0), address, page, stream),
    )?;
    worked("free", device.pool_free(address, stream))?;
    worked("synchronize", device.synchronize_stream(stream))?;
    holds("the bytes are there", host.read(PAGE) == vec![5; PAGE])
}

fn limited(device: &dyn Device) -> Outcome {
    let stream = stream(device)?;
    let properties = PoolProperties {
        most: 64 * MIB,
        ..PoolProperties::default()
    };
    let pool = worked("create", device.create_pool(&properties))?;
    let address = allocate(device, pool, 64 * MIB, stream)?;
    same(
        "more",
        device.pool_alloc(pool, stream, 64 * MIB),
        Err(CuError::OUT_OF_MEMORY),
    )?;
    worked("free", device.pool_free(address, stream))?;
    let address = allocate(device, pool, 64 * MIB, stream)?;
    worked("free", device.pool_free(address, stream))?;
    worked("destroy", device.pool_destroy(pool))
}

fn bands(device: &dyn Device) -> Outcome {
    let stream = stream(device)?;
    let pool = default_pool(device)?;
    for bytes in [1, MIB, 64 * MIB] {
        let address = allocate(device, pool, bytes, stream)?;
        holds(
            &format!("{bytes} bytes at {address:#x} are in a band"),
            super::in_bands(address),
        )?;
        worked("free", device.pool_free(address, stream))?;
    }
    Ok(())
}

fn outlive_the_context(device: &dyn Device) -> Outcome {
    let page = PAGE as u64;
    let pool = worked("create", device.create_pool(&PoolProperties::default()))?;
    let before = stream(device)?;
    let address = allocate(device, pool, page, before)?;
    worked("fill", device.fill(bytes_of(address, 9, page), before))?;
    worked("synchronize", device.synchronize())?;
    worked("reset", device.reset())?;
    let host = HostMemory::new(device, 1)?;
    let after = stream(device)?;
    worked(
        "copy",
        device.mem_copy(host.address(0), address, page, after),
    )?;
    worked("synchronize", device.synchronize())?;
    holds("the bytes are there", host.read(PAGE) == vec![9; PAGE])?;
    worked("free", device.pool_free(address, after))?;
    let again = allocate(device, pool, page, after)?;
    worked("free", device.pool_free(again, after))?;
    worked("destroy", device.pool_destroy(pool))
}
