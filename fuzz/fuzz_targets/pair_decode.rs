//! Decodes messages between a supervisor and a tenant's process. A decoded report must encode to the same bytes.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| wormhole_supervisor::fuzzing::decode(input));
