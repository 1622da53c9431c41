//! Builds the demo's programs and the PTX engine's kernels with earlier CUDA releases. Their nvcc comes from Debian,
//! because PyPI has only parts of it.

use std::fs;
use std::path::{Path, PathBuf};

use crate::command::{Failure, Run, pip, step};
use crate::nvcc::{self, Build, Link};
use crate::programs;
use crate::stage::place;
use crate::toolchain::Toolkit;

const PACKAGE: &str = "nvidia-cuda-toolkit";

/// A CUDA release whose compiler builds the programs.
#[derive(Debug)]
struct Release {
    version: &'static str,
    /// Folder of the programs built with it.
    folder: &'static str,
    /// Source line of the Debian archive that holds it.
    source: &'static str,
    debian: &'static str,
    /// PyPI packages of the headers and the runtime library.
    wheels: [&'static str; 3],
    /// Soname of the runtime library.
    runtime: &'static str,
    /// Additional flags for this release's nvcc.
    flags: &'static [&'static str],
    /// Other runtime versions for the same programs.
    others: &'static [Runtime],
}

/// A runtime library with the same soname as a release's.
#[derive(Debug)]
struct Runtime {
    /// Folder that holds the library and copies of the programs.
    folder: &'static str,
    wheel: &'static str,
}

const CUDA_12: Release = Release {
    version: "12.4",
    folder: "cuda12",
    source: "http://deb.debian.org/debian trixie non-free",
    debian: "13",
    wheels: [
        "nvidia-cuda-runtime-cu12==12.4.127",
        "nvidia-cuda-nvcc-cu12==12.4.131",
        "nvidia-cuda-cccl-cu12==12.9.27",
    ],
    runtime: "libcudart.so.12",
    flags: &[],
    others: &[
        Runtime {
            folder: "cuda12.1",
            wheel: "nvidia-cuda-runtime-cu12==12.1.105",
        },
        Runtime {
            folder: "cuda12.9",
            wheel: "nvidia-cuda-runtime-cu12==12.9.79",
        },
    ],
};

const CUDA_11: Release = Release {
    version: "11.8",
    folder: "cuda11",
    source: "http://deb.debian.org/debian bookworm non-free",
    debian: "12",
    wheels: [
        "nvidia-cuda-runtime-cu11==11.8.89",
        "nvidia-cuda-nvcc-cu11==11.8.89",
        // The last version whose headers support CUDA 11.
        "nvidia-cuda-cccl-cu12==12.9.27",
    ],
    runtime: "libcudart.so.11.0",
    // This nvcc supports no GCC after 11.
    flags: &["-allow-unsupported-compiler"],
    others: &[],
};

/// Paths of the tools in the package, and the paths where nvcc looks for them.
const TOOLS: [(&str, &str); 8] = [
    ("usr/lib/nvidia-cuda-toolkit/bin/nvcc", "bin/nvcc"),
    ("usr/lib/nvidia-cuda-toolkit/bin/cicc", "bin/cicc"),
    (
        "usr/lib/nvidia-cuda-toolkit/bin/crt/link.stub",
        "bin/crt/link.stub",
    ),
    (
        "usr/lib/nvidia-cuda-toolkit/libdevice/libdevice.10.bc",
        "libdevice/libdevice.10.bc",
    ),
    ("usr/bin/cudafe++", "bin/cudafe++"),
    ("usr/bin/fatbinary", "bin/fatbinary"),
    ("usr/bin/nvlink", "bin/nvlink"),
    ("usr/bin/ptxas", "bin/ptxas"),
];

/// Start of `nvcc.profile`, which configures nvcc's search paths.
const PROFILE: &str = "TOP = $(_HERE_)/..\n\
    NVVMIR_LIBRARY_DIR = $(TOP)/libdevice\n\
    PATH += $(_HERE_):\n";

/// Flags for PTX alone, for a target that CUDA 13 no longer supports.
const CODE: [&str; 4] = ["-arch=compute_70", "-code=compute_70", "-cudadevrt", "none"];

impl Release {
    /// Returns the folder of the toolkit and of the other runtimes.
    fn installed(&self, root: &Path) -> PathBuf {
        root.join("target").join(format!("{}-toolkit", self.folder))
    }

