//! Fuzzes [`wormhole_fuzz::cuda_image`].

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| wormhole_fuzz::cuda_image::run(input));
