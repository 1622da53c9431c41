//! `cargo xtask fixtures`: compiles the images that tests of the PTX engine and of the CUDA device read, from the sources
//! beside them.

use std::path::Path;

use crate::command::{Failure, Run};
use crate::toolchain;

/// Compiles the images again with nvcc, into their folders.
pub fn fixtures(root: &Path) -> Result<(), Failure> {
    let toolkit = toolchain::ensure(root)?;
    for device in ["ptx", "cuda"] {
        let script = root.join(format!("backend-vm/{device}/tests/data/make.sh"));
        Run::new("sh").args([script, toolkit.nvcc()]).check()?;
    }
    Ok(())
}
