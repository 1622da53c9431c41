//! Generates messages, functions and round-trip tests from `driver.idl`.

use std::path::PathBuf;
use std::{env, fs};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=driver.idl");
    let table = wormhole_idl::parse(&fs::read_to_string("driver.idl")?)?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let next = env::var_os("CARGO_FEATURE_NEXT").is_some();
    fs::write(
        out.join("messages.rs"),
        wormhole_idl::messages(&table, next),
    )?;
    fs::write(out.join("functions.rs"), wormhole_idl::functions(&table))?;
    fs::write(
        out.join("round_trips.rs"),
        wormhole_idl::round_trips(&table, next),
    )?;
    Ok(())
}
