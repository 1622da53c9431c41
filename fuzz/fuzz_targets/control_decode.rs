//! Fuzzes [`wormhole_fuzz::control_decode`].

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| wormhole_fuzz::control_decode::run(input));
