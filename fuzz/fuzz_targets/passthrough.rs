//! Fuzzes [`wormhole_fuzz::passthrough`].

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| wormhole_fuzz::passthrough::run(input));
