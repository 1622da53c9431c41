//! Fuzzes [`wormhole_fuzz::virtio_pci`].

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| wormhole_fuzz::virtio_pci::run(input));
