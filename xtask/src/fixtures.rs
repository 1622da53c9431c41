//! `cargo xtask fixtures`: compiles the images that tests of the PTX engine read, from the sources
//! beside them.

use std::path::Path;

use crate::command::{Failure, Run};
use crate::toolchain;

/// Compiles the images again with nvcc, into their folder.
pub fn fixtures(root: &Path) -> Result<(), Failure> {
    let toolkit = toolchain::ensure(root)?;
    let script = root.join("backend-vm/ptx/tests/data/make.sh");
    Run::new("sh").args([script, toolkit.nvcc()]).check()
}
