//! Kernel launches and what is asked of kernels.

use std::sync::Arc;

use wormhole_api::{CuResult, Items, LaunchAttribute as GivenAttribute, LaunchKernel, Outcome};
use wormhole_device::{CuError, Device, Launch, LaunchAttribute};

use super::{Answer, Call, Session, to_result};

/// Launch attributes whose value is plain numbers (`CUlaunchAttributeID`): access policy window, cooperative,
/// synchronization policy, cluster dimension and its scheduling, programmatic stream serialization, priority,
/// memory synchronization domain map and domain, preferred cluster dimension, preferred shared memory
/// carveout, NVLink utilization. What is left out carries handles, which a driver would believe.
const PLAIN: &[u32] = &[1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 14, 16];
/// No attribute (`CU_LAUNCH_ATTRIBUTE_IGNORE`).
const IGNORE: u32 = 0;

impl Session {
    /// A launch whose like the device has accepted is a record and is made at once. Another one is a request:
    /// it may load the kernel, so it is a job.
    pub(super) fn launch(&mut self, call: &Call, message: &LaunchKernel<'_>) -> Outcome<()> {
        let mut attributes = std::mem::take(&mut self.attributes);
        let read = read_attributes(&message.attributes, &mut attributes);
        let outcome = match read {
            Err(error) => Outcome::Failed(error),
            Ok(()) if call.slot.is_some() => self.launch_first(call, message, &attributes),
            Ok(()) => self.launch_now(message, &attributes).into(),
        };
        self.attributes = attributes;
        outcome
    }

    fn launch_now(
        &self,
        message: &LaunchKernel<'_>,
        attributes: &[LaunchAttribute],
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
            parameters: message.parameters,
        }))
    }

    fn launch_first(
        &mut self,
        call: &Call,
        message: &LaunchKernel<'_>,
        attributes: &[LaunchAttribute],
    ) -> Outcome<()> {
        let stream = match self.stream(message.stream) {
            Ok(stream) => Arc::clone(stream),
            Err(error) => return Outcome::Failed(error),
        };
        let needed = match self.function(message.function) {
            Ok(function) => function.parameter_bytes,
            Err(error) => return Outcome::Failed(error),
        };
        if let Err(error) = enough(message, needed) {
            return Outcome::Failed(error);
        }
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
                parameters: &parameters,
            })
        };
        self.ask_function(call, message.function, launch, |()| Answer::done())
    }
}

/// The attributes that a device is to know of.
pub(super) fn read_attributes(
    given: &Items<'_, GivenAttribute>,
    attributes: &mut Vec<LaunchAttribute>,
) -> Result<(), CuResult> {
    attributes.clear();
    for attribute in given.iter() {
        if attribute.id == IGNORE {
            continue;
        }
        if !PLAIN.contains(&attribute.id) {
            return Err(to_result(CuError::NOT_SUPPORTED));
        }
        attributes.push(LaunchAttribute::new(attribute.id, attribute.value));
    }
    Ok(())
}

/// The driver reads by the kernel's own layout, so a shorter buffer would be read past its end.
fn enough(message: &LaunchKernel<'_>, needed: u64) -> Result<(), CuResult> {
    if (message.parameters.len() as u64) < needed {
        Err(CuResult::INVALID_VALUE)
    } else {
        Ok(())
    }
}
