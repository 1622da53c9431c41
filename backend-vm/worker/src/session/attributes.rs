//! Launch attributes (`CUlaunchAttributeID`) that a guest may set on launches, kernel nodes and streams.

use std::sync::Arc;

use wormhole_api::constants::launch_attribute::{
    ACCESS_POLICY_WINDOW, CLUSTER_DIMENSION, CLUSTER_SCHEDULING_POLICY_PREFERENCE, COOPERATIVE,
    IGNORE, LAUNCH_COMPLETION_EVENT, MEM_SYNC_DOMAIN, MEM_SYNC_DOMAIN_MAP,
    NVLINK_UTIL_CENTRIC_SCHEDULING, PREFERRED_CLUSTER_DIMENSION, PREFERRED_SHARED_MEMORY_CARVEOUT,
    PRIORITY, PROGRAMMATIC_EVENT, PROGRAMMATIC_STREAM_SERIALIZATION, SYNCHRONIZATION_POLICY,
};
use wormhole_api::{CuResult, Handle, Items, LaunchAttribute};
use wormhole_device::LaunchEvents;

use super::Session;
use crate::devices::SessionDevice;
use crate::objects::EventObject;

/// Object on which an attribute is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scope {
    Launch,
    /// A kernel node, or the configuration of a cluster occupancy query. Neither records events.
    Node,
    Stream,
}

/// Treatment of an attribute before the device receives it.
enum Rule {
    /// Drops the attribute.
    Ignore,
    /// Forwards the attribute: its value contains plain numbers only.
    Plain,
    /// Forwards the attribute if its window is empty or lies in memory of the session.
    Window,
    /// Replaces the handle at the start of the value by the session's event.
    Event,
    /// Answers `CUDA_ERROR_NOT_SUPPORTED`: the value may contain a handle, which a driver would
    /// trust.
    Refuse,
}

impl Rule {
    const fn of(scope: Scope, id: u32) -> Self {
        match (id, scope) {
            (IGNORE, Scope::Launch | Scope::Node) => Self::Ignore,
            (ACCESS_POLICY_WINDOW, _) => Self::Window,
            (
                SYNCHRONIZATION_POLICY
                | PRIORITY
                | MEM_SYNC_DOMAIN_MAP
                | MEM_SYNC_DOMAIN
                | NVLINK_UTIL_CENTRIC_SCHEDULING,
                _,
            )
            | (
                COOPERATIVE
                | CLUSTER_DIMENSION
                | CLUSTER_SCHEDULING_POLICY_PREFERENCE
                | PROGRAMMATIC_STREAM_SERIALIZATION
                | PREFERRED_CLUSTER_DIMENSION
                | PREFERRED_SHARED_MEMORY_CARVEOUT,
                Scope::Launch | Scope::Node,
            ) => Self::Plain,
            (PROGRAMMATIC_EVENT | LAUNCH_COMPLETION_EVENT, Scope::Launch) => Self::Event,
            _ => Self::Refuse,
        }
    }
}

/// Events that a launch records.
#[derive(Default)]
pub(super) struct Events {
    programmatic: Option<Arc<EventObject>>,
    at_block_start: bool,
    begun: Option<Arc<EventObject>>,
}

impl Events {
    /// Returns the events for a launch on `device`, if they belong to it.
    pub(super) fn on(&self, device: &SessionDevice) -> wormhole_device::Result<LaunchEvents> {
        let own = |event: &Option<Arc<EventObject>>| {
            let own = event
                .as_ref()
                .map(|event| device.own(&event.device, event.raw));
            own.transpose()
        };
        Ok(LaunchEvents {
            programmatic: own(&self.programmatic)?,
            at_block_start: self.at_block_start,
            begun: own(&self.begun)?,
        })
    }
}

impl Session {
    /// Translates the attributes for the device into `admitted`, and returns the events that a
    /// launch records.
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_SUPPORTED` for an attribute that `scope` does not admit,
    /// `CUDA_ERROR_INVALID_VALUE` for a window outside of the session's memory,
    /// `CUDA_ERROR_INVALID_HANDLE` for a handle that names no event.
    pub(super) fn admit_attributes(
        &self,
        scope: Scope,
        given: &Items<'_, LaunchAttribute>,
        admitted: &mut Vec<LaunchAttribute>,
    ) -> Result<Events, CuResult> {
        admitted.clear();
        let mut events = Events::default();
        for LaunchAttribute { id, value, .. } in given.iter() {
            match Rule::of(scope, id) {
                Rule::Event => self.admit_event(id, &value, &mut events)?,
                _ => admitted.extend(self.admit_attribute(scope, id, value)?),
            }
        }
        Ok(events)
    }

    /// Translates one attribute for the device. Returns `None` if the device does not need it.
    ///
    /// # Errors
    /// As for [`Session::admit_attributes`]. An event is refused.
    pub(super) fn admit_attribute(
        &self,
        scope: Scope,
        id: u32,
        value: [u8; 64],
    ) -> Result<Option<LaunchAttribute>, CuResult> {
        match Rule::of(scope, id) {
            Rule::Ignore => return Ok(None),
            Rule::Plain => {}
            Rule::Window => self.check_window(&value)?,
            Rule::Event | Rule::Refuse => return Err(CuResult::NOT_SUPPORTED),
        }
        Ok(Some(LaunchAttribute::new(id, value)))
    }

    /// Checks that a window lies in memory of the session, or is empty.
    fn check_window(&self, value: &[u8; 64]) -> Result<(), CuResult> {
        let words = value.as_chunks::<8>().0;
        let [address, bytes] = [0, 1].map(|index| u64::from_le_bytes(words[index]));
        if bytes == 0 {
            return Ok(());
        }
        self.addresses.place(address, bytes).map(drop)
    }

    fn admit_event(&self, id: u32, value: &[u8; 64], events: &mut Events) -> Result<(), CuResult> {
        let [handle, ..] = value.as_chunks::<8>().0 else {
            return self.objects.events.refused(CuResult::INVALID_HANDLE);
        };
        let known = &self.objects.events;
        let event = match Handle::from_wire(u64::from_le_bytes(*handle)) {
            Some(handle) => known.get(handle)?,
            None => return known.refused(CuResult::INVALID_HANDLE),
        };
        if !event.of_launches {
            return Err(CuResult::NOT_SUPPORTED);
        }
        let event = Some(Arc::clone(event));
        if id == PROGRAMMATIC_EVENT {
            events.programmatic = event;
            events.at_block_start = value[12..16] != [0; 4];
        } else {
            events.begun = event;
        }
        Ok(())
    }
}
