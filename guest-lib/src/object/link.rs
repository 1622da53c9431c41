//! Links (`cuLinkComplete`), executed by the worker.

use wormhole_api::{DevicePtr, Items, Link, LinkInput};

use crate::error::{CuError, Result};
use crate::object::context::Scope;
use crate::object::jit::{Jit, Logs};

/// Input that a program added to a link.
#[derive(Debug)]
pub struct Input {
    /// `CUjitInputType`.
    pub kind: u32,
    /// Name in the linker's messages.
    pub name: Vec<u8>,
    pub data: Vec<u8>,
}

/// Maximum number of inputs of one link.
const MOST_INPUTS: usize = 128;
/// Room for the parts of an image beside its code, in bytes.
const LEAST_ROOM: u64 = 64 << 10;

/// Task of the linker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// Check whether the inputs are acceptable; the image is empty.
    Inputs,
    Image,
}

/// Links the inputs into one image. Reads the linker's logs even if linking fails.
pub fn link(
    scope: Scope,
    inputs: &[Input],
    goal: Goal,
    jit: &Jit,
    logs: &mut Logs,
) -> Result<Vec<u8>> {
    if inputs.len() > MOST_INPUTS {
        return Err(CuError::OUT_OF_MEMORY);
    }
    let length = |input: &Input| input.name.len() + input.data.len();
    let bytes: usize = inputs.iter().map(length).sum();
    let log_bytes = jit.log_bytes();
    let mut room = match goal {
        Goal::Inputs => 0,
        Goal::Image => 2 * bytes as u64 + LEAST_ROOM,
    };
    loop {
        let log = 2 * log_bytes as u64;
        let buffer = scope
            .session
            .allocate_for_image(bytes as u64 + log + room, 16)?;
        let places = Places {
            inputs: buffer,
            log: buffer + bytes as u64,
            log_bytes,
            image: buffer + bytes as u64 + log,
            room,
        };
        let linked = send(scope, inputs, goal, jit, &places);
        // SAFETY: the arena handed out that room, and the worker has answered or is gone.
        *logs = unsafe { Logs::at(pointer(places.log), log_bytes) };
        scope.session.free_arena(buffer);
        match linked? {
            Linked::Image(image) => return Ok(image),
            Linked::TooLarge(needed) => room = needed,
        }
    }
}

/// Arena addresses of a link's inputs and results.
struct Places {
    inputs: u64,
    log: u64,
    log_bytes: usize,
    image: u64,
    room: u64,
}

enum Linked {
    Image(Vec<u8>),
    /// Bytes that the image needs.
    TooLarge(u64),
}

/// Copies the inputs to the arena, requests the link, and copies the image back if it fits.
fn send(scope: Scope, inputs: &[Input], goal: Goal, jit: &Jit, places: &Places) -> Result<Linked> {
    let mut place = pointer(places.inputs);
    let mut parts = Vec::with_capacity(inputs.len());
    for input in inputs {
        for piece in [&input.name, &input.data] {
            // SAFETY: the arena handed out room for all inputs there, and they lie outside the arena.
            unsafe {
                place.copy_from_nonoverlapping(piece.as_ptr(), piece.len());
                place = place.add(piece.len());
            }
        }
        parts.push(LinkInput {
            kind: input.kind,
            name: u32::try_from(input.name.len()).map_err(|_| CuError::INVALID_VALUE)?,
            bytes: input.data.len() as u64,
        });
    }
    // SAFETY: the arena handed out room for both texts.
    unsafe { pointer(places.log).write_bytes(0, 2 * places.log_bytes) };
    let room = places.room;
    let message = Link {
        complete: u32::from(goal == Goal::Image),
        inputs: DevicePtr(places.inputs),
        image: DevicePtr(places.image),
        room,
        log: DevicePtr(places.log),
        log_bytes: places.log_bytes as u64,
        parts: Items::new(&parts),
        options: Items::new(jit.options()),
    };
    let needed = scope.session.request(&message, |reply| reply.bytes)?;
    if needed > room {
        return Ok(Linked::TooLarge(needed));
    }
    let length = usize::try_from(needed).map_err(|_| CuError::OUT_OF_MEMORY)?;
    let mut copy = vec![0; length];
    // SAFETY: the worker wrote that many bytes of what the arena handed out, and has answered.
    unsafe { pointer(places.image).copy_to_nonoverlapping(copy.as_mut_ptr(), length) };
    Ok(Linked::Image(copy))
}

fn pointer(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0))
}
