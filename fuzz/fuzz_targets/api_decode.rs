//! Fuzzes [`wormhole_fuzz::api_decode`].

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| wormhole_fuzz::api_decode::run(input));
