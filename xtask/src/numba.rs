//! `cargo xtask numba`: Numba's own CUDA tests, unmodified, over the CPU device.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::command::{Failure, Run, step};
use crate::stage;

/// Part of the applicable tests that must pass, in percent.
const LEAST: usize = 80;
/// Seconds after which a test counts as failed.
const TIMEOUT: u32 = 300;
/// Room for the managed memory that one test takes: a tenth of the device's.
const WINDOW: &str = "4G";
const TESTS: &str = "numba.cuda.tests";

/// What came of the tests.
#[derive(Debug, Default, PartialEq, Eq)]
struct Outcomes<'a> {
    passed: usize,
    /// Tests and what was wrong.
    failed: Vec<(&'a str, &'a str)>,
    /// Why tests were skipped, and how many.
    skipped: BTreeMap<&'a str, usize>,
}

impl<'a> Outcomes<'a> {
    /// Reads a report: lines of outcome, test and reason.
    fn read(report: &'a str) -> Option<Self> {
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

    /// Percent of the applicable tests that passed, rounded down.
    fn percent(&self) -> usize {
        (100 * self.passed)
            .checked_div(self.passed + self.failed.len())
            .unwrap_or(0)
    }

    fn print(&self) {
        for (reason, count) in &self.skipped {
            println!("skipped {count}: {reason}");
        }
        for (test, reason) in &self.failed {
            println!("failed {test}: {reason}");
        }
        println!(
            "numba: {} passed, {} failed, {} skipped ({} % of those applicable passed)",
            self.passed,
            self.failed.len(),
            self.skipped.values().sum::<usize>(),
            self.percent()
        );
    }
}

/// Installs Numba under `target/numba`, runs its tests or those whose names match `filter`, and tells whether
/// enough of them pass. What came of each is in `target/numba.txt`.
pub fn numba(root: &Path, filter: Option<&str>) -> Result<bool, Failure> {
    let stage = stage::stage(root)?;
    let source = root.join("xtask/numba");
    let folder = root.join("target/numba");
    install(&source.join("requirements.txt"), &folder)?;

    let report = root.join("target/numba.txt");
    // What an earlier run left is not this one's.
    let _ = fs::remove_file(&report);
    step("running Numba's tests");
    let mut run = Run::new(stage.wormhole())
        .args(["run", "--placement", "process", "--device", "cpu"])
        .args(["--window", WINDOW, "--quiet", "--"])
        .args([folder.join("bin/python").as_path()])
        .args(["-m", "pytest", "--quiet", "--import-mode=importlib"])
        .args(["-p", "wormhole_numba", "-p", "no:cacheprovider"])
        .args([
            format!("--timeout={TIMEOUT}"),
            format!("--outcomes={}", report.display()),
        ])
        .args(["--tb=no", "--no-summary", "-W", "ignore", "--pyargs", TESTS])
        .env("PYTHONPATH", &source)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .dir(&folder);
    if let Some(filter) = filter {
        run = run.args(["-k", filter]);
    }
    // Failed tests make pytest fail; the report says how many.
    let (_, _) = run.tee()?;
    let text = fs::read_to_string(&report)
        .map_err(|error| Failure::new(format!("cannot read {}: {error}", report.display())))?;
    let outcomes = Outcomes::read(&text)
        .ok_or_else(|| Failure::new(format!("{} is not a report", report.display())))?;
    outcomes.print();
    Ok(outcomes.percent() >= LEAST)
}

/// Makes the environment, unless it is there with these very packages.
fn install(requirements: &Path, folder: &Path) -> Result<(), Failure> {
    let failed = |path: &Path, error: std::io::Error| {
        Failure::new(format!("cannot use {}: {error}", path.display()))
    };
    let wanted = fs::read_to_string(requirements).map_err(|error| failed(requirements, error))?;
    let installed = folder.join("installed");
    if fs::read_to_string(&installed).is_ok_and(|text| text == wanted) {
        return Ok(());
    }
    step("installing Numba and its tests' needs from PyPI (about 300 MB)");
    Run::new("python3")
        .args(["-m", "venv", "--clear"])
        .args([folder])
        .check()?;
    Run::new(folder.join("bin/pip"))
        .args(["install", "--quiet", "--requirement"])
        .args([requirements])
        .check()?;
    fs::write(&installed, wanted).map_err(|error| failed(&installed, error))
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
