//! `cargo xtask fixtures`: compiles the images that tests of the PTX engine and of the CUDA device read, from the sources
//! beside them.

use std::fs;
use std::path::Path;

use crate::command::{Failure, Run};
use crate::toolchain;

/// Compiles the images again with nvcc, into the folders of their sources, or into `ptx` and `cuda` below `into`.
pub fn fixtures(root: &Path, into: Option<&Path>) -> Result<(), Failure> {
    let toolkit = toolchain::ensure(root)?;
    for device in ["ptx", "cuda"] {
        let sources = root.join(format!("backend-vm/{device}/tests/data"));
        let output = into.map_or_else(|| sources.clone(), |into| into.join(device));
        fs::create_dir_all(&output)
            .map_err(|error| Failure::new(format!("cannot make {}: {error}", output.display())))?;
        let script = sources.join("make.sh");
        Run::new("sh")
            .args([script, toolkit.nvcc(), output])
            .check()?;
    }
    Ok(())
}
