//! Fuzzes [`wormhole_fuzz::supervisor`].

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| wormhole_fuzz::supervisor::run(input));
