//! Generates from the API table the driver's entry points that the benchmarks call.

use std::path::{Path, PathBuf};
use std::{env, fs};

const TABLE: &str = "../shared-ring/api";
const SOURCES: &str = "src";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed={TABLE}");
    println!("cargo::rerun-if-changed={SOURCES}");
    let table = wormhole_idl::load(Path::new(TABLE))?;
    let sources = wormhole_idl::sources(Path::new(SOURCES))?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let entry_points = wormhole_idl::entry_points(&table, &sources)?;
    fs::write(out.join("entry_points.rs"), entry_points)?;
    Ok(())
}
