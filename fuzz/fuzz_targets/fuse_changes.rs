//! Fuzzes [`wormhole_fuzz::fuse_changes`].

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| wormhole_fuzz::fuse_changes::run(input));
