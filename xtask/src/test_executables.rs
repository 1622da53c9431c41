//! Builds the workspace's test executables, and runs them as cargo does, with the time that each took.

use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Deserialize;

use crate::command::{Failure, Run, cargo, step};
use crate::test_results::TestResults;

/// A built test executable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Executable {
    pub package: String,
    /// Name of its target: of the file below `tests`, or of the crate whose unit tests it has.
    pub target: String,
    path: PathBuf,
    /// Folder of its package, in which its tests expect to be.
    folder: PathBuf,
}

/// A message of cargo.
#[derive(Deserialize)]
struct Message {
    reason: String,
    manifest_path: Option<PathBuf>,
    target: Option<Target>,
    profile: Option<Profile>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

/// Builds the test executables of the workspace that have these names, or all of them if there are none. Either way
/// dependencies have the features that the whole workspace needs, so that nothing is built twice.
pub fn build(root: &Path, names: &[&str]) -> Result<Vec<Executable>, Failure> {
    step(&format!("building the tests {}", names.join(", ")));
    let (status, messages) = cargo(root)
        .args(["test", "--workspace", "--no-run"])
        .args(names.iter().flat_map(|name| ["--test", name]))
        .args(["--message-format", "json-render-diagnostics"])
        .output()?;
    if !status.success() {
        return Err(Failure::new("the tests do not build"));
    }
    Ok(messages.lines().filter_map(executable).collect())
}

/// Returns the executable that a line of cargo's messages reports, if it is one of tests.
fn executable(line: &str) -> Option<Executable> {
    let message: Message = serde_json::from_str(line).ok()?;
    if message.reason != "compiler-artifact" || !message.profile?.test {
        return None;
    }
    let folder = message.manifest_path?.parent()?.to_path_buf();
    Some(Executable {
        package: folder.file_name()?.to_str()?.to_owned(),
        target: message.target?.name,
        path: message.executable?,
        folder,
    })
}

/// Runs executables one after another, each with `prepare` applied to its command. A failure stops none of the others.
pub fn run(
    executables: &[Executable],
    prepare: impl Fn(Run) -> Run,
) -> Result<TestResults, Failure> {
    let mut total = TestResults::default();
    for executable in executables {
        let what = format!("{} of {}", executable.target, executable.package);
        let start = Instant::now();
        let run = prepare(Run::new(&executable.path).dir(&executable.folder));
        let (success, output) = run.tee()?;
        total += TestResults::of_libtest(&what, &output, success);
        step(&format!("{what} took {} s", start.elapsed().as_secs()));
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executables_of_tests_are_found_among_cargos_messages() {
        let message = |reason: &str, test: bool| {
            format!(
                r#"{{"reason":"{reason}","manifest_path":"/w/ring/Cargo.toml","target":{{"name":"loom","kind":["test"]}},
                    "profile":{{"test":{test}}},"executable":"/w/target/loom-1"}}"#
            )
        };
        let found = executable(&message("compiler-artifact", true)).expect("an executable");
        assert_eq!((&*found.package, &*found.target), ("ring", "loom"));
        assert_eq!(found.folder, Path::new("/w/ring"));
        assert_eq!(executable(&message("compiler-artifact", false)), None);
        assert_eq!(executable(&message("build-script-executed", true)), None);
        assert_eq!(executable("not JSON"), None);
    }
}
