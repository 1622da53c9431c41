//! Fuzzes [`wormhole_fuzz::snapshot`].

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| wormhole_fuzz::snapshot::run(input));
