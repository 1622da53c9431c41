//! Descriptions of the devices, encoded for the guest.

use wormhole_api::{
    Attribute, CuResult, DeviceDescribe, DeviceDescribeReply, Items, Outcome, Serve, Served,
};
use wormhole_device::Description;

use super::{Call, Session};

/// Description of a device, encoded for an answer.
#[derive(Debug)]
pub(super) struct Described {
    reply: DeviceDescribeReply<'static>,
    name: Vec<u8>,
    attributes: Vec<Attribute>,
}

impl Described {
    pub fn new(description: &Description) -> Self {
        let mut name = description.name.clone().into_bytes();
        name.truncate(255);
        Self {
            reply: DeviceDescribeReply {
                devices: 1,
                driver_version: description.driver_version,
                total_memory: description.total_memory,
                uuid: description.uuid,
                least_priority: description.stream_priorities.0,
                greatest_priority: description.stream_priorities.1,
                name: &[],
                attributes: Items::new(&[]),
            },
            name,
            attributes: description
                .attributes
                .iter()
                .take(256)
                .map(|&(id, value)| Attribute { id, value })
                .collect(),
        }
    }

    pub fn total_memory(&self) -> u64 {
        self.reply.total_memory
    }
}

impl Serve<DeviceDescribe> for Session {
    fn serve<'s>(
        &'s mut self,
        _: &Call,
        message: &DeviceDescribe,
    ) -> Outcome<DeviceDescribeReply<'s>> {
        let devices = u32::try_from(self.descriptions.len()).unwrap_or(u32::MAX);
        let found = usize::try_from(message.ordinal);
        let Some(found) = found.ok().and_then(|at| self.descriptions.get(at)) else {
            return Err(CuResult::INVALID_DEVICE);
        };
        Ok(Served::Done(DeviceDescribeReply {
            devices,
            name: &found.name,
            attributes: Items::new(&found.attributes),
            ..found.reply
        }))
    }
}
