//! Descriptions of the devices, fetched once from the backend.
//!
//! Attributes are promises: a feature that this driver does not offer is reported as absent, even if the device has it.

use std::ffi::CString;
use std::sync::atomic::AtomicU64;

use wormhole_api::{ATTRIBUTES, DeviceDescribeReply};
use wormhole_ring::layout::MOST_DEVICES;

use crate::error::{CuError, Result};
use crate::parameter::Out;

pub use wormhole_api::constants::device_attribute as attribute;

/// Number of attribute values: one more than the greatest attribute's number.
const PLACES: usize = {
    let mut greatest = 0;
    let mut index = 0;
    while index < ATTRIBUTES.len() {
        if ATTRIBUTES[index].id > greatest {
            greatest = ATTRIBUTES[index].id;
        }
        index += 1;
    }
    greatest.cast_unsigned() as usize + 1
};

/// Returns the place of an attribute's value, if there is such an attribute.
#[inline]
fn place(id: i32) -> Option<usize> {
    usize::try_from(id).ok().filter(|place| *place < PLACES)
}

/// Greatest number of devices of a process.
pub const MOST: usize = MOST_DEVICES;

/// Limits of a device's launches, from its attributes.
#[derive(Clone, Copy, Debug)]
pub struct LaunchLimits {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Threads, registers and bytes of shared memory of a block.
    pub threads: u32,
    pub registers: u32,
    pub shared: u32,
}

impl LaunchLimits {
    fn of(attributes: &[i32; PLACES]) -> Self {
        let value = |id: i32| {
            let value = place(id).map_or(0, |place| attributes[place]);
            u32::try_from(value).unwrap_or(0)
        };
        let three = |first: i32| [value(first), value(first + 1), value(first + 2)];
        Self {
            grid: three(attribute::MAX_GRID_DIM_X),
            block: three(attribute::MAX_BLOCK_DIM_X),
            threads: value(attribute::MAX_THREADS_PER_BLOCK),
            registers: value(attribute::MAX_REGISTERS_PER_BLOCK),
            shared: value(attribute::MAX_SHARED_MEMORY_PER_BLOCK),
        }
    }
}

/// A device of this process.
#[derive(Debug)]
pub struct Device {
    /// The device's number at the backend.
    pub number: u16,
    pub driver_version: i32,
    pub total_memory: u64,
    pub uuid: [u8; 16],
    /// Least and greatest stream priority.
    pub priorities: (i32, i32),
    pub name: CString,
    attributes: [i32; PLACES],
    pub launches: LaunchLimits,
    /// Number of streams that were destroyed with work under way. No fence covers that work, and a synchronization of
    /// the whole device must wait for it too.
    pub orphaned: AtomicU64,
    /// Number of them whose work is known to be complete.
    pub orphaned_complete: AtomicU64,
}

impl Device {
    pub fn new(number: u16, reply: &DeviceDescribeReply<'_>) -> Self {
        let mut attributes = [0; PLACES];
        let given = reply
            .attributes
            .iter()
            .map(|attribute| (attribute.id, attribute.value));
        let promised = ATTRIBUTES
            .iter()
            .filter_map(|info| Some((info.id, info.answer?)));
        for (id, value) in given.chain(promised) {
            if let Some(place) = place(id) {
                attributes[place] = value;
            }
        }
        let name: Vec<u8> = reply
            .name
            .iter()
            .copied()
            .filter(|byte| *byte != 0)
            .collect();
        Self {
            number,
            driver_version: reply.driver_version,
            total_memory: reply.total_memory,
            uuid: reply.uuid,
            priorities: (reply.least_priority, reply.greatest_priority),
            name: CString::new(name).unwrap_or_default(),
            launches: LaunchLimits::of(&attributes),
            attributes,
            orphaned: AtomicU64::new(0),
            orphaned_complete: AtomicU64::new(0),
        }
    }

    /// Returns the value of an attribute, or `INVALID_VALUE` for an unknown number.
    #[inline]
    pub fn attribute(&self, id: i32) -> Result<i32> {
        place(id)
            .filter(|place| *place != 0)
            .map(|place| self.attributes[place])
            .ok_or(CuError::INVALID_VALUE)
    }

    /// Reports an attribute as absent.
    pub fn lacks(&mut self, id: i32) {
        if let Some(place) = place(id) {
            self.attributes[place] = 0;
        }
    }

    /// Returns the value of an attribute that is known to exist.
    pub fn value(&self, id: i32) -> i32 {
        self.attribute(id).unwrap_or(0)
    }

    /// Returns `domain:bus:device.function`, as `cuDeviceGetPCIBusId` writes it.
    pub fn pci_bus_id(&self) -> String {
        format!(
            "{:04X}:{:02X}:{:02X}.0",
            self.value(attribute::PCI_DOMAIN_ID),
            self.value(attribute::PCI_BUS_ID),
            self.value(attribute::PCI_DEVICE_ID)
        )
    }
}

/// Returns the devices that `CUDA_VISIBLE_DEVICES` lists, in its order, as indices into `uuids`. The entries are either
/// numbers or prefixes of UUIDs (CUDA C++ programming guide, "CUDA environment variables"). The list ends at the first
/// entry that names no device; a list that names a device twice selects no device. The parsing of numbers and the
/// treatment of repetitions follow PyTorch (`torch/cuda/__init__.py`, `_parse_visible_devices`).
pub fn visible(list: &str, uuids: &[[u8; 16]]) -> Vec<usize> {
    let by_name = list.starts_with(NAME_START);
    let mut seen = Vec::new();
    for entry in list.split(',') {
        let found = if by_name {
            by_uuid(entry, uuids)
        } else {
            leading_number(entry).filter(|number| *number < uuids.len())
        };
        let Some(found) = found else { break };
        if seen.contains(&found) {
            return Vec::new();
        }
        seen.push(found);
    }
    seen
}

