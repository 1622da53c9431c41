//! `cargo xtask setup`: everything that comes from elsewhere. Debian's packages, NVIDIA's compiler, Rust's
//! nightly tools, the kernels of the images. Each part is looked at first, so that a second run does nothing.

mod apt;
mod host;

use std::path::{Path, PathBuf};
use std::time::Instant;

use wormhole_images::{
    BuildOptions, Image, ImageError, Kernel, build_emulated_host, build_guest,
    build_guest_that_takes_its_window,
};

use crate::command::{Failure, Run, megabytes, step};
use crate::{earlier, linker, programs, toolchain};
use host::Facts;

/// The fuzzers' runner.
const CARGO_FUZZ: &str = "cargo-fuzz@0.13.2";

/// Folders below `target` that set-up fills.
const FOLDERS: [&str; 7] = [
    "apt",
    "cuda-toolkit",
    "cuda11-toolkit",
    "cuda12-toolkit",
    "linker",
    "programs",
    "wormhole/share/wormhole/images",
];

/// A builder of one kind of image.
type Build = fn(&BuildOptions<'_>) -> Result<Image, ImageError>;

/// Installs, downloads and builds what the demo and `wormhole run` need and is not there yet; with `tests`, also what
/// only the tests need. Says at the end how long that took and what it takes.
pub fn setup(root: &Path, tests: bool) -> Result<(), Failure> {
    let start = Instant::now();
    // Nothing is changed on a machine on which the rest cannot work.
    let plan = Facts::of_this_machine().plan(tests).map_err(Failure::new)?;
    apt::install(&plan, root)?;
    linker::ensure(root)?;
    programs::build(&toolchain::ensure(root)?, root)?;
    build_images(
        root,
        &[
            (build_guest, Kernel::V6_1),
            (build_emulated_host, Kernel::V6_1),
        ],
    )?;
    if tests {
        nightly()?;
        earlier::build_programs(root)?;
        build_images(
            root,
            &[
                (build_guest, Kernel::V6_12),
                (build_guest_that_takes_its_window, Kernel::V6_12),
            ],
        )?;
    }
    let mut total = 0;
    let mut parts = Vec::new();
    for folder in FOLDERS {
        let bytes = bytes_below(&root.join("target").join(folder));
        total += bytes;
        parts.extend((bytes > 0).then(|| format!("{folder} {}", megabytes(bytes))));
    }
    step(&format!(
        "set up in {} s; in target: {}; {} in all",
        start.elapsed().as_secs(),
        parts.join(", "),
        megabytes(total)
    ));
    Ok(())
}

fn build_images(root: &Path, wanted: &[(Build, Kernel)]) -> Result<(), Failure> {
    let folder = images(root);
    for &(build, kernel) in wanted {
        build(&BuildOptions {
            folder: &folder,
            kernel,
            rebuild: false,
            progress: &step,
        })
        .map_err(|error| Failure::new(chain(&error)))?;
    }
    Ok(())
}

/// The folder of images in which the staged `wormhole run` looks: `$WORMHOLE_IMAGES`, or the installation's.
pub fn images(root: &Path) -> PathBuf {
    std::env::var_os("WORMHOLE_IMAGES")
        .filter(|folder| !folder.is_empty())
        .map_or_else(
            || root.join("target/wormhole/share/wormhole/images"),
            PathBuf::from,
        )
}

/// What the ring's tests under miri and the fuzz targets need.
fn nightly() -> Result<(), Failure> {
    if !host::has_miri() {
        step("installing Rust's nightly toolchain with miri");
        Run::new("rustup")
            .args(["toolchain", "install", "nightly", "--profile", "minimal"])
            .args(["--component", "miri", "--component", "rust-src"])
            .check()?;
    }
    if !host::has_cargo_fuzz() {
        step("installing cargo-fuzz");
        Run::new("cargo")
            .args(["install", "--quiet", "--locked", CARGO_FUZZ])
            .check()?;
    }
    Ok(())
}

/// The bytes of all files below a folder; what cannot be read counts as nothing.
fn bytes_below(folder: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return 0;
    };
    entries
        .flatten()
        .filter_map(|entry| Some((entry.path(), entry.metadata().ok()?)))
        .map(|(path, data)| {
            if data.is_dir() {
                bytes_below(&path)
            } else {
                data.len()
            }
        })
        .sum()
}

/// An error and its causes as one sentence.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}
