//! Checks of the repository and of the staged installation. Each returns its complaints, one sentence each.

mod glibc;
mod history;
mod paths;
mod prose;

pub use glibc::glibc;
pub use history::history;
pub use paths::paths;
pub use prose::prose;

use std::path::Path;

use crate::command::{Failure, Run};

/// Prints each complaint and returns true if there is none.
pub fn holds(complaints: &[String]) -> bool {
    for complaint in complaints {
        eprintln!("xtask: {complaint}");
    }
    complaints.is_empty()
}

/// Runs git in the checkout and returns its output, even if another user owns the checkout. Returns `None` if the
/// folder is no git checkout.
fn git(root: &Path, args: &[&str]) -> Result<Option<String>, Failure> {
    if !root.join(".git").exists() {
        return Ok(None);
    }
    let run = Run::new("git")
        .dir(root)
        .args(["-c", "safe.directory=*"])
        .args(args);
    let (status, text) = run.output()?;
    if !status.success() {
        return Err(Failure::new(format!(
            "git {} ended with {status}",
            args.join(" ")
        )));
    }
    Ok(Some(text))
}
