//! Invalid messages of a hostile worker: every kind of message with wrong bodies, and bytes that
//! are no message.

use std::io::Write;
use std::os::unix::net::UnixStream;

use wormhole_backend_tests::random::Random;
use wormhole_backend_tests::stub::Stub;
use wormhole_ring::control::{MAGIC, MAX_CONTROL_BODY};

/// Number of message kinds tried, more than exist.
const KINDS: usize = 32;
/// Number of rants.
pub const COUNT: usize = 2 * KINDS + 4;

/// Sends the rant and exits. A send error is ignored, because the supervisor may kill the worker
/// for it.
pub fn send(number: usize, stub: Stub) -> ! {
    let random = Random::new(number as u64 + 1);
    let garbage = |count| (0..count).map(|_| random.byte()).collect::<Vec<u8>>();
    let kind = u16::try_from(number % KINDS).unwrap();
    let bytes = match number / KINDS {
        0 => frame(kind, &[0; 64]),
        1 => frame(kind, &garbage(96)),
        _ if number.is_multiple_of(2) => garbage(64 << 10),
        // A length that no message has, without a body.
        _ => [&MAGIC.to_le_bytes()[..], &[1, 0, 0, 0], &[0xFF; 8]].concat(),
    };
    let mut socket = UnixStream::from(stub.into_socket());
    // The supervisor may have closed it.
    let _ = socket.write_all(&bytes);
    std::process::exit(1);
}

fn frame(kind: u16, body: &[u8]) -> Vec<u8> {
    assert!(body.len() <= MAX_CONTROL_BODY);
    let length = u32::try_from(body.len()).unwrap();
    [
        &MAGIC.to_le_bytes()[..],
        &kind.to_le_bytes(),
        &[0; 2],
        &length.to_le_bytes(),
        &[0; 4],
        body,
    ]
    .concat()
}
