//! Fuzzes [`wormhole_fuzz::pair_decode`].

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| wormhole_fuzz::pair_decode::run(input));
