//! Builds Wormhole and lays it out as it is installed: `target/wormhole/{bin,lib/wormhole}`.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::command::{Failure, cargo, step};

/// The only target there is; naming it makes cargo keep build scripts off the static flags.
pub const TARGET: &str = "x86_64-unknown-linux-gnu";

/// A staged installation.
#[derive(Debug, Clone)]
pub struct Stage {
    pub prefix: PathBuf,
}

impl Stage {
    pub fn wormhole(&self) -> PathBuf {
        self.prefix.join("bin/wormhole")
    }
}

/// Builds everything in release form and stages it under `root/target/wormhole`.
pub fn stage(root: &Path) -> Result<Stage, Failure> {
    step("building wormhole, its backend and the frontend libraries");
    cargo(root)
        .args([
            "build",
            "--release",
            "--package",
            "wormhole",
            "--package",
            "wormhole-supervisor",
            "--package",
            "wormhole-worker",
        ])
        .args(["--package", "wormhole-guest"])
        .args(["--package", "wormhole-nvml"])
        .check()?;
    // The first process of an image has no libraries to load.
    cargo(root)
        .args([
            "build",
            "--release",
            "--package",
            "wormhole-init",
            "--target",
            TARGET,
        ])
        .env("RUSTFLAGS", "-C target-feature=+crt-static")
        .check()?;

    let target = root.join("target");
    let prefix = target.join("wormhole");
    let release = target.join("release");
    for (source, destination) in [
        (release.join("wormhole"), "bin/wormhole"),
        (
            release.join("wormhole-supervisor"),
            "lib/wormhole/wormhole-supervisor",
        ),
        (
            release.join("wormhole-worker"),
            "lib/wormhole/wormhole-worker",
        ),
        (release.join("libcuda.so"), "lib/wormhole/libcuda.so.1"),
        (
            release.join("libnvidia_ml.so"),
            "lib/wormhole/libnvidia-ml.so.1",
        ),
        (
            target.join(TARGET).join("release/wormhole-init"),
            "lib/wormhole/wormhole-init",
        ),
    ] {
        place(&source, &prefix.join(destination))?;
    }
    // Some programs open the libraries by these names, under which a toolkit has libraries that only link.
    for name in ["libcuda.so", "libnvidia-ml.so"] {
        let link = prefix.join("lib/wormhole").join(name);
        let target = format!("{name}.1");
        if fs::read_link(&link).is_ok_and(|found| found == Path::new(&target)) {
            continue;
        }
        symlink(&target, &link)
            .map_err(|error| Failure::new(format!("cannot place {}: {error}", link.display())))?;
    }
    Ok(Stage { prefix })
}

/// Copies by way of a rename, so that a running program keeps its file.
pub fn place(source: &Path, destination: &Path) -> Result<(), Failure> {
    let copy = || {
        if let Some(folder) = destination.parent() {
            fs::create_dir_all(folder)?;
        }
        let fresh = destination.with_extension("fresh");
        fs::copy(source, &fresh)?;
        fs::rename(&fresh, destination)
    };
    copy().map_err(|error| Failure::new(format!("cannot place {}: {error}", destination.display())))
}
