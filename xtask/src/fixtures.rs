//! Images that tests of the PTX engine read, made by nvcc from the sources beside them.

use std::path::Path;

use crate::command::{Failure, Run};
use crate::toolchain;

/// Makes them anew in their folder.
pub fn fixtures(root: &Path) -> Result<(), Failure> {
    let toolkit = toolchain::ensure(root)?;
    let script = root.join("backend-vm/ptx/tests/data/make.sh");
    Run::new("sh").args([script, toolkit.nvcc()]).check()
}
