//! Links for machines older than this one: zig, from PyPI, knows which symbols each release of glibc has.

use std::fs;
use std::path::{Path, PathBuf};

use crate::command::{Failure, Run, pip, step};

const PACKAGES: [&str; 2] = ["ziglang==0.15.2", "cargo-zigbuild==0.24.0"];

/// The oldest glibc that Rust's standard library takes. What goes into guests makes do with its symbols.
pub const OLDEST: &str = "2.17";

/// The first glibc of a distribution still in use that has `memfd_create` and `getrandom`, which hosts need.
pub const HOST: &str = "2.28";

/// The installed linker.
#[derive(Debug, Clone)]
pub struct Linker {
    folder: PathBuf,
}

/// The linker in `root/target/linker`; installs it when it is not there yet.
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
    /// `cargo build` for machines with this glibc.
    pub fn build(&self, root: &Path, glibc: &str) -> Run {
        Run::new(self.folder.join("bin/cargo-zigbuild"))
            .dir(root)
            .args(["zigbuild", "--target"])
            .args([format!("x86_64-unknown-linux-gnu.{glibc}")])
            .env("CARGO_ZIGBUILD_ZIG_PATH", self.folder.join("ziglang/zig"))
            // Nothing is left in the user's own cache.
            .env("CARGO_ZIGBUILD_CACHE_DIR", self.folder.join("cache"))
            .env("ZIG_GLOBAL_CACHE_DIR", self.folder.join("cache/zig"))
            .env("ZIG_LOCAL_CACHE_DIR", self.folder.join("cache/zig"))
    }
}
