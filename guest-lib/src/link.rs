//! Links on their way to the worker.

use wormhole_api::{DevicePtr, Items, Link, LinkInput};

use crate::context::Scope;
use crate::error::{CuError, Result};

/// What a program added to a link.
#[derive(Debug)]
pub struct Input {
    /// Its `CUjitInputType`.
    pub kind: u32,
    pub data: Vec<u8>,
}

/// Most inputs of one link.
const MOST_INPUTS: usize = 128;
/// Room for what an image has beside its code.
const LEAST_ROOM: u64 = 64 << 10;

/// Links the inputs into one image.
pub fn link(scope: Scope, inputs: &[Input]) -> Result<Vec<u8>> {
    if inputs.len() > MOST_INPUTS {
        return Err(CuError::OUT_OF_MEMORY);
    }
    let bytes: usize = inputs.iter().map(|input| input.data.len()).sum();
    let mut room = 2 * bytes as u64 + LEAST_ROOM;
    loop {
        let buffer = scope.session.allocate_arena(bytes as u64 + room, 16)?;
        let linked = send(scope, inputs, buffer, buffer + bytes as u64, room);
        scope.session.free_arena(buffer);
        match linked? {
            Linked::Image(image) => return Ok(image),
            Linked::TooLarge(needed) => room = needed,
        }
    }
}

enum Linked {
    Image(Vec<u8>),
    /// The image has this many bytes.
    TooLarge(u64),
}

/// The inputs go to `buffer`, and the image comes back at `image`, if `room` bytes hold it.
fn send(scope: Scope, inputs: &[Input], buffer: u64, image: u64, room: u64) -> Result<Linked> {
    let mut place = pointer(buffer);
    let mut parts = Vec::with_capacity(inputs.len());
    for input in inputs {
        let bytes = input.data.len();
        // SAFETY: the arena handed out room for all inputs there, and they lie outside the arena.
        unsafe {
            place.copy_from_nonoverlapping(input.data.as_ptr(), bytes);
            place = place.add(bytes);
        }
        parts.push(LinkInput {
            kind: input.kind,
            reserved: 0,
            bytes: bytes as u64,
        });
    }
    let message = Link {
        inputs: DevicePtr(buffer),
        image: DevicePtr(image),
        room,
        parts: Items::new(&parts),
    };
    let needed = scope.session.request(&message, |reply| reply.bytes)?;
    if needed > room {
        return Ok(Linked::TooLarge(needed));
    }
    let length = usize::try_from(needed).map_err(|_| CuError::OUT_OF_MEMORY)?;
    let mut copy = vec![0; length];
    // SAFETY: the worker wrote that many bytes of what the arena handed out, and has answered.
    unsafe { pointer(image).copy_to_nonoverlapping(copy.as_mut_ptr(), length) };
    Ok(Linked::Image(copy))
}

fn pointer(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0))
}
