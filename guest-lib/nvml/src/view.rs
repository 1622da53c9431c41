//! Reads the facts about one of a tenant's devices.

use std::time::Instant;

pub use wormhole_api::constants::device_attribute as attribute;
use wormhole_ring::control::facts::{self, Link};

/// A process of the tenant and the bytes of its device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    pub pid: u32,
    pub bytes: u64,
}

/// Memory of a device from the tenant's view, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    pub total: u64,
    /// Allocated by the tenant's processes.
    pub used: u64,
    pub free: u64,
}

/// Facts about a device at one moment.
#[derive(Debug)]
pub struct View {
    facts: String,
    pub taken: Instant,
}

/// PCI address of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub domain: u32,
    pub bus: u32,
    pub device: u32,
}

impl View {
    pub fn new(facts: String) -> Self {
        Self {
            facts,
            taken: Instant::now(),
        }
    }

    pub fn text(&self, name: &str) -> Option<&str> {
        facts::get(&self.facts, name)
    }

    pub fn number(&self, name: &str) -> Option<u64> {
        facts::number(&self.facts, name)
    }

    pub fn attribute(&self, id: i32) -> Option<i32> {
        let wanted = id.to_string();
        facts::all(&self.facts).find_map(|(name, value)| {
            let id = name.strip_prefix(facts::ATTRIBUTE)?;
            (id == wanted).then(|| value.parse().ok())?
        })
    }

    /// Returns the answer of the host's NVML to the call with this number of a function.
    pub fn host(&self, function: &str, call: u32) -> Option<&str> {
        let answers = facts::all(&self.facts).find_map(|(name, value)| {
            (name.strip_prefix(facts::HOST)? == function).then_some(value)
        })?;
        answers.split(' ').nth(usize::try_from(call).ok()?)
    }

    /// Returns the fact with this prefix and number.
    fn numbered(&self, prefix: &str, number: u32) -> Option<&str> {
        let wanted = number.to_string();
        facts::all(&self.facts)
            .find_map(|(name, value)| (name.strip_prefix(prefix)? == wanted).then_some(value))
    }

    /// Returns the answer of the host's NVML to the call with this number of a field.
    pub fn field(&self, id: u32, call: u32) -> Option<&str> {
        let answers = self.numbered(facts::FIELD, id)?;
        answers.split(' ').nth(usize::try_from(call).ok()?)
    }

    /// Returns the remote end of the NVLink with this number.
    pub fn link(&self, number: u32) -> Option<Link> {
        let mut links = self.text(facts::LINKS)?.split(' ');
        Link::parse(links.nth(usize::try_from(number).ok()?)?)
    }

    /// Returns the P2P status that the host's NVML reports for this `nvmlGpuP2PCapsIndex_t` between the device and
    /// another
    /// device of the tenant.
    pub fn p2p(&self, index: u32, other: u32) -> Option<u32> {
        let statuses = self.numbered(facts::P2P, index)?;
        let status = statuses.split(' ').nth(usize::try_from(other).ok()?)?;
        let mut number = [0];
        facts::read_answer(status, &mut number)?.ok()?;
        u32::try_from(number[0]).ok()
    }

    /// Returns whether the device can access the memory of the tenant's device with this number.
    pub fn reaches(&self, other: u32) -> bool {
        let peers = self.text(facts::PEERS).unwrap_or_default();
        peers.split(' ').any(|number| number.parse() == Ok(other))
    }

    pub fn uuid(&self) -> Option<String> {
        facts::uuid_name(self.text(facts::UUID)?)
    }

    pub fn place(&self) -> Option<Place> {
        let part = |id| u32::try_from(self.attribute(id)?).ok();
        Some(Place {
            domain: part(attribute::PCI_DOMAIN_ID)?,
            bus: part(attribute::PCI_BUS_ID)?,
            device: part(attribute::PCI_DEVICE_ID)?,
        })
    }

    /// Returns the tenant's memory. The host's free memory may be less than the tenant's unused memory.
    pub fn memory(&self) -> Option<Memory> {
        let total = self.number(facts::TOTAL_MEMORY)?;
        let used = self.number(facts::USED_MEMORY)?.min(total);
        let left = self.number(facts::FREE_MEMORY).unwrap_or(total);
        Some(Memory {
            total,
            used,
            free: left.min(total - used),
        })
    }

