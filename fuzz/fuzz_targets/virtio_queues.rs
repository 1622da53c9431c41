//! Fuzzes [`wormhole_fuzz::virtio_queues`].

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| wormhole_fuzz::virtio_queues::run(input));
