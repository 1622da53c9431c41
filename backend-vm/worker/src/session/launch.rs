//! Kernel launches and what is asked of kernels.

use std::sync::Arc;

use wormhole_api::{
    CuResult, Handle, Items, LaunchAttribute as GivenAttribute, LaunchKernel, Outcome,
};
use wormhole_device::{CuError, Device, Launch, LaunchAttribute, LaunchEvents};

use super::{Answer, Call, Session, to_result};
use crate::objects::EventObject;

/// Launch attributes whose value is plain numbers (`CUlaunchAttributeID`): access policy window, cooperative,
/// synchronization policy, cluster dimension and its scheduling, programmatic stream serialization, priority,
/// memory synchronization domain map and domain, preferred cluster dimension, preferred shared memory
/// carveout, NVLink utilization. What is left out carries handles, which a driver would believe.
const PLAIN: &[u32] = &[1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 14, 16];
/// No attribute (`CU_LAUNCH_ATTRIBUTE_IGNORE`).
const IGNORE: u32 = 0;
/// Attributes of launches alone whose value is an event's handle, flags, and whether the beginning of blocks triggers
/// it (`CUlaunchAttributeValue::programmaticEvent`).
const PROGRAMMATIC_EVENT: u32 = 7;
const LAUNCH_COMPLETION_EVENT: u32 = 12;

impl Session {
    /// A launch whose like the device has accepted is a record and is made at once. Another one is a request:
    /// it may load the kernel, so it is a job.
    pub(super) fn launch(&mut self, call: &Call, message: &LaunchKernel<'_>) -> Outcome<()> {
        let mut attributes = std::mem::take(&mut self.attributes);
        let read = self.read_with_events(&message.attributes, &mut attributes);
        let outcome = match read {
            Err(error) => Outcome::Failed(error),
            Ok(events) if call.slot.is_some() => {
                self.launch_first(call, message, &attributes, events)
            }
            Ok(events) => self.launch_now(message, &attributes, &events).into(),
        };
        self.attributes = attributes;
        outcome
    }

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
                events: events.raw(),
                parameters: &parameters,
            })
        };
        self.ask_function(call, message.function, launch, |()| Answer::done())
    }

    /// The attributes that a device is to know of, and the events that a launch is to record.
    fn read_with_events(
        &self,
        given: &Items<'_, GivenAttribute>,
        attributes: &mut Vec<LaunchAttribute>,
    ) -> Result<Events, CuResult> {
        attributes.clear();
        let mut events = Events::default();
        for attribute in given.iter() {
            match attribute.id {
                PROGRAMMATIC_EVENT => {
                    events.programmatic = Some(self.event_of_launch(&attribute.value)?);
                    events.at_block_start = attribute.value[12..16] != [0; 4];
                }
                LAUNCH_COMPLETION_EVENT => {
                    events.begun = Some(self.event_of_launch(&attribute.value)?);
                }
                _ => read_attribute(&attribute, attributes)?,
            }
        }
        Ok(events)
    }

    /// The event whose handle an attribute's value begins with.
    fn event_of_launch(&self, value: &[u8; 64]) -> Result<Arc<EventObject>, CuResult> {
        let [handle, ..] = value.as_chunks::<8>().0 else {
            return Err(self.invalid_handle());
        };
        let handle = Handle::from_wire(u64::from_le_bytes(*handle));
        let event = self.event(handle.ok_or_else(|| self.invalid_handle())?)?;
        if !event.of_launches {
            return Err(to_result(CuError::NOT_SUPPORTED));
        }
        Ok(Arc::clone(event))
    }
}

/// Events that a launch records.
#[derive(Default)]
struct Events {
    programmatic: Option<Arc<EventObject>>,
    at_block_start: bool,
    begun: Option<Arc<EventObject>>,
}

impl Events {
    fn raw(&self) -> LaunchEvents {
        let raw = |event: &Option<Arc<EventObject>>| event.as_ref().map(|event| event.raw);
        LaunchEvents {
            programmatic: raw(&self.programmatic),
            at_block_start: self.at_block_start,
            begun: raw(&self.begun),
        }
    }
}

/// The attributes that a device is to know of, of what records no events.
pub(super) fn read_attributes(
    given: &Items<'_, GivenAttribute>,
    attributes: &mut Vec<LaunchAttribute>,
) -> Result<(), CuResult> {
    attributes.clear();
    let mut all = given.iter();
    all.try_for_each(|attribute| read_attribute(&attribute, attributes))
}

fn read_attribute(
    attribute: &GivenAttribute,
    attributes: &mut Vec<LaunchAttribute>,
) -> Result<(), CuResult> {
    match attribute.id {
        IGNORE => {}
        id if PLAIN.contains(&id) => attributes.push(LaunchAttribute::new(id, attribute.value)),
        _ => return Err(to_result(CuError::NOT_SUPPORTED)),
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
