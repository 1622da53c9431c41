//! Generates the C exports from NVML's table, and sets the library's soname.

use std::path::{Path, PathBuf};
use std::{env, fs};

const TABLE: &str = "../../shared-ring/api";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed={TABLE}/nvml.idl");
    let table = wormhole_idl::Nvml::load(Path::new(TABLE))?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("exports.rs"), wormhole_idl::nvml_exports(&table))?;
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
    // The pthread_atfork handler points into the library, so that it must never be unloaded.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    Ok(())
}
