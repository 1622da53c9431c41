//! Launch attributes that name events.

use wormhole_api::constants::launch_attribute::{LAUNCH_COMPLETION_EVENT, PROGRAMMATIC_EVENT};
use wormhole_device::{CuError, Launch, LaunchAttribute, RawEvent, Result};

use crate::shared_events;

/// Greatest number of attributes of a launch.
const MOST: usize = 24;

/// Attributes of a launch that records events, in the driver's form.
pub(crate) struct WithEvents {
    room: [LaunchAttribute; MOST],
    count: usize,
}

impl WithEvents {
    pub(crate) fn new(launch: &Launch<'_>) -> Result<Self> {
        let (plain, events) = (launch.attributes, &launch.events);
        // Attribute 0 is ignored (`CU_LAUNCH_ATTRIBUTE_IGNORE`).
        let mut all = Self {
            room: [LaunchAttribute::new(0, [0; 64]); MOST],
            count: 0,
        };
        let programmatic = events
            .programmatic
            .map(|event| attribute(PROGRAMMATIC_EVENT, event, events.at_block_start))
            .transpose()?;
        let begun = events
            .begun
            .map(|event| attribute(LAUNCH_COMPLETION_EVENT, event, false))
            .transpose()?;
        for attribute in plain.iter().copied().chain(programmatic).chain(begun) {
            *all.room.get_mut(all.count).ok_or(CuError::INVALID_VALUE)? = attribute;
            all.count += 1;
        }
        Ok(all)
    }

    /// Attributes of the launch itself, then its events.
    pub(crate) fn all(&self) -> &[LaunchAttribute] {
        &self.room[..self.count]
    }
}

/// Makes `programmaticEvent`: the event, no flags, and whether the start of blocks triggers it.
/// `launchCompletionEvent` begins with the same fields.
fn attribute(id: u32, raw: RawEvent, at_block_start: bool) -> Result<LaunchAttribute> {
    let mut value = [0; 64];
    let handle = shared_events::unshared(raw)?.expose_provenance() as u64;
    value[..8].copy_from_slice(&handle.to_le_bytes());
    value[12] = at_block_start.into();
    Ok(LaunchAttribute::new(id, value))
}

#[cfg(test)]
mod tests {
    use wormhole_device::{LaunchEvents, RawFunction, RawStream};

    use super::*;

    fn launch(attributes: &[LaunchAttribute], events: LaunchEvents) -> Launch<'_> {
        Launch {
            function: RawFunction(1),
            stream: RawStream::LEGACY,
            grid: [1; 3],
            block: [1; 3],
            shared: 0,
            attributes,
            events,
            parameters: &[],
        }
    }

    #[test]
    fn events_stand_where_the_driver_reads_them() {
        let plain = [LaunchAttribute::new(8, [9; 64])];
        let events = LaunchEvents {
            programmatic: Some(RawEvent(0x1122_3344_5566)),
            at_block_start: true,
            begun: Some(RawEvent(0x7788)),
        };
        let with_events = WithEvents::new(&launch(&plain, events)).expect("three attributes");
        let all = with_events.all();
        let ids: Vec<_> = all.iter().map(|attribute| attribute.id).collect();
        assert_eq!(ids, [8, PROGRAMMATIC_EVENT, LAUNCH_COMPLETION_EVENT]);
        assert_eq!(all[0].value, [9; 64]);
        assert_eq!(all[1].value[..8], 0x1122_3344_5566_u64.to_le_bytes());
        assert_eq!(all[1].value[8..16], [0, 0, 0, 0, 1, 0, 0, 0]);
        assert_eq!(all[2].value[..16], 0x7788_u128.to_le_bytes());
        let many = [plain[0]; MOST];
        let refused = WithEvents::new(&launch(&many, events)).err();
        assert_eq!(refused, Some(CuError::INVALID_VALUE));
    }
}
