//! `cargo xtask cuda-python`: runs the unmodified tests of NVIDIA's Python bindings on the CPU device.
//!
//! The packages of two versions hold tests: those for CUDA 11.8 and 12.6. Each is installed with the NVRTC that its
//! requirements name.

use std::fs;
use std::path::Path;

use clap::Args;
use clap::builder::PossibleValuesParser;

use crate::command::{Failure, Run, step};
use crate::pytest::{Outcomes, PLUGIN, compiling_into, install, package};
use crate::stage;

/// Part of the applicable tests that must pass, in percent.
const LEAST: usize = 90;
/// Seconds after which a test counts as failed.
const TIMEOUT: u32 = 100;
/// CUDA versions of the bindings. Each has a requirements file.
const VERSIONS: [&str; 2] = ["11.8", "12.6"];
/// Test modules. Each runs in its own process, because a failing test leaves its context current.
const MODULES: [&str; 6] = [
    "test_cuda",
    "test_cudart",
    "test_nvrtc",
    "test_kernelParams",
    "test_interoperability",
    "test_cython",
];

#[derive(Debug, Args)]
pub struct Options {
    /// Run the tests of the bindings of this CUDA version alone.
    #[arg(long, value_name = "VERSION", value_parser = PossibleValuesParser::new(VERSIONS))]
    bindings: Option<String>,
    /// Run this test module alone.
    #[arg(long, value_parser = PossibleValuesParser::new(MODULES))]
    module: Option<String>,
}

/// Installs the bindings under `target/cuda-python`, runs their tests, and returns whether enough of them pass.
/// `WORMHOLE_STAGE` names the installation; without it the sources are staged first.
pub fn cuda_python(root: &Path, options: &Options) -> Result<bool, Failure> {
    let stage = stage::given_or_built(root)?;
    let is_wanted =
        |choice: &Option<String>, name: &str| choice.as_deref().is_none_or(|choice| choice == name);
    let versions = VERSIONS.into_iter();
    let mut enough = true;
    for version in versions.filter(|version| is_wanted(&options.bindings, version)) {
        let folder = root.join("target/cuda-python").join(version);
        let requirements = root.join(format!("xtask/cuda_python/{version}.txt"));
        install("NVIDIA's Python bindings", &requirements, &folder)?;
        // The bindings open the runtime compiler by its name.
        let libraries = package(&folder, "nvidia/cuda_nvrtc")?.join("lib");
        let mut text = String::new();
        let modules = MODULES.into_iter();
        for module in modules.filter(|module| is_wanted(&options.module, module)) {
            let report = folder.join("report.txt");
            // Removes the report of an earlier run.
            let _ = fs::remove_file(&report);
            step(&format!(
                "running {module} of the bindings of CUDA {version}"
            ));
            let run = Run::new(stage.wormhole())
                .args(["run", "--placement", "process", "--device", "cpu"])
                .args(["--quiet", "--"])
                .args([folder.join("bin/python").as_path()])
                .args(["-m", "pytest", "--quiet", "-p", "wormhole_outcomes"])
                .args(["-p", "wormhole_initialised"])
                .args(["-p", "no:cacheprovider", "--tb=no", "--no-summary"])
                .args([
                    format!("--timeout={TIMEOUT}"),
                    format!("--outcomes={}", report.display()),
                ])
                .args(["--pyargs", &format!("cuda.tests.{module}")])
                .env("PYTHONPATH", root.join(PLUGIN))
                .env("LD_LIBRARY_PATH", &libraries)
                .dir(&folder);
            // pytest exits with an error if tests fail; the report holds their number.
            let (_, _) = compiling_into(run, &folder).tee()?;
            text += &fs::read_to_string(&report).map_err(|error| {
                Failure::new(format!("cannot read {}: {error}", report.display()))
            })?;
        }
        let outcomes =
            Outcomes::read(&text).ok_or_else(|| Failure::new("the reports are not understood"))?;
        outcomes.print(&format!("cuda-python {version}"));
        enough &= outcomes.percent() >= LEAST;
    }
    Ok(enough)
}
