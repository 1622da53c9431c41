//! PTX text.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wormhole_ptx::Module;

fuzz_target!(|text: &str| {
    if let Err(error) = Module::from_ptx(text) {
        _ = error.to_string();
    }
});
