//! Checks a module image as the CUDA device does: the driver gets whole ELF files and text, or nothing.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wormhole_cuda_device::fuzzing::take_apart;

fuzz_target!(|image: &[u8]| {
    take_apart(image, false);
    take_apart(image, true);
});
