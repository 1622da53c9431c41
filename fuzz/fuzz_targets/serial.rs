//! Fuzzes [`wormhole_fuzz::serial`].

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| wormhole_fuzz::serial::run(input));
