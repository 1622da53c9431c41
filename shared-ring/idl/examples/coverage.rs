//! Prints the coverage page.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../api");
    let table = wormhole_idl::load(folder.as_ref())?;
    print!("{}", wormhole_idl::coverage(&table));
    Ok(())
}
