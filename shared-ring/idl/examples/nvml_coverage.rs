//! Prints the coverage page of NVML.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../api");
    let table = wormhole_idl::Nvml::load(folder.as_ref())?;
    print!("{}", wormhole_idl::nvml_coverage(&table));
    Ok(())
}