    /// Returns the toolkit below `root/target`. Installs it first if it is missing or outdated.
    fn ensure(&self, root: &Path) -> Result<Toolkit, Failure> {
        let folder = self.installed(root);
        let toolkit = Toolkit::at(folder.clone());
        let installed = folder.join("installed");
        let others = self.others.iter().map(|other| other.wheel);
        let wanted = self
            .wheels
            .into_iter()
            .chain(others)
            .collect::<Vec<_>>()
            .join("\n");
        if fs::read_to_string(&installed).is_ok_and(|text| text == wanted) {
            return Ok(toolkit);
        }

        step(&format!(
            "installing the CUDA {} compiler from Debian {} and its headers from PyPI (about 115 MB)",
            self.version, self.debian
        ));
        fs::create_dir_all(&folder).map_err(|error| cannot("make", &folder, &error))?;
        let package = wormhole_images::fetch_package(&folder, self.source, PACKAGE)
            .map_err(|error| Failure::new(format!("cannot fetch {PACKAGE}: {error}")))?;
        for (from, to) in TOOLS {
            place(&package.path().join(from), &folder.join(to))?;
        }
        // The package is no longer needed.
        drop(package);
        let downloads = folder.join("apt");
        fs::remove_dir_all(&downloads).map_err(|error| cannot("remove", &downloads, &error))?;
        let wheels = folder.join("wheels");
        pip(&wheels, &self.wheels)?;
        let runtime = library(&wheels, self.runtime);
        place(&runtime, &toolkit.libraries().join(self.runtime))?;
        place(&runtime, &toolkit.libraries().join("libcudart.so"))?;
        for other in self.others {
            pip(&folder.join(other.folder), &[other.wheel])?;
        }
        let includes: String = ["cuda_runtime", "cuda_nvcc", "cuda_cccl"]
            .map(|part| {
                let folder = wheels.join("nvidia").join(part).join("include");
                format!("INCLUDES += \"-I{}\" $(_SPACE_)\n", folder.display())
            })
            .concat();
        let profile = folder.join("bin/nvcc.profile");
        fs::write(&profile, format!("{PROFILE}{includes}"))
            .map_err(|error| cannot("write", &profile, &error))?;
        fs::write(&installed, wanted).map_err(|error| cannot("write", &installed, &error))?;
        Ok(toolkit)
    }

    /// Builds the outdated programs of the demo below `root/target/programs`, once for each runtime.
    fn build_programs(&self, root: &Path) -> Result<(), Failure> {
        let toolkit = self.ensure(root)?;
        let programs = root.join("target/programs");
        let output = programs.join(self.folder);
        place_once(
            &toolkit.libraries().join(self.runtime),
            &output.join(self.runtime),
        )?;
        let installed = self.installed(root);
        for other in self.others {
            let from = library(&installed.join(other.folder), self.runtime);
            place_once(&from, &programs.join(other.folder).join(self.runtime))?;
        }
        let demo = programs::demo(root)?;
        let mut outdated = Vec::new();
        for (name, sources) in &demo {
            let path = output.join(name);
            if programs::is_older(&path, sources) {
                let linked = (sources.len() > 1).then_some("-rdc=true");
                let flags = CODE.iter().chain(self.flags).copied().chain(linked);
                outdated.push(Build {
                    name: format!("{name} (CUDA {})", self.version),
                    sources: sources.clone(),
                    flags: flags.map(str::to_owned).collect(),
                    outputs: vec![(Link::Shared, path)],
                });
            }
        }
        nvcc::build(&toolkit, outdated)?;
        for other in self.others {
            for (name, _) in &demo {
                let path = output.join(name);
                let copy = programs.join(other.folder).join(name);
                if programs::is_older(&copy, std::slice::from_ref(&path)) {
                    place(&path, &copy)?;
                }
            }
        }
        Ok(())
    }
}

/// Returns the path of a runtime library among installed packages.
fn library(wheels: &Path, name: &str) -> PathBuf {
    wheels.join("nvidia/cuda_runtime/lib").join(name)
}

fn place_once(from: &Path, to: &Path) -> Result<(), Failure> {
    if to.is_file() {
        return Ok(());
    }
    place(from, to)
}

fn cannot(verb: &str, path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(format!("cannot {verb} {}: {error}", path.display()))
}

/// Builds the demo's programs with each earlier release, for all of its runtimes.
pub fn build_programs(root: &Path) -> Result<(), Failure> {
    CUDA_12.build_programs(root)?;
    CUDA_11.build_programs(root)
}

/// Compiles the kernels of the PTX engine's tests and returns the folder of the PTX.
pub fn build_kernels(root: &Path) -> Result<PathBuf, Failure> {
    let toolkit = CUDA_12.ensure(root)?;
    let output = root.join("target/programs/cuda12-kernels");
    fs::create_dir_all(&output).map_err(|error| cannot("make", &output, &error))?;
    for source in programs::files(&root.join("backend-vm/ptx/tests/kernels"), "cu")? {
        let path = output
            .join(source.file_stem().unwrap_or_default())
            .with_extension("ptx");
        if programs::is_older(&path, std::slice::from_ref(&source)) {
            Run::new(toolkit.nvcc())
                .args(["-ptx", "-arch=compute_90", "-O3", "-o"])
                .args([&path, &source])
                .check()?;
        }
    }
    Ok(output)
}
