//! Tests that messages and answers fit the window that carries them.

use wormhole_api::{FENCES, MESSAGE_LIMIT, REPLY_LIMIT};
use wormhole_ring::layout;

#[test]
fn limits_are_those_of_the_window() {
    assert_eq!(MESSAGE_LIMIT, layout::MAX_BODY);
    assert_eq!(REPLY_LIMIT, layout::SLOT_PAYLOAD);
    assert_eq!(usize::try_from(FENCES), Ok(layout::FENCES));
}
