//! Decodes a record's body as the worker does: the first two bytes are the message's id.

use std::fmt::Write;

use wormhole_ring::layout::MAX_BODY;

/// Body aligned as in a record, to 32 bytes.
#[repr(align(32))]
struct Body([u8; MAX_BODY]);

pub fn run(input: &[u8]) {
    let Some((id, bytes)) = input.split_first_chunk::<2>() else {
        return;
    };
    let Some(length) = (bytes.len() <= MAX_BODY).then_some(bytes.len()) else {
        return;
    };
    let mut body = Body([0; MAX_BODY]);
    body.0[..length].copy_from_slice(bytes);
    let mut text = String::new();
    match wormhole_api::decode(u16::from_le_bytes(*id), &body.0[..length]) {
        // Formatting reads every field and every element of a tail.
        Ok(request) => write!(text, "{request:?}"),
        Err(error) => write!(text, "{error}"),
    }
    .expect("a string takes any text");
}
