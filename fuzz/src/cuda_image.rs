//! Checks a module image as the CUDA device does: the driver gets whole ELF files and text, or nothing.

use wormhole_cuda_device::fuzzing::take_apart;

pub fn run(image: &[u8]) {
    take_apart(image, false);
    take_apart(image, true);
}
