//! Prints the list of calls for `programs/input/bad_input.cu`, to run that program on a native driver by hand.

use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../api"));
    let table = wormhole_idl::load(folder)?;
    let called = std::fs::read_to_string(folder.join("called.txt"))?;
    print!("{}", wormhole_idl::calls(&table, &called));
    Ok(())
}
