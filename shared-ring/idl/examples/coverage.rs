//! Prints the coverage page.

use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../api"));
    let table = wormhole_idl::load(folder)?;
    let tested = wormhole_idl::Tested::load(&folder.join("tested.txt"))?;
    print!("{}", wormhole_idl::coverage(&table, &tested));
    Ok(())
}
