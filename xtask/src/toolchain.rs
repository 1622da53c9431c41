//! Installs NVIDIA's compiler and runtime for the project's CUDA programs, from PyPI and without
//! root.

use std::fs;
use std::path::{Path, PathBuf};

use crate::command::{Failure, Run, step};

/// Packages of nvcc and its dependencies, in matching versions.
const PACKAGES: [&str; 6] = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cuda-nvrtc==13.0.88",
];

/// An installed toolkit.
#[derive(Debug, Clone)]
pub struct Toolkit {
    folder: PathBuf,
}

impl Toolkit {
    /// Creates a toolkit whose `bin` and `lib` are in this folder.
    pub fn at(folder: PathBuf) -> Self {
        Self { folder }
    }

    pub fn nvcc(&self) -> PathBuf {
        self.folder.join("bin/nvcc")
    }

    /// Returns the folder of the runtime libraries: `libcudart.so.13`, `libcudart_static.a`,
    /// `libnvrtc.so.13`.
    pub fn libraries(&self) -> PathBuf {
        self.folder.join("lib")
    }

    pub fn runtime(&self) -> PathBuf {
        self.libraries().join("libcudart.so.13")
    }
}

/// Returns the toolkit in `root/target/cuda-toolkit`. Installs it first if it is missing or
/// outdated.
pub fn ensure(root: &Path) -> Result<Toolkit, Failure> {
    let folder = root.join("target/cuda-toolkit");
    let toolkit = Toolkit::at(folder.join("nvidia/cu13"));
    let installed = folder.join("installed");
    let wanted = PACKAGES.join("\n");
    if fs::read_to_string(&installed).is_ok_and(|text| text == wanted) {
        return Ok(toolkit);
    }

    step(
        "installing the CUDA 13.0 compiler and runtime from PyPI (190 MB to download, 490 MB on disk)",
    );
    Run::new("python3")
        .args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--upgrade",
            "--root-user-action",
            "ignore",
            "--target",
        ])
        .args([&folder])
        .args(PACKAGES)
        .check()?;
    // The package lacks the name under which the linker looks for the library.
    let link = toolkit.libraries().join("libcudart.so");
    if !link.exists() {
        std::os::unix::fs::symlink("libcudart.so.13", &link)
            .map_err(|error| Failure::new(format!("cannot make {}: {error}", link.display())))?;
    }
    fs::write(&installed, wanted)
        .map_err(|error| Failure::new(format!("cannot write {}: {error}", installed.display())))?;
    Ok(toolkit)
}
