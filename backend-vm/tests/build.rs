//! Generates an example of each message.

use std::path::{Path, PathBuf};
use std::{env, fs};

const TABLE: &str = "../../shared-ring/api";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed={TABLE}");
    let table = wormhole_idl::load(Path::new(TABLE))?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("examples.rs"), wormhole_idl::examples(&table))?;
    Ok(())
}
