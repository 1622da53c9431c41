//! Writes an initial RAM disk for a guest of another monitor, such as QEMU: the guest image's modules, a program and its
//! libraries, the guest libraries, and `wormhole-init`, which runs the program with its output on the console.
//!
//! `cargo run -p wormhole-images --example initramfs OUTPUT STAGE WINDOW_BYTES PROGRAM [ARGUMENT…]`; STAGE is the folder
//! of `cargo xtask stage`, with images in it.

use std::error::Error;
use std::fs;
use std::path::PathBuf;

use wormhole_images::{ConsoleRun, Image, Kernel, console_overlay};

fn main() -> Result<(), Box<dyn Error>> {
    let mut given = std::env::args_os().skip(1);
    let mut next = |what: &str| given.next().ok_or(format!("{what} is missing"));
    let (output, stage) = (next("OUTPUT")?, PathBuf::from(next("STAGE")?));
    let window = next("WINDOW_BYTES")?.to_string_lossy().parse()?;
    let program = next("PROGRAM")?;
    let part = |name: &str| stage.join("lib/wormhole").join(name);
    let overlay = console_overlay(&ConsoleRun {
        init: part("wormhole-init"),
        frontends: ["libcuda.so.1", "libnvidia-ml.so.1"].map(part).to_vec(),
        program: program.into(),
        arguments: given.collect(),
        take: Vec::new(),
        window,
    })?;
    let image = Image::guest(&stage.join("share/wormhole/images"), Kernel::V6_1)?;
    let mut bytes = fs::read(&image.modules)?;
    bytes.extend(overlay);
    fs::write(output, bytes)?;
    println!("kernel: {}", image.kernel.display());
    Ok(())
}
