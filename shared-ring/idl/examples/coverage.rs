//! Prints the coverage page.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../api/driver.idl");
    let table = wormhole_idl::parse(&std::fs::read_to_string(path)?)?;
    print!("{}", wormhole_idl::coverage(&table));
    Ok(())
}
