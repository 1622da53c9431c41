//! Generates from the API table the operations that are one driver call each, and the driver's entry points that these
//! operations and the sources call.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

const TABLE: &str = "../../shared-ring/api";
const SOURCES: &str = "src";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed={TABLE}");
    println!("cargo::rerun-if-changed={SOURCES}");
    let table = wormhole_idl::load(Path::new(TABLE))?;
    let mut sources = Vec::new();
    read(Path::new(SOURCES), &mut sources)?;
    let driver_calls = wormhole_idl::cuda_driver_calls(&table)?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("driver_calls.rs"), &driver_calls)?;
    sources.push(driver_calls);
    let entry_points = wormhole_idl::entry_points(&table, &sources)?;
    fs::write(out.join("entry_points.rs"), entry_points)?;
    Ok(())
}

/// Adds the text of each source in a folder.
fn read(folder: &Path, sources: &mut Vec<String>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            read(&path, sources)?;
        } else {
            sources.push(fs::read_to_string(path)?);
        }
    }
    Ok(())
}
