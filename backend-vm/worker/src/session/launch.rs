//! Kernel launches and what is asked of kernels.

use std::sync::Arc;

use wormhole_api::{CuResult, LaunchKernel, Outcome, Serve, Served};
use wormhole_device::{Device, Launch, LaunchAttribute};

use super::attributes::{Events, Scope};
use super::{Answer, Call, Session};

/// A launch whose like the device has accepted is a record and is made at once. Another one is a request:
/// it may load the kernel, so it is a job.
impl Serve<LaunchKernel<'_>> for Session {
    fn serve(&mut self, call: &Call, message: &LaunchKernel<'_>) -> Outcome<()> {
        let mut attributes = std::mem::take(&mut self.attributes);
        let read = self.admit_attributes(Scope::Launch, &message.attributes, &mut attributes);
        let outcome = match read {
            Err(error) => Err(error),
            Ok(events) if call.slot.is_some() => {
                self.launch_first(call, message, &attributes, events)
            }
            Ok(events) => self
                .launch_now(message, &attributes, &events)
                .map(Served::Done),
        };
        self.attributes = attributes;
        outcome
    }
}

impl Session {
    fn launch_now(
        &self,
        message: &LaunchKernel<'_>,
        attributes: &[LaunchAttribute],
        events: &Events,
    ) -> Result<(), CuResult> {
        let stream = self.stream(message.stream)?.raw;
        let function = self.function(message.function)?;
        enough(message, function.parameter_bytes)?;
        self.done(self.device.launch(&Launch {
            function: function.raw,
            stream,
            grid: message.grid,
            block: message.block,
            shared: message.shared,
            attributes,
            events: events.raw(),
            parameters: message.parameters,
        }))
    }

    fn launch_first(
        &mut self,
        call: &Call,
        message: &LaunchKernel<'_>,
        attributes: &[LaunchAttribute],
        events: Events,
    ) -> Outcome<()> {
        let stream = Arc::clone(self.stream(message.stream)?);
        let needed = self.function(message.function)?.parameter_bytes;
        enough(message, needed)?;
        let (grid, block, shared) = (message.grid, message.block, message.shared);
        let (attributes, parameters) = (attributes.to_vec(), message.parameters.to_vec());
        let launch = move |device: &dyn Device, function| {
            device.launch(&Launch {
                function,
                stream: stream.raw,
                grid,
                block,
                shared,
                attributes: &attributes,
                events: events.raw(),
                parameters: &parameters,
            })
        };
        self.ask_function(call, message.function, launch, |()| Answer::done())
    }
}

/// The driver reads by the kernel's own layout, so a shorter buffer would be read past its end.
fn enough(message: &LaunchKernel<'_>, needed: u64) -> Result<(), CuResult> {
    if (message.parameters.len() as u64) < needed {
        Err(CuResult::INVALID_VALUE)
    } else {
        Ok(())
    }
}
