//! Fuzzes [`wormhole_fuzz::driver_file`].

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| wormhole_fuzz::driver_file::run(input));
