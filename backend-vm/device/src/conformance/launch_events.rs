//! Events that kernel launches record.

use wormhole_api::constants::event_flags::{DISABLE_TIMING, INTERPROCESS};

use super::streams::Gate;
use super::{
    Check, NON_BLOCKING, Outcome, eventually, function, holds, kernels, load, same, worked,
};
use crate::{CuError, Device, Launch, LaunchEvents, LoadedFunction, RawEvent, RawStream};

pub const CHECKS: &[Check] = &[
    Check {
        name: "the events of a launch are complete when its blocks have begun and ended, and not before",
        run: completion,
    },
    Check {
        name: "a stream waits for the events of a launch",
        run: waits,
    },
    Check {
        name: "an event stands for its last record, by a launch or not",
        run: last_record,
    },
    Check {
        name: "events that keep time or are shared are recorded by no launch",
        run: refused,
    },
];

/// Kernel that triggers its dependents' launch and then writes, behind a gate, with the events of its launches.
struct Recorder<'a> {
    device: &'a dyn Device,
    gate: Gate<'a>,
    kernel: LoadedFunction,
    events: [RawEvent; 2],
    held: RawStream,
}

impl<'a> Recorder<'a> {
    fn new(device: &'a dyn Device) -> Result<Self, String> {
        let event = || worked("event", device.create_event(DISABLE_TIMING));
        let gate = Gate::new(device)?;
        let module = load(device, kernels::TRIGGERING)?;
        let recorder = Self {
            device,
            kernel: function(device, &module, "trigger")?,
            events: [event()?, event()?],
            held: gate.stream(NON_BLOCKING)?,
            gate,
        };
        // A kernel's first launch may wait for the device.
        worked("launch", recorder.launch(LaunchEvents::default(), 3))?;
        worked("synchronize", device.synchronize())?;
        Ok(recorder)
    }

    /// Launches the kernel, which stores 1 in 32-bit word `index`.
    fn launch(&self, events: LaunchEvents, index: usize) -> crate::Result<()> {
        let address = self.gate.address(index);
        self.device.launch(&Launch {
            function: self.kernel.function,
            stream: self.held,
            grid: [4, 1, 1],
            block: [64, 1, 1],
            shared: 0,
            attributes: &[],
            events,
            parameters: &address.to_le_bytes(),
        })
    }

    fn both(&self, at_block_start: bool) -> LaunchEvents {
        LaunchEvents {
            programmatic: Some(self.events[0]),
            at_block_start,
            begun: Some(self.events[1]),
        }
    }

    fn complete(&self) -> Result<[bool; 2], String> {
        let [first, second] = self.events.map(|event| self.device.query_event(event));
        Ok([worked("query", first)?, worked("query", second)?])
    }
}

fn completion(device: &dyn Device) -> Outcome {
    for at_block_start in [false, true] {
        let recorder = Recorder::new(device)?;
        same("never recorded", recorder.complete()?, [true; 2])?;
        recorder.gate.hold(recorder.held)?;
        worked("launch", recorder.launch(recorder.both(at_block_start), 4))?;
        same("behind the gate", recorder.complete()?, [false; 2])?;
        recorder.gate.open();
        for event in recorder.events {
            worked("synchronize", device.synchronize_event(event))?;
        }
        same("synchronized", recorder.complete()?, [true; 2])?;
        worked("synchronize", device.synchronize_stream(recorder.held))?;
        same("what the kernel stored", recorder.gate.value(4), 1)?;
    }
    Ok(())
}

fn waits(device: &dyn Device) -> Outcome {
    let recorder = Recorder::new(device)?;
    let gate = &recorder.gate;
    let streams = [gate.stream(NON_BLOCKING)?, gate.stream(NON_BLOCKING)?];
    gate.hold(recorder.held)?;
    worked("launch", recorder.launch(recorder.both(false), 4))?;
    for (index, (stream, event)) in (5..).zip(streams.into_iter().zip(recorder.events)) {
        worked("wait", device.wait_event(stream, event, 0))?;
        gate.store(stream, index, 1)?;
    }
    // A stream that does not wait completes; one that waits does not.
    let free = gate.stream(NON_BLOCKING)?;
    gate.store(free, 7, 9)?;
    worked("synchronize", device.synchronize_stream(free))?;
    same("behind the events", [gate.value(5), gate.value(6)], [0; 2])?;
    gate.open();
    for stream in streams {
        worked("synchronize", device.synchronize_stream(stream))?;
    }
    same("behind the launch", [gate.value(5), gate.value(6)], [1; 2])
}

fn last_record(device: &dyn Device) -> Outcome {
    let recorder = Recorder::new(device)?;
    let gate = &recorder.gate;
    let free = gate.stream(NON_BLOCKING)?;
    gate.hold(recorder.held)?;
    worked("launch", recorder.launch(recorder.both(false), 4))?;
    let [first, second] = recorder.events;
    worked("record", device.record_event(first, free, 0))?;
    eventually("the event of an idle stream is complete", || {
        device.query_event(first) == Ok(true)
    })?;
    same("the other", device.query_event(second), Ok(false))?;
    let alone = LaunchEvents {
        programmatic: Some(first),
        ..LaunchEvents::default()
    };
    worked("launch", recorder.launch(alone, 4))?;
    same("recorded again", device.query_event(first), Ok(false))?;
    worked("record", device.record_event(second, free, 0))?;
    worked("synchronize", device.synchronize_event(second))?;
    gate.open();
    worked("synchronize", device.synchronize_event(first))
}

fn refused(device: &dyn Device) -> Outcome {
    let recorder = Recorder::new(device)?;
    for flags in [0, DISABLE_TIMING | INTERPROCESS] {
        let event = worked("event", device.create_event(flags))?;
        let one = Some(event);
        let none = LaunchEvents::default();
        for events in [
            LaunchEvents {
                programmatic: one,
                ..none
            },
            LaunchEvents { begun: one, ..none },
        ] {
            let result = recorder.launch(events, 4);
            same(
                &format!("flags {flags}, {events:?}"),
                result,
                Err(CuError::NOT_SUPPORTED),
            )?;
        }
        worked("destroy", device.destroy_event(event))?;
    }
    worked("synchronize", device.synchronize())?;
    holds("nothing ran", recorder.gate.value(4) == 0)
}