const NAME_START: &str = "GPU-";

/// Returns the index of the device whose UUID has this prefix, if it is the only one.
fn by_uuid(start: &str, uuids: &[[u8; 16]]) -> Option<usize> {
    let start = start.trim();
    let fits = |uuid: &[u8; 16]| start.len() > NAME_START.len() && name(uuid).starts_with(start);
    let mut found = (0..uuids.len()).filter(|at| fits(&uuids[*at]));
    found.next().filter(|_| found.next().is_none())
}

fn name(uuid: &[u8; 16]) -> String {
    let [a, b, c, d, e] = [0..4, 4..6, 6..8, 8..10, 10..16].map(|range| {
        uuid[range]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect::<String>()
    });
    format!("{NAME_START}{a}-{b}-{c}-{d}-{e}")
}

/// Parses the number at the start of a text, as C's `strtoul` does.
fn leading_number(text: &str) -> Option<usize> {
    let text = text.trim();
    let digits = text.strip_prefix('+').unwrap_or(text);
    let end = digits.find(|c: char| !c.is_ascii_digit());
    digits[..end.unwrap_or(digits.len())].parse().ok()
}

/// Copies a string with its terminator into a buffer, cut where it does not fit.
pub fn copy_string(text: &[u8], buffer: Out<'_, [u8]>) -> Result {
    let kept = buffer.len().checked_sub(1).ok_or(CuError::INVALID_VALUE)?;
    buffer.put_all(text.iter().copied().take(kept).chain([0]))
}

#[cfg(test)]
mod tests {
    use wormhole_api::{Attribute, Items};

    use super::*;

    fn device(attributes: &[Attribute]) -> Device {
        let reply = DeviceDescribeReply {
            devices: 1,
            driver_version: 13000,
            total_memory: 1 << 30,
            uuid: [7; 16],
            least_priority: 0,
            greatest_priority: -5,
            name: b"Test GPU",
            attributes: Items::new(attributes),
        };
        Device::new(0, &reply)
    }

    #[test]
    fn what_the_guest_lacks_is_absent_even_where_the_device_has_it() {
        let device = device(&[
            Attribute { id: 88, value: 1 },
            Attribute { id: 134, value: 0 },
            Attribute { id: 16, value: 132 },
        ]);
        assert_eq!(device.attribute(88), Ok(0));
        assert_eq!(device.attribute(134), Ok(-1));
        assert_eq!(device.attribute(16), Ok(132));
    }

    #[test]
    fn numbers_that_are_no_attributes_are_invalid_values() {
        let device = device(&[
            Attribute { id: -1, value: 3 },
            Attribute {
                id: 100_000,
                value: 3,
            },
        ]);
        for id in [-1, 0, 100_000, i32::MIN] {
            assert_eq!(device.attribute(id), Err(CuError::INVALID_VALUE));
        }
    }

    #[test]
    fn the_bus_id_is_written_in_hexadecimal() {
        let device = device(&[
            Attribute {
                id: 33,
                value: 0xAB,
            },
            Attribute { id: 34, value: 1 },
        ]);
        assert_eq!(device.pci_bus_id(), "0000:AB:01.0");
    }

    #[test]
    fn a_program_sees_the_devices_that_its_list_names_in_its_order() {
        let first = *b"\x12\x34\x56\x78\x9a\xbc\xde\xf0\x01\x02\x03\x04\x05\x06\x07\x08";
        let second = *b"\x12\x35\x56\x78\x9a\xbc\xde\xf0\x01\x02\x03\x04\x05\x06\x07\x08";
        let third = [0xff; 16];
        let cases: [(&str, &[usize]); 21] = [
            ("0", &[0]),
            ("2,0", &[2, 0]),
            (" 1 , +2 ", &[1, 2]),
            ("0,3,1", &[0]),
            ("0,-1,1", &[0]),
            ("1gpu,2", &[1, 2]),
            ("0,0", &[]),
            ("", &[]),
            ("-1", &[]),
            ("7", &[]),
            ("NoDevFiles", &[]),
            ("99999999999999999999999", &[]),
            ("GPU-1234", &[0]),
            ("GPU-12345678-9abc-def0-0102-030405060708", &[0]),
            ("GPU-f,GPU-1235", &[2, 1]),
            ("GPU-12", &[]),
            ("GPU-", &[]),
            ("GPU-f,GPU-99,GPU-1234", &[2]),
            ("GPU-f,GPU-ff", &[]),
            ("GPU-f,0", &[2]),
            ("0,GPU-f", &[0]),
        ];
        for (list, seen) in cases {
            assert_eq!(visible(list, &[first, second, third]), seen, "{list:?}");
        }
    }

    #[test]
    fn a_string_is_cut_to_its_buffer() {
        let mut buffer = [0x55; 5];
        // SAFETY: the buffer has that many bytes.
        let mut place = |bytes| unsafe { Out::list(buffer.as_mut_ptr(), bytes) };
        let (whole, empty) = (place(5), place(0));
        copy_string(b"Test GPU", whole).unwrap();
        assert_eq!(copy_string(b"x", empty), Err(CuError::INVALID_VALUE));
        assert_eq!(buffer, *b"Test\0");
    }
}
