//! Fuzzes [`wormhole_fuzz::ptx_run`].

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| wormhole_fuzz::ptx_run::run(input));
