//! Generates from the API table the operations that are one driver call each, and the driver's entry points that these
//! operations and the sources call.

use std::path::{Path, PathBuf};
use std::{env, fs};

const TABLE: &str = "../../shared-ring/api";
const SOURCES: &str = "src";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed={TABLE}");
    println!("cargo::rerun-if-changed={SOURCES}");
    let table = wormhole_idl::load(Path::new(TABLE))?;
    let mut sources = wormhole_idl::sources(Path::new(SOURCES))?;
    let driver_calls = wormhole_idl::cuda_driver_calls(&table)?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("driver_calls.rs"), &driver_calls)?;
    sources.push(driver_calls);
    let entry_points = wormhole_idl::entry_points(&table, &sources)?;
    fs::write(out.join("entry_points.rs"), entry_points)?;
    Ok(())
}
