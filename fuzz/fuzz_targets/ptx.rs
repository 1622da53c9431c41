//! Parses PTX text and decodes the kernels of valid modules.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wormhole_ptx::Module;

fuzz_target!(|text: &str| {
    let module = match Module::from_ptx(text) {
        Ok(module) => module,
        Err(error) => {
            _ = error.to_string();
            return;
        }
    };
    let names: Vec<String> = module.kernel_names().map(str::to_owned).collect();
    let addresses = vec![1 << 40; module.variables().len()];
    let program = module.link(addresses);
    for name in names {
        if let Err(error) = program.kernel(&name) {
            _ = error.to_string();
        }
    }
});
