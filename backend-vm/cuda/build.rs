//! Generates the driver's entry points from the API table: those of `entry_points.txt`.

use std::path::{Path, PathBuf};
use std::{env, fs};

const TABLE: &str = "../../shared-ring/api";
const NAMES: &str = "entry_points.txt";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed={TABLE}/driver.idl");
    println!("cargo::rerun-if-changed={NAMES}");
    let table = wormhole_idl::load(Path::new(TABLE))?;
    let entry_points = wormhole_idl::entry_points(&table, &fs::read_to_string(NAMES)?)?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("entry_points.rs"), entry_points)?;
    Ok(())
}
