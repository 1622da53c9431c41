//! Fuzzes [`wormhole_fuzz::ring_consumer`].

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| wormhole_fuzz::ring_consumer::run(input));
