//! Generates messages, functions and round-trip tests from the table.

use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=driver.idl");
    println!("cargo::rerun-if-changed=messages");
    println!("cargo::rerun-if-changed=nvml.idl");
    println!("cargo::rerun-if-changed=types.idl");
    println!("cargo::rerun-if-changed=constants.idl");
    println!("cargo::rerun-if-changed=results.idl");
    let table = wormhole_idl::load(Path::new("."))?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let next = env::var_os("CARGO_FEATURE_NEXT").is_some();
    fs::write(
        out.join("messages.rs"),
        wormhole_idl::messages(&table, next),
    )?;
    fs::write(out.join("functions.rs"), wormhole_idl::functions(&table))?;
    fs::write(out.join("constants.rs"), wormhole_idl::constants(&table))?;
    fs::write(out.join("results.rs"), wormhole_idl::results(&table))?;
    fs::write(
        out.join("round_trips.rs"),
        wormhole_idl::round_trips(&table, next),
    )?;
    let nvml = wormhole_idl::Nvml::load(Path::new("."))?;
    fs::write(out.join("nvml.rs"), wormhole_idl::nvml_tables(&nvml))?;
    Ok(())
}
