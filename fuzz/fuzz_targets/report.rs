//! Fuzzes [`wormhole_fuzz::report`].

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| wormhole_fuzz::report::run(input));
