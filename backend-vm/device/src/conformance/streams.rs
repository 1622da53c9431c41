//! Streams, events and fences.

use std::sync::atomic::Ordering;

use wormhole_api::constants::event_flags::DISABLE_TIMING;

use super::{
    Check, HostMemory, NON_BLOCKING, ONE_THREAD, Outcome, PAGE, Shape, eventually, holds, kernel,
    launch, same, worked,
};
use crate::{CuError, Device, LoadedFunction, RawStream};

pub const CHECKS: &[Check] = &[
    Check {
        name: "a stream's work runs in order",
        run: order,
    },
    Check {
        name: "two streams run at the same time",
        run: overlap,
    },
    Check {
        name: "the legacy stream orders with blocking streams both ways",
        run: legacy,
    },
    Check {
        name: "the legacy stream does not hold non-blocking streams",
        run: non_blocking,
    },
    Check {
        name: "a stream waits for an event of another",
        run: wait_event,
    },
    Check {
        name: "an event is complete when what is before it is",
        run: event_completion,
    },
    Check {
        name: "events measure the time between them",
        run: event_times,
    },
    Check {
        name: "a fence is written after the work before it",
        run: fence,
    },
    Check {
        name: "work of a destroyed stream still runs",
        run: destroyed_stream,
    },
    Check {
        name: "synchronizing the context waits for every stream",
        run: synchronize_all,
    },
];

const LEGACY: RawStream = RawStream::LEGACY;

/// Word that kernels of delayed streams wait for.
pub(super) struct Gate<'a> {
    device: &'a dyn Device,
    host: HostMemory<'a>,
    wait_for: LoadedFunction,
    store: LoadedFunction,
}

impl<'a> Gate<'a> {
    pub(super) fn new(device: &'a dyn Device) -> Result<Self, String> {
        let gate = Self {
            device,
            host: HostMemory::new(device, 1)?,
            wait_for: kernel(device, "wait_for")?,
            store: kernel(device, "store")?,
        };
        // The first launch is with the gate open: it may wait for the device (CUDA programming guide, "Lazy Loading").
        gate.open();
        gate.hold(LEGACY)?;
        gate.store(LEGACY, 7, 1)?;
        worked("synchronize", device.synchronize())?;
        gate.host.word(0).store(0, Ordering::Release);
        Ok(gate)
    }

    /// Delays later work of the stream until the gate is opened.
    pub(super) fn hold(&self, stream: RawStream) -> Outcome {
        let word = [self.host.address(0)];
        worked(
            "hold",
            launch(self.device, stream, &self.wait_for, ONE_THREAD, &word),
        )
    }

    pub(super) fn open(&self) {
        self.host.word(0).store(1, Ordering::Release);
    }

    /// Writes `value` to 32-bit word `index`, which must not be one of the gate's own two.
    pub(super) fn store(&self, stream: RawStream, index: usize, value: u64) -> Outcome {
        let values = [self.address(index), value];
        worked(
            "store",
            launch(self.device, stream, &self.store, ONE_THREAD, &values),
        )
    }

    /// Returns the address of 32-bit word `index`.
    pub(super) fn address(&self, index: usize) -> u64 {
        self.host.address(index * 4)
    }

    pub(super) fn value(&self, index: usize) -> u32 {
        self.host.half_word(index).load(Ordering::Acquire)
    }

    pub(super) fn stream(&self, flags: u32) -> Result<RawStream, String> {
        worked("stream", self.device.stream_create(flags, 0))
    }

    fn busy(&self, stream: RawStream) -> Outcome {
        same(
            "the stream is idle",
            worked("query", self.device.query_stream(stream))?,
            false,
        )
    }
}

impl Drop for Gate<'_> {
    fn drop(&mut self) {
        self.open();
        // A check that failed half way must not leave kernels that access freed memory.
        let _ = self.device.synchronize();
    }
}

