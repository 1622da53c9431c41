//! Memory operations of streams: waits for words and writes of words.

use std::sync::atomic::Ordering;

use wormhole_api::constants::launch_attribute::{COOPERATIVE, SYNCHRONIZATION_POLICY};

use super::{
    Check, HostMemory, NON_BLOCKING, ONE_THREAD, Outcome, eventually, holds, kernel, launch, same,
    worked,
};
use crate::{
    CuError, Device, LaunchAttribute, MemoryOperation, MemoryOperationKind, RawStream, condition,
};

pub const CHECKS: &[Check] = &[
    Check {
        name: "a stream waits for a word, and other streams do not",
        run: waits,
    },
    Check {
        name: "each condition of a wait holds and lets go",
        run: conditions,
    },
    Check {
        name: "a stream writes a word when the work before it is complete",
        run: writes,
    },
    Check {
        name: "a stream lets another go by a word of device memory",
        run: between_streams,
    },
    Check {
        name: "operations of one call are made in their order",
        run: batch,
    },
    Check {
        name: "a stream keeps to its attributes and refuses others",
        run: attributes,
    },
];

/// Indices of 32-bit words of the host memory.
const GATE: usize = 0;
const MARK: usize = 16;

fn operation(kind: MemoryOperationKind, flags: u32, address: u64, value: u64) -> MemoryOperation {
    MemoryOperation {
        kind,
        flags,
        address,
        value,
    }
}

fn half(host: &HostMemory<'_>, index: usize) -> u64 {
    host.address(index * 4)
}

fn write(address: u64, value: u64) -> MemoryOperation {
    operation(MemoryOperationKind::Write32, 0, address, value)
}

fn submit(device: &dyn Device, stream: RawStream, operations: &[MemoryOperation]) -> Outcome {
    worked(
        "memory operations",
        device.memory_operations(stream, operations),
    )
}

fn new_stream(device: &dyn Device) -> Result<RawStream, String> {
    worked("create_stream", device.stream_create(NON_BLOCKING, 0))
}

fn waits(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let (held, free) = (new_stream(device)?, new_stream(device)?);
    let wait = operation(
        MemoryOperationKind::Wait32,
        condition::EQ,
        half(&host, GATE),
        3,
    );
    submit(device, held, &[wait, write(half(&host, MARK), 1)])?;
    submit(device, free, &[write(half(&host, MARK + 1), 2)])?;
    worked("synchronize", device.synchronize_stream(free))?;
    same(
        "what the free stream wrote",
        host.half_word(MARK + 1).load(Ordering::Acquire),
        2,
    )?;
    same(
        "the held stream's readiness",
        device.query_stream(held),
        Ok(false),
    )?;
    host.half_word(GATE).store(2, Ordering::Release);
    same(
        "the held stream's readiness after another value",
        device.query_stream(held),
        Ok(false),
    )?;
    same("its mark", host.half_word(MARK).load(Ordering::Acquire), 0)?;
    host.half_word(GATE).store(3, Ordering::Release);
    worked("synchronize", device.synchronize_stream(held))?;
    same("its mark", host.half_word(MARK).load(Ordering::Acquire), 1)
}

fn conditions(device: &dyn Device) -> Outcome {
    use MemoryOperationKind::{Wait32, Wait64};
    // Kind, condition, value, a word that keeps the stream waiting and one that ends the wait.
    let cases = [
        (Wait32, condition::GEQ, 5, 4, 6),
        (Wait32, condition::EQ, 5, 6, 5),
        (Wait32, condition::AND, 6, 9, 2),
        (Wait32, condition::NOR, 0xFFFF_FFF0, 15, 7),
        (Wait64, condition::GEQ, 1 << 40, (1 << 40) - 1, 1 << 41),
        (Wait64, condition::EQ, 1 << 40, 0, 1 << 40),
        (Wait64, condition::AND, 1 << 40, 1 << 39, 3 << 40),
        (Wait64, condition::NOR, !(1 << 40), 1 << 40, 0),
    ];
    let host = HostMemory::new(device, 1)?;
    let stream = new_stream(device)?;
    for (case, (kind, flags, value, holding, letting)) in (1..).zip(cases) {
        host.word(0).store(holding, Ordering::Release);
        let wait = operation(kind, flags, host.address(0), value);
        submit(device, stream, &[wait, write(half(&host, MARK), case)])?;
        // A device that did not wait would have written before the other stream completes.
        let other = new_stream(device)?;
        submit(device, other, &[write(half(&host, MARK + 1), case)])?;
        worked("synchronize", device.synchronize_stream(other))?;
        let what = format!("{kind:?} with condition {flags} while it holds");
        same(&what, device.query_stream(stream), Ok(false))?;
        host.word(0).store(letting, Ordering::Release);
        eventually(&format!("{kind:?} with condition {flags} lets go"), || {
            device.query_stream(stream) == Ok(true)
        })?;
        same(
            "the mark behind it",
            u64::from(host.half_word(MARK).load(Ordering::Acquire)),
            case,
        )?;
    }
    Ok(())
}

