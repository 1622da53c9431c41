//! Fuzzes [`wormhole_fuzz::ptx`].

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| wormhole_fuzz::ptx::run(input));
