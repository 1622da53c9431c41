//! Parses PTX text and decodes the kernels of valid modules.

use wormhole_ptx::Module;

use crate::text_of;

pub fn run(input: &[u8]) {
    let text = text_of(input);
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
}
