//! Parses a module image as a program passes it to the driver: PTX, ELF or a fat binary.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wormhole_ptx::Module;

fuzz_target!(|image: &[u8]| {
    if let Err(error) = Module::load(image) {
        _ = error.to_string();
    }
});
