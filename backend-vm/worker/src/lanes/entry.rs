//! Calls in the words of a lane's queue.

use wormhole_api::{FenceWrite, LaunchKernel, Message};
use wormhole_device::{
    Device, Launch, LaunchAttribute, LaunchEvents, RawFunction, RawStream, Result,
};
use wormhole_ring::queue::Entry;
use zerocopy::{FromBytes, IntoBytes};

/// Kind of a call, in the lowest byte of the first word.
const LAUNCH: u64 = 0;
const FENCE: u64 = 1;
/// Bits of the first word behind the kind: the device's number, the number of attributes, the bytes of parameters.
const DEVICE: u32 = 8;
const ATTRIBUTES: u32 = 24;
const PARAMETERS: u32 = 32;
/// Attributes that are counted there.
const MOST_ATTRIBUTES: u64 = (1 << (PARAMETERS - ATTRIBUTES)) - 1;
const _: () = assert!(LaunchKernel::MOST_ATTRIBUTES as u64 <= MOST_ATTRIBUTES);

/// Words of a launch before its attributes.
const HEAD: usize = 7;
/// Words of an attribute.
const ATTRIBUTE: usize = size_of::<LaunchAttribute>() / 8;
/// Words of a fence.
pub(super) const FENCE_WORDS: usize = 4;

const fn both(low: u32, high: u32) -> u64 {
    low as u64 | (high as u64) << 32
}

#[expect(clippy::cast_possible_truncation, reason = "the two halves of a word")]
const fn halves(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

/// Returns the words of a launch.
#[inline]
pub(super) fn launch_words(launch: &Launch<'_>) -> usize {
    HEAD + ATTRIBUTE * launch.attributes.len() + launch.parameters.len().div_ceil(8)
}

/// Writes a launch that records no events.
#[inline]
pub(super) fn write_launch(entry: &mut Entry<'_>, device: usize, launch: &Launch<'_>) {
    let (grid, block) = (launch.grid, launch.block);
    let sizes = (launch.attributes.len() as u64) << ATTRIBUTES
        | (launch.parameters.len() as u64) << PARAMETERS;
    for word in [
        LAUNCH | (device as u64) << DEVICE | sizes,
        launch.function.0,
        launch.stream.0,
        both(grid[0], grid[1]),
        both(grid[2], block[0]),
        both(block[1], block[2]),
        u64::from(launch.shared),
    ] {
        entry.word(word);
    }
    entry.bytes(launch.attributes.as_bytes());
    entry.bytes(launch.parameters);
}

#[inline]
pub(super) fn write_fence(
    entry: &mut Entry<'_>,
    device: usize,
    stream: RawStream,
    address: u64,
    value: u64,
) {
    for word in [FENCE | (device as u64) << DEVICE, stream.0, address, value] {
        entry.word(word);
    }
}

/// A call for a device.
#[derive(Debug)]
pub(super) enum Call<'a> {
    Launch(Launch<'a>),
    Fence {
        stream: RawStream,
        address: u64,
        value: u64,
    },
}

impl Call<'_> {
    /// Returns the name of the message that the call is for.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Launch(_) => LaunchKernel::NAME,
            Self::Fence { .. } => FenceWrite::NAME,
        }
    }

    #[inline]
    pub fn make(&self, device: &dyn Device) -> Result<()> {
        match self {
            Self::Launch(launch) => device.launch(launch),
            Self::Fence {
                stream,
                address,
                value,
            } => device.write_fence(*stream, *address, *value),
        }
    }
}

/// Reads a call, with the number of its device. Returns `None` for words that nothing here writes.
#[inline]
pub(super) fn read(words: &[u64]) -> Option<(usize, Call<'_>)> {
    let call = match *words {
        [head, stream, address, value] if head & 0xFF == FENCE => Call::Fence {
            stream: RawStream(stream),
            address,
            value,
        },
        [
            head,
            function,
            stream,
            grid,
            both,
            block,
            shared,
            ref rest @ ..,
        ] => {
            let ((grid_x, grid_y), (grid_z, block_x)) = (halves(grid), halves(both));
            let ((block_y, block_z), (shared, _)) = (halves(block), halves(shared));
            let (attributes, parameters) = tails(head, rest)?;
            Call::Launch(Launch {
                function: RawFunction(function),
                stream: RawStream(stream),
                grid: [grid_x, grid_y, grid_z],
                block: [block_x, block_y, block_z],
                shared,
                attributes,
                events: LaunchEvents::default(),
                parameters,
            })
        }
        _ => return None,
    };
    Some((device(*words.first()?), call))
}

fn device(head: u64) -> usize {
    (head >> DEVICE & 0xFFFF) as usize
}

/// Finds attributes and parameters in the words behind a launch's head.
fn tails(head: u64, rest: &[u64]) -> Option<(&[LaunchAttribute], &[u8])> {
    let attributes = (head >> ATTRIBUTES & MOST_ATTRIBUTES) as usize * ATTRIBUTE;
    let (_, parameters) = halves(head);
    let (attributes, rest) = rest.split_at_checked(attributes)?;
    let attributes = <[LaunchAttribute]>::ref_from_bytes(attributes.as_bytes()).ok()?;
    Some((attributes, rest.as_bytes().get(..parameters as usize)?))
}

#[cfg(test)]
mod tests {
    use wormhole_ring::queue::queue;

    use super::*;

    #[test]
    fn a_call_is_read_as_it_was_written() {
        let attributes = [4, 5].map(|id| LaunchAttribute::new(id, [0x11; 64]));
        let parameters: Vec<u8> = (0..255).collect();
        let launch = Launch {
            function: RawFunction(0x1234_5678_9ABC),
            stream: RawStream(0xFEDC_BA98),
            grid: [1, u32::MAX, 3],
            block: [4, 5, 6],
            shared: 7,
            attributes: &attributes,
            events: LaunchEvents::default(),
            parameters: &parameters,
        };
        let (mut writer, mut reader) = queue(256);
        let mut words = Vec::new();
        for parameters in [&[][..], &parameters[..8], &parameters] {
            for attributes in [&[][..], &attributes] {
                let launch = Launch {
                    attributes,
                    parameters,
                    ..launch
                };
                let mut entry = writer.begin(launch_words(&launch));
                write_launch(&mut entry, 3, &launch);
                assert!(!entry.publish());
                assert!(reader.next(&mut words));
                let (device, call) = read(&words).unwrap();
                assert_eq!((device, call.name()), (3, "LaunchKernel"));
                assert_eq!(format!("{call:?}"), format!("{:?}", Call::Launch(launch)));
                reader.done();
            }
        }
        let mut entry = writer.begin(FENCE_WORDS);
        write_fence(&mut entry, 31, RawStream(1), 2, 3);
        assert!(!entry.publish());
        assert!(reader.next(&mut words));
        let (device, call) = read(&words).unwrap();
        assert_eq!((device, call.name()), (31, "FenceWrite"));
        let wanted = Call::Fence {
            stream: RawStream(1),
            address: 2,
            value: 3,
        };
        assert_eq!(format!("{call:?}"), format!("{wanted:?}"));
        assert!(read(&words[..3]).is_none());
    }
}
