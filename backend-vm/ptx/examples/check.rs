//! Prints for each kernel of an image whether this engine can run it.
//!
//! `cargo run -p wormhole-ptx --example check -- IMAGE…`

use std::process::ExitCode;

use wormhole_ptx::Module;

fn main() -> ExitCode {
    let mut status = ExitCode::SUCCESS;
    for path in std::env::args().skip(1) {
        let image = match std::fs::read(&path) {
            Ok(image) => image,
            Err(error) => {
                eprintln!("{path}: {error}");
                return ExitCode::FAILURE;
            }
        };
        let module = match Module::load(&image) {
            Ok(module) => module,
            Err(error) => {
                println!("{path}: {error}");
                status = ExitCode::FAILURE;
                continue;
            }
        };
        let names: Vec<String> = module.kernel_names().map(str::to_owned).collect();
        let addresses = vec![wormhole_ptx::LOWEST_GLOBAL; module.variables().len()];
        let program = module.link(addresses);
        for name in names {
            match program.kernel(&name) {
                Ok(kernel) => println!(
                    "{path}: {name}: runs, {} registers",
                    kernel.register_estimate()
                ),
                Err(error) => {
                    println!("{path}: {error}");
                    status = ExitCode::FAILURE;
                }
            }
        }
    }
    status
}
