//! Links for older glibc versions with zig, from PyPI, which knows the symbols of each glibc release.

use std::fs;
use std::path::{Path, PathBuf};

use crate::command::{Failure, Run, pip, step};

const PACKAGES: [&str; 2] = ["ziglang==0.15.2", "cargo-zigbuild==0.24.0"];

/// Oldest glibc that Rust's standard library supports. Libraries for guests are linked against it.
pub const OLDEST: &str = "2.17";

/// Oldest glibc of a distribution still in use that has `memfd_create` and `getrandom`, which host programs need.
pub const HOST: &str = "2.28";

/// An installed linker.
#[derive(Debug, Clone)]
pub struct Linker {
    folder: PathBuf,
}

/// Returns the linker in `root/target/linker`. Installs it first if it is missing or outdated.
pub fn ensure(root: &Path) -> Result<Linker, Failure> {
    let folder = root.join("target/linker");
    let installed = folder.join("installed");
    let wanted = PACKAGES.join("\n");
    if !fs::read_to_string(&installed).is_ok_and(|text| text == wanted) {
        step("installing zig, the linker, from PyPI (95 MB)");
        pip(&folder, &PACKAGES)?;
        fs::write(&installed, wanted).map_err(|error| {
            Failure::new(format!("cannot write {}: {error}", installed.display()))
        })?;
    }
    Ok(Linker { folder })
}

impl Linker {
    /// Starts a `cargo build` for machines with this glibc.
    pub fn build(&self, root: &Path, glibc: &str) -> Run {
        Run::new(self.folder.join("bin/cargo-zigbuild"))
            .dir(root)
            .args(["zigbuild", "--target"])
            .args([format!("x86_64-unknown-linux-gnu.{glibc}")])
            .env("CARGO_ZIGBUILD_ZIG_PATH", self.folder.join("ziglang/zig"))
            // Keeps all cache files out of the user's own cache folders.
            .env("CARGO_ZIGBUILD_CACHE_DIR", self.folder.join("cache"))
            .env("ZIG_GLOBAL_CACHE_DIR", self.folder.join("cache/zig"))
            .env("ZIG_LOCAL_CACHE_DIR", self.folder.join("cache/zig"))
    }
}