    /// Returns the tenant's processes by ascending process id.
    pub fn processes(&self) -> Vec<Process> {
        let mut processes: Vec<Process> = facts::all(&self.facts)
            .filter(|(name, _)| *name == facts::PROCESS)
            .filter_map(|(_, value)| {
                let (pid, bytes) = value.split_once(' ')?;
                Some(Process {
                    pid: pid.parse().ok()?,
                    bytes: bytes.parse().ok()?,
                })
            })
            .collect();
        processes.sort_unstable_by_key(|process| process.pid);
        processes
    }
}

impl Place {
    /// Parses `domain:bus:device.function` in hexadecimal; the domain is optional.
    pub fn parse(text: &str) -> Option<Self> {
        let (bus, function) = text.rsplit_once('.')?;
        let mut parts = bus.rsplit(':');
        let mut number = |missing| match parts.next() {
            Some(digits) if !digits.is_empty() && digits.len() <= 8 => {
                u32::from_str_radix(digits, 16).ok()
            }
            Some(_) => None,
            None => missing,
        };
        let (device, bus, domain) = (number(None)?, number(None)?, number(Some(0))?);
        (function == "0" && parts.next().is_none()).then_some(Self {
            domain,
            bus,
            device,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FACTS: &str = "memory.total=1000\nmemory.used=300\nattribute.33=171\nattribute.34=1\n\
        attribute.50=0\nhost.nvmlA=1,2 !3 4,5\nfield.83=4,9\n\
        field.165=1,1 1,0\nlinks=switch 1 - !2 x\np2p.2=!2 0 5\nprocess=9 200\nprocess=7 100\nprocess=x 1\n";

    #[test]
    fn what_is_used_and_what_is_left_never_exceed_the_whole() {
        let memory = |more: &str| View::new(format!("{FACTS}{more}")).memory().unwrap();
        let whole = |used, free| Memory {
            total: 1000,
            used,
            free,
        };
        assert_eq!(memory(""), whole(300, 700));
        assert_eq!(memory("memory.free=900\n"), whole(300, 700));
        assert_eq!(memory("memory.free=100\n"), whole(300, 100));
        let view = View::new("memory.total=10\nmemory.used=18446744073709551615\n".to_owned());
        assert_eq!(view.memory().unwrap().free, 0);
        assert_eq!(View::new("memory.total=10\n".to_owned()).memory(), None);
    }

    #[test]
    fn facts_are_found_by_what_they_are_of() {
        let view = View::new(FACTS.to_owned());
        assert_eq!(view.host("nvmlA", 0), Some("1,2"));
        assert_eq!(view.host("nvmlA", 2), Some("4,5"));
        assert_eq!((view.host("nvmlA", 3), view.host("nvmlB", 0)), (None, None));
        assert_eq!((view.field(83, 0), view.field(8, 0)), (Some("4,9"), None));
        assert_eq!(
            (view.field(165, 1), view.field(165, 2)),
            (Some("1,0"), None)
        );
        let links = [0, 1, 2, 3, 4, 5].map(|number| view.link(number));
        let known = [
            Link::Switch,
            Link::Device(1),
            Link::Inactive,
            Link::Failed(2),
        ];
        assert_eq!(links[..4], known.map(Some));
        assert_eq!(links[4..], [None, None]);
        assert_eq!(
            [0, 1, 2, 3].map(|other| view.p2p(2, other)),
            [None, Some(0), Some(5), None]
        );
        assert_eq!(view.p2p(3, 1), None);
        assert_eq!(view.place().unwrap().bus, 171);
        let peers = View::new(format!("{FACTS}peers=x 2\n"));
        assert_eq!([1, 2].map(|other| peers.reaches(other)), [false, true]);
        let processes: Vec<_> = view.processes().iter().map(|process| process.pid).collect();
        assert_eq!(processes, [7, 9]);
    }

    #[test]
    fn places_are_read_as_programs_write_them() {
        let place = Place {
            domain: 0,
            bus: 0xab,
            device: 1,
        };
        for text in ["0000:AB:01.0", "00000000:ab:01.0", "AB:01.0", "0:ab:1.0"] {
            assert_eq!(Place::parse(text), Some(place), "{text}");
        }
        for text in [
            "",
            "ab:01",
            "01.0",
            "0:ab:01.1",
            "x:ab:01.0",
            "0:0:ab:1.0",
            ":1.0",
            "0:ab:.0",
        ] {
            assert_eq!(Place::parse(text), None, "{text}");
        }
    }
}