fn writes(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let (wait_for, stream) = (kernel(device, "wait_for")?, new_stream(device)?);
    // A kernel's first launch may wait for the device, so its gate is open.
    host.word(0).store(1, Ordering::Release);
    let gate = [host.address(0)];
    worked(
        "launch",
        launch(device, stream, &wait_for, ONE_THREAD, &gate),
    )?;
    worked("synchronize", device.synchronize_stream(stream))?;
    host.word(0).store(0, Ordering::Release);
    worked(
        "launch",
        launch(device, stream, &wait_for, ONE_THREAD, &gate),
    )?;
    let wide = operation(
        MemoryOperationKind::Write64,
        0,
        host.address(MARK * 4),
        0x1234_5678_9ABC,
    );
    submit(
        device,
        stream,
        &[
            wide,
            operation(MemoryOperationKind::Barrier, 0, 0, 0),
            operation(
                MemoryOperationKind::Write32,
                0,
                half(&host, MARK + 2),
                u64::MAX,
            ),
        ],
    )?;
    same(
        "the word while the kernel runs",
        host.word(MARK / 2).load(Ordering::Acquire),
        0,
    )?;
    host.word(0).store(1, Ordering::Release);
    worked("synchronize", device.synchronize_stream(stream))?;
    same(
        "the word",
        host.word(MARK / 2).load(Ordering::Acquire),
        0x1234_5678_9ABC,
    )?;
    same(
        "32 bits that were written, and those beside them",
        host.word(MARK / 2 + 1).load(Ordering::Acquire),
        u64::from(u32::MAX),
    )
}

fn between_streams(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let word = worked("allocate", device.mem_alloc(256))?;
    let (held, other) = (new_stream(device)?, new_stream(device)?);
    submit(device, other, &[write(word, 0)])?;
    worked("synchronize", device.synchronize_stream(other))?;
    let wait = operation(MemoryOperationKind::Wait32, condition::GEQ, word, 1);
    submit(device, held, &[wait, write(half(&host, MARK), 9)])?;
    same("readiness", device.query_stream(held), Ok(false))?;
    submit(device, other, &[write(word, 1)])?;
    worked("synchronize", device.synchronize_stream(held))?;
    same("the mark", host.half_word(MARK).load(Ordering::Acquire), 9)
}

fn batch(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let stream = new_stream(device)?;
    let operations: Vec<_> = (0..128)
        .map(|value| write(half(&host, MARK), value))
        .collect();
    submit(device, stream, &operations)?;
    worked("synchronize", device.synchronize_stream(stream))?;
    same(
        "the last of many writes",
        host.half_word(MARK).load(Ordering::Acquire),
        127,
    )
}

fn attributes(device: &dyn Device) -> Outcome {
    const YIELD: u8 = 3;
    let stream = new_stream(device)?;
    let mut value = [0; 64];
    value[0] = YIELD;
    worked(
        "a synchronization policy",
        device.set_stream_attribute(stream, &LaunchAttribute::new(SYNCHRONIZATION_POLICY, value)),
    )?;
    let refused = device.set_stream_attribute(stream, &LaunchAttribute::new(COOPERATIVE, value));
    holds(
        "an attribute of launches is refused",
        refused == Err(CuError::INVALID_VALUE),
    )
}