fn order(device: &dyn Device) -> Outcome {
    const ELEMENTS: usize = 256;
    let host = HostMemory::new(device, 1)?;
    let add_one = kernel(device, "add_one")?;
    let stream = worked("stream", device.stream_create(NON_BLOCKING, -1))?;
    let bytes = 4 * ELEMENTS as u64;
    let (from, to) = (
        worked("allocate", device.mem_alloc(bytes))?,
        worked("allocate", device.mem_alloc(bytes))?,
    );
    worked("write", device.write(from, &[0; 4 * ELEMENTS], stream))?;
    let shape = Shape {
        grid: 4,
        block: 64,
        ..ONE_THREAD
    };
    for _ in 0..100 {
        worked("launch", launch(device, stream, &add_one, shape, &[from]))?;
        worked("copy", device.mem_copy(to, from, bytes, stream))?;
        worked("launch", launch(device, stream, &add_one, shape, &[to]))?;
        worked("copy", device.mem_copy(from, to, bytes, stream))?;
    }
    worked(
        "copy",
        device.mem_copy(host.address(0), from, bytes, stream),
    )?;
    worked("synchronize", device.synchronize_stream(stream))?;
    holds(
        "the stream is idle",
        worked("query", device.query_stream(stream))?,
    )?;
    (0..ELEMENTS).try_for_each(|index| {
        same(
            "an element",
            host.half_word(index).load(Ordering::Acquire),
            200,
        )
    })
}

fn overlap(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let meet = kernel(device, "meet")?;
    let streams = [
        worked("stream", device.stream_create(NON_BLOCKING, 0))?,
        worked("stream", device.stream_create(0, 0))?,
    ];
    let places = [host.address(0), host.address(64)];
    worked(
        "launch",
        launch(
            device,
            streams[0],
            &meet,
            ONE_THREAD,
            &[places[0], places[1]],
        ),
    )?;
    worked(
        "launch",
        launch(
            device,
            streams[1],
            &meet,
            ONE_THREAD,
            &[places[1], places[0]],
        ),
    )?;
    eventually("both kernels met", || {
        streams
            .iter()
            .all(|stream| device.query_stream(*stream) == Ok(true))
    })
}

fn legacy(device: &dyn Device) -> Outcome {
    let gate = Gate::new(device)?;
    let (first, second) = (gate.stream(0)?, gate.stream(0)?);
    gate.hold(first)?;
    gate.store(LEGACY, 4, 1)?;
    gate.store(second, 5, 1)?;
    gate.busy(LEGACY)?;
    gate.busy(second)?;
    same("the legacy stream ran ahead", gate.value(4), 0)?;
    same("the second stream ran ahead", gate.value(5), 0)?;
    gate.open();
    worked("synchronize", device.synchronize_stream(LEGACY))?;
    same("the legacy stream's work", gate.value(4), 1)?;
    worked("synchronize", device.synchronize_stream(second))?;
    same("the second stream's work", gate.value(5), 1)
}

fn non_blocking(device: &dyn Device) -> Outcome {
    let gate = Gate::new(device)?;
    let (held, free) = (gate.stream(0)?, gate.stream(NON_BLOCKING)?);
    gate.hold(held)?;
    gate.store(LEGACY, 4, 1)?;
    gate.store(free, 5, 1)?;
    worked("synchronize", device.synchronize_stream(free))?;
    same("the non-blocking stream's work", gate.value(5), 1)?;
    same("the legacy stream ran ahead", gate.value(4), 0)?;
    gate.open();
    worked("synchronize", device.synchronize())?;
    same("the legacy stream's work", gate.value(4), 1)
}

fn wait_event(device: &dyn Device) -> Outcome {
    let gate = Gate::new(device)?;
    let (first, second) = (gate.stream(NON_BLOCKING)?, gate.stream(NON_BLOCKING)?);
    let event = worked("event", device.create_event(DISABLE_TIMING))?;
    gate.hold(first)?;
    worked("record", device.record_event(event, first, 0))?;
    worked("wait", device.wait_event(second, event, 0))?;
    worked("destroy", device.destroy_event(event))?;
    gate.store(second, 4, 1)?;
    gate.busy(second)?;
    same("the waiting stream ran ahead", gate.value(4), 0)?;
    gate.open();
    worked("synchronize", device.synchronize_stream(second))?;
    same("the waiting stream's work", gate.value(4), 1)
}

