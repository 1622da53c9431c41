//! NVLinks: the ends that the host's NVML reports, reduced to those that the tenant may know.

use nvml_wrapper_sys::bindings::{
    nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH as SWITCH, nvmlPciInfo_t,
};
use wormhole_ring::control::facts::Link;

/// PCI address on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub domain: u32,
    pub bus: u32,
    pub device: u32,
}

impl Place {
    /// Highest bus number.
    const LAST_BUS: u32 = 0xff;

    /// Returns whether no device can have this address: earlier drivers report too large a bus,
    /// later ones too large a domain.
    const fn is_none(self) -> bool {
        self.bus > Self::LAST_BUS || self.domain == u32::MAX
    }
}

impl From<&nvmlPciInfo_t> for Place {
    fn from(info: &nvmlPciInfo_t) -> Self {
        Self {
            domain: info.domain,
            bus: info.bus,
            device: info.device,
        }
    }
}

/// Device at the other end of an active link, as far as the host's NVML reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Remote {
    /// `nvmlIntNvLinkDeviceType_t`.
    pub kind: Option<u32>,
    pub place: Option<Place>,
}

/// Returns a link as a tenant may know it whose devices are at the addresses `own`: NVML's error,
/// or the device at the other end if the link is active.
pub(super) fn known(link: Result<Option<Remote>, u32>, own: &[Option<Place>]) -> Link {
    let remote = match link {
        Err(code) => return Link::Failed(code),
        Ok(remote) => remote.unwrap_or_default(),
    };
    match remote.place {
        _ if remote.kind == Some(SWITCH) => Link::Switch,
        // If the host is itself a virtual machine that has the GPUs without their switches, NVML
        // reports an invalid address. NCCL also treats that as a switch (ncclTopoGetXmlFromGpu in
        // its src/graph/xml.cc).
        Some(place) if place.is_none() => Link::Switch,
        Some(place) => own
            .iter()
            .position(|own| *own == Some(place))
            .and_then(|number| u32::try_from(number).ok())
            .map_or(Link::Inactive, Link::Device),
        None => Link::Inactive,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: Place = Place {
        domain: 0,
        bus: 0x18,
        device: 0,
    };
    const FOREIGN: Place = Place { bus: 0x19, ..OWN };

    fn to(kind: u32, place: Place) -> Result<Option<Remote>, u32> {
        Ok(Some(Remote {
            kind: Some(kind),
            place: Some(place),
        }))
    }

    #[test]
    fn a_tenant_knows_links_to_switches_and_to_its_own_devices() {
        let own = [None, Some(OWN)];
        let switch = Place { bus: 5, ..OWN };
        let nowhere = Place {
            domain: u32::MAX,
            bus: 0xff,
            device: 0xff,
        };
        let earlier = Place {
            domain: 0x0fff_ffff,
            bus: 0xffff,
            device: 0xff,
        };
        for (link, expected) in [
            (to(SWITCH, switch), Link::Switch),
            (to(SWITCH, OWN), Link::Switch),
            (to(0xff, nowhere), Link::Switch),
            (to(0xff, earlier), Link::Switch),
            (to(0, OWN), Link::Device(1)),
            (to(0, FOREIGN), Link::Inactive),
            (to(0, Place { domain: 1, ..OWN }), Link::Inactive),
            (to(0, Place { device: 1, ..OWN }), Link::Inactive),
            (Ok(Some(Remote::default())), Link::Inactive),
            (Ok(None), Link::Inactive),
            (Err(3), Link::Failed(3)),
        ] {
            assert_eq!(known(link, &own), expected, "{link:?}");
        }
    }
}
