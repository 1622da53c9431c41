//! Decodes a frame of the control channel. A decoded message must encode to the same bytes.

use wormhole_ring::control::{HEADER_BYTES, Header, Message};

pub fn run(input: &[u8]) {
    let Some((header, body)) = input.split_first_chunk::<HEADER_BYTES>() else {
        return;
    };
    let Ok(header) = Header::decode(header) else {
        return;
    };
    // The stream may hold less or more than the header announces; a reader takes only the announced bytes.
    let body = body.get(..header.body_len).unwrap_or(body);
    match Message::decode(header.kind, body) {
        Err(error) => _ = error.to_string(),
        Ok(message) => {
            assert_eq!(message.kind(), header.kind);
            let frame = message
                .to_vec()
                .expect("what was decoded is within the limits");
            let again =
                Message::decode(header.kind, &frame[HEADER_BYTES..]).expect("our own bytes");
            assert_eq!(again, message);
        }
    }
}
