//! What must hold of the repository and of the staged installation. Each check returns its complaints, a sentence each.

mod glibc;
mod history;
mod paths;

pub use glibc::glibc;
pub use history::history;
pub use paths::paths;

use std::path::Path;

use crate::command::{Failure, Run};

/// Says each complaint, and whether there was none.
pub fn holds(complaints: &[String]) -> bool {
    for complaint in complaints {
        eprintln!("xtask: {complaint}");
    }
    complaints.is_empty()
}

/// What git says in the checkout, whoever owns that; none where there is no git or no checkout.
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
