//! Python test suites of other projects: virtual environments and outcomes.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use crate::command::{Failure, Run, step};

/// Folder of the reporting plugins, below the project's root.
pub const PLUGIN: &str = "xtask/pytest";

/// Outcomes of a test suite.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Outcomes<'a> {
    pub passed: usize,
    /// Failed tests, each with its reason.
    pub failed: Vec<(&'a str, &'a str)>,
    /// Number of skipped tests by reason.
    pub skipped: BTreeMap<&'a str, usize>,
}

impl<'a> Outcomes<'a> {
    /// Parses a report: lines of outcome, test and reason, separated by tabs.
    pub fn read(report: &'a str) -> Option<Self> {
        let mut outcomes = Self::default();
        for line in report.lines() {
            let mut fields = line.splitn(3, '\t');
            let (outcome, test, reason) = (fields.next()?, fields.next()?, fields.next()?);
            match outcome {
                "passed" => outcomes.passed += 1,
                "failed" => outcomes.failed.push((test, reason)),
                "skipped" => *outcomes.skipped.entry(reason).or_default() += 1,
                _ => return None,
            }
        }
        Some(outcomes)
    }

    /// Returns the percentage of the applicable tests that passed, rounded down.
    pub fn percent(&self) -> usize {
        (100 * self.passed)
            .checked_div(self.passed + self.failed.len())
            .unwrap_or(0)
    }

    /// Prints the reasons, and the counts under the suite's name.
    pub fn print(&self, name: &str) {
        for (reason, count) in &self.skipped {
            println!("skipped {count}: {reason}");
        }
        for (test, reason) in &self.failed {
            println!("failed {test}: {reason}");
        }
        println!(
            "{name}: {} passed, {} failed, {} skipped ({} % of those applicable passed)",
            self.passed,
            self.failed.len(),
            self.skipped.values().sum::<usize>(),
            self.percent()
        );
    }
}

/// Creates the virtual environment unless it exists with exactly these packages. The environment has no pip, for which
/// Debian has a package of its own. No module is compiled: tests import few of them, and [`compiling_into`] keeps those.
/// Commands that need the environment at the same time wait for the first one.
pub fn install(what: &str, requirements: &Path, folder: &Path) -> Result<(), Failure> {
    let failed = |path: &Path, error: std::io::Error| {
        Failure::new(format!("cannot use {}: {error}", path.display()))
    };
    let wanted = fs::read_to_string(requirements).map_err(|error| failed(requirements, error))?;
    let lock = folder.with_added_extension("lock");
    if let Some(parent) = folder.parent() {
        fs::create_dir_all(parent).map_err(|error| failed(parent, error))?;
    }
    let locked = File::create(&lock).and_then(|file| file.lock().map(|()| file));
    let _locked = locked.map_err(|error| failed(&lock, error))?;
    let installed = folder.join("installed");
    if fs::read_to_string(&installed).is_ok_and(|text| text == wanted) {
        return Ok(());
    }
    step(&format!("installing {what} from PyPI"));
    Run::new("python3")
        .args(["-m", "venv", "--clear", "--without-pip"])
        .args([folder])
        .check()?;
    Run::new("python3")
        .args(["-m", "pip", "install", "--quiet", "--no-compile"])
        .args(["--root-user-action", "ignore"])
        .args(["--disable-pip-version-check", "--requirement"])
        .args([requirements])
        .args(["--target"])
        .args([package(folder, "")?])
        .check()?;
    fs::write(&installed, wanted).map_err(|error| failed(&installed, error))
}

/// Lets Python keep the modules that it compiles in a folder of the environment, those of the sources too.
pub fn compiling_into(run: Run, environment: &Path) -> Run {
    run.env("PYTHONPYCACHEPREFIX", environment.join("compiled"))
        .env("PYTHONDONTWRITEBYTECODE", "")
}

/// Returns the folder of a package in a virtual environment.
pub fn package(environment: &Path, name: &str) -> Result<PathBuf, Failure> {
    let libraries = environment.join("lib");
    let versions = fs::read_dir(&libraries)
        .map_err(|error| Failure::new(format!("cannot list {}: {error}", libraries.display())))?;
    versions
        .flatten()
        .map(|entry| entry.path().join("site-packages").join(name))
        .find(|path| path.is_dir())
        .ok_or_else(|| Failure::new(format!("there is no {name} below {}", libraries.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_are_counted_by_their_reasons() {
        let report = "passed\ta.py::x\t\nfailed\ta.py::y\t1 != 2\nskipped\tb.py::z\tno nvdisasm\n\
                      passed\tb.py::w\t\nskipped\tb.py::v\tno nvdisasm\n";
        let outcomes = Outcomes::read(report).unwrap();
        assert_eq!(outcomes.passed, 2);
        assert_eq!(outcomes.failed, [("a.py::y", "1 != 2")]);
        assert_eq!(outcomes.skipped, BTreeMap::from([("no nvdisasm", 2)]));
        assert_eq!(outcomes.percent(), 66);
        assert_eq!(Outcomes::read("").unwrap().percent(), 0);
        assert_eq!(Outcomes::read("fine\ta\tb\n"), None);
        assert_eq!(Outcomes::read("passed\ta.py\n"), None);
    }
}
