//! Parses a module image as a program passes it to the driver: PTX, ELF or a fat binary.

use wormhole_ptx::Module;

pub fn run(image: &[u8]) {
    if let Err(error) = Module::load(image) {
        _ = error.to_string();
    }
}
