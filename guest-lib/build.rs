//! Generates the C exports from the API table, and names the library as programs look for it.

use std::path::{Path, PathBuf};
use std::{env, fs};

const TABLE: &str = "../shared-ring/api";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed={TABLE}/driver.idl");
    println!("cargo::rerun-if-changed={TABLE}/messages");
    println!("cargo::rerun-if-changed={TABLE}/types.idl");
    let table = wormhole_idl::load(Path::new(TABLE))?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("exports.rs"), wormhole_idl::exports(&table))?;
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // Handlers of forks and exits point into the library.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    Ok(())
}
