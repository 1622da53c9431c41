//! Decodes messages between a supervisor and a tenant's process. A decoded report must encode to the same bytes.

pub fn run(input: &[u8]) {
    wormhole_supervisor::fuzzing::decode(input);
}
