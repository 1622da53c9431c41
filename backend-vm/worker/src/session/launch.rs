//! Kernel launches: admission and execution.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use wormhole_api::{CuResult, Function, Handle, Items, LaunchKernel, Outcome, Serve, Served};
use wormhole_device::{Device, Launch, LaunchAttribute};

use super::attributes::{Events, Scope};
use super::{Answer, Call, Session};
use crate::objects::FunctionObject;

/// A launch of a kind that the device has accepted before is a record, and runs on the executor, alone or in a chain, or
/// in a lane. Any other is a request: the driver may load the kernel, so it is a job.
impl Serve<LaunchKernel<'_>> for Session {
    fn serve(&mut self, call: &Call, message: &LaunchKernel<'_>) -> Outcome<()> {
        let mut attributes = std::mem::take(&mut self.scratch.attributes);
        let outcome = self.launch(call, message, &mut attributes);
        self.scratch.attributes = attributes;
        outcome
    }
}

impl Session {
    /// Admits the launch of a kernel, now or by a graph: the kernel and the events are the
    /// session's, `scope` admits each attribute, and there are at least as many parameter bytes as
    /// the kernel has. Translates the attributes for the device into `attributes`.
    pub(super) fn admit_launch(
        &self,
        scope: Scope,
        function: Handle<Function>,
        given: &Items<'_, LaunchAttribute>,
        parameters: &[u8],
        attributes: &mut Vec<LaunchAttribute>,
    ) -> Result<(&FunctionObject, Events), CuResult> {
        let events = self.admit_attributes(scope, given, attributes)?;
        let function = self.objects.functions.get(function)?;
        // The driver reads by the kernel's own layout, so it would read past the end of a shorter
        // buffer.
        if (parameters.len() as u64) < function.parameter_bytes {
            return Err(CuResult::INVALID_VALUE);
        }
        Ok((function, events))
    }

    fn launch(
        &mut self,
        call: &Call,
        message: &LaunchKernel<'_>,
        attributes: &mut Vec<LaunchAttribute>,
    ) -> Outcome<()> {
        let (given, parameters) = (&message.attributes, message.parameters);
        let (function, held) = self.admit_launch(
            Scope::Launch,
            message.function,
            given,
            parameters,
            attributes,
        )?;
        let clustered = function.clustered.load(Ordering::Relaxed);
        let stream = self.objects.stream(call, message.stream)?;
        let device = &stream.device;
        let raw = device.own(&function.image.device, function.raw);
        let (raw, events) = self.done(raw.and_then(|raw| Ok((raw, held.on(device)?))))?;
        let (grid, block, shared) = (message.grid, message.block, message.shared);
        if call.slot.is_none() {
            let launch = Launch {
                function: raw,
                stream: stream.raw,
                grid,
                block,
                shared,
                attributes,
                events,
                parameters,
            };
            let laned = self.lanes.want(stream, call.thread, &launch);
            let place = match clustered {
                true => None,
                false => self.chains.place(stream, call.more, &launch),
            };
            if let Some(place) = place {
                let quiet = self.is_quiet();
                self.lanes.settle(stream, call.thread);
                let collected = self.chains.collect(place, stream, call, quiet, &launch);
                return self.done(collected).map(Served::Done);
            }
            let flushed = self.chains.flush_before(stream, call.thread);
            self.done(flushed)?;
            if laned && self.lanes.launch(stream, call.thread, &launch) {
                return Ok(Served::Done(()));
            }
            self.lanes.settle(stream, call.thread);
            let began = self.chains.begin_single();
            let launched = device.launch(&launch);
            self.chains.end_single(began);
            return self.done(launched).map(Served::Done);
        }
        let stream = Arc::clone(stream);
        let (attributes, parameters) = (attributes.clone(), parameters.to_vec());
        let launch = move |device: &dyn Device, function| {
            // The guest may destroy the events meanwhile.
            let _held = held;
            device.launch(&Launch {
                function,
                stream: stream.raw,
                grid,
                block,
                shared,
                attributes: &attributes,
                events,
                parameters: &parameters,
            })
        };
        self.ask_function(call, message.function, launch, |_, ()| Answer::done())
    }
}
