//! Generates the C exports from the API table, and names the library as programs look for it.

use std::path::PathBuf;
use std::{env, fs};

const TABLE: &str = "../shared-ring/api/driver.idl";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed={TABLE}");
    let table = wormhole_idl::parse(&fs::read_to_string(TABLE)?)?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("exports.rs"), wormhole_idl::exports(&table))?;
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // Handlers of forks and exits point into the library.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    Ok(())
}
