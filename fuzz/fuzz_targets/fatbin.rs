//! Fuzzes [`wormhole_fuzz::fatbin`].

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| wormhole_fuzz::fatbin::run(input));
