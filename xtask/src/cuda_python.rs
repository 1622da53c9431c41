//! `cargo xtask cuda-python`: the tests of NVIDIA's Python bindings, unmodified, over the CPU device.
//!
//! They are in the packages of two versions, which go with CUDA 11.8 and 12.6: each with a runtime and a compiler of
//! its own time.

use std::fs;
use std::path::Path;

use crate::command::{Failure, Run, step};
use crate::pytest::{Outcomes, PLUGIN, install, package};
use crate::stage;

/// Part of the applicable tests that must pass, in percent.
const LEAST: usize = 90;
/// Seconds after which a test counts as failed.
const TIMEOUT: u32 = 100;
/// CUDA versions of the bindings, each with a list of packages.
const VERSIONS: [&str; 2] = ["11.8", "12.6"];
/// Modules of tests. Each has a process of its own, since a test that fails leaves its context current.
const MODULES: [&str; 6] = [
    "test_cuda",
    "test_cudart",
    "test_nvrtc",
    "test_kernelParams",
    "test_interoperability",
    "test_cython",
];

/// Installs the bindings under `target/cuda-python`, runs their tests, and tells whether enough of them pass.
pub fn cuda_python(root: &Path) -> Result<bool, Failure> {
    let stage = stage::stage(root)?;
    let mut enough = true;
    for version in VERSIONS {
        let folder = root.join("target/cuda-python").join(version);
        let requirements = root.join(format!("xtask/cuda_python/{version}.txt"));
        install("NVIDIA's Python bindings", &requirements, &folder)?;
        // The bindings open the runtime compiler by its name.
        let libraries = package(&folder, "nvidia/cuda_nvrtc")?.join("lib");
        let mut text = String::new();
        for module in MODULES {
            let report = folder.join("report.txt");
            // What an earlier run left is not this one's.
            let _ = fs::remove_file(&report);
            step(&format!(
                "running {module} of the bindings of CUDA {version}"
            ));
            // Failed tests make pytest fail; the report says how many.
            let (_, _) = Run::new(stage.wormhole())
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
                .env("PYTHONDONTWRITEBYTECODE", "1")
                .env("LD_LIBRARY_PATH", &libraries)
                .dir(&folder)
                .tee()?;
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