fn event_completion(device: &dyn Device) -> Outcome {
    let gate = Gate::new(device)?;
    let stream = gate.stream(NON_BLOCKING)?;
    let event = worked("event", device.create_event(0))?;
    holds(
        "an event never recorded is complete",
        worked("query", device.query_event(event))?,
    )?;
    worked("synchronize", device.synchronize_event(event))?;
    gate.hold(stream)?;
    worked("record", device.record_event(event, stream, 0))?;
    same(
        "a pending event is complete",
        worked("query", device.query_event(event))?,
        false,
    )?;
    same(
        "its time",
        device.event_elapsed(event, event),
        Err(CuError::NOT_READY),
    )?;
    gate.open();
    worked("synchronize", device.synchronize_event(event))?;
    holds(
        "it is complete",
        worked("query", device.query_event(event))?,
    )?;
    same(
        "wrong flags",
        device.create_event(0x100).err(),
        Some(CuError::INVALID_VALUE),
    )
}

fn event_times(device: &dyn Device) -> Outcome {
    let gate = Gate::new(device)?;
    let stream = gate.stream(NON_BLOCKING)?;
    let create = |flags| worked("event", device.create_event(flags));
    let (start, end, untimed, unused) =
        (create(0)?, create(0)?, create(DISABLE_TIMING)?, create(0)?);
    let record = |event| worked("record", device.record_event(event, stream, 0));
    let begin = std::time::Instant::now();
    record(start)?;
    worked("synchronize", device.synchronize_event(start))?;
    let before = std::time::Instant::now();
    gate.hold(stream)?;
    record(end)?;
    record(untimed)?;
    eventually("time passed", || before.elapsed().as_millis() >= 5)?;
    gate.open();
    worked("synchronize", device.synchronize_stream(stream))?;
    let outer = begin.elapsed().as_secs_f32() * 1e3;
    let measured = worked("elapsed", device.event_elapsed(start, end))?;
    holds(&format!("{measured} ms is at least 5 ms"), measured >= 5.0)?;
    holds(
        &format!("{measured} ms is about {outer} ms or less"),
        measured < outer + 50.0,
    )?;
    let backwards = worked("elapsed", device.event_elapsed(end, start))?;
    holds(
        &format!("backwards {backwards} ms is negative"),
        backwards <= -5.0,
    )?;
    same(
        "without timing",
        device.event_elapsed(start, untimed),
        Err(CuError::INVALID_HANDLE),
    )?;
    same(
        "never recorded",
        device.event_elapsed(start, unused),
        Err(CuError::INVALID_HANDLE),
    )
}

fn fence(device: &dyn Device) -> Outcome {
    let gate = Gate::new(device)?;
    let stream = gate.stream(NON_BLOCKING)?;
    let fence = 8;
    gate.hold(stream)?;
    gate.store(stream, 4, 77)?;
    let address = gate.host.address(fence * 8);
    let value = 0x1234_5678_9abc_def0;
    worked("fence", device.write_fence(stream, address, value))?;
    same(
        "the fence ran ahead",
        gate.host.word(fence).load(Ordering::Acquire),
        0,
    )?;
    gate.open();
    eventually("the fence is written", || {
        gate.host.word(fence).load(Ordering::Acquire) == value
    })?;
    same("the work before the fence", gate.value(4), 77)
}

fn destroyed_stream(device: &dyn Device) -> Outcome {
    let gate = Gate::new(device)?;
    let stream = gate.stream(NON_BLOCKING)?;
    gate.hold(stream)?;
    gate.store(stream, 4, 9)?;
    worked("destroy", device.destroy_stream(stream))?;
    same("the store ran ahead", gate.value(4), 0)?;
    gate.open();
    eventually("its work ran", || gate.value(4) == 9)
}

fn synchronize_all(device: &dyn Device) -> Outcome {
    let gate = Gate::new(device)?;
    let streams = [gate.stream(NON_BLOCKING)?, gate.stream(0)?, LEGACY];
    let source = worked("allocate", device.mem_alloc(PAGE as u64))?;
    worked("write", device.write(source, &3_u32.to_le_bytes(), LEGACY))?;
    worked("synchronize", device.synchronize_stream(LEGACY))?;
    for (index, stream) in streams.into_iter().enumerate() {
        gate.hold(stream)?;
        let to = gate.host.address(16 + 4 * index);
        worked("copy", device.mem_copy(to, source, 4, stream))?;
    }
    gate.open();
    worked("synchronize", device.synchronize())?;
    (4..7).try_for_each(|index| same("copied", gate.value(index), 3))
}
