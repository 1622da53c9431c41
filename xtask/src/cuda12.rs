//! What CUDA 12 makes of the demo's programs and of the PTX engine's kernels. Its nvcc comes from Debian 13, where
//! PyPI has but parts of it.

use std::fs;
use std::path::{Path, PathBuf};

use crate::command::{Failure, Run, step};
use crate::programs::{self, Link};
use crate::stage::place;
use crate::toolchain::Toolkit;

const SOURCE: &str = "http://deb.debian.org/debian trixie non-free";
const PACKAGE: &str = "nvidia-cuda-toolkit";
/// Headers and the runtime library.
const WHEELS: [&str; 3] = [
    "nvidia-cuda-runtime-cu12==12.4.127",
    "nvidia-cuda-nvcc-cu12==12.4.131",
    "nvidia-cuda-cccl-cu12==12.9.27",
];

/// Where the tools lie in the package, and where nvcc looks for them.
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

/// What tells nvcc of its surroundings.
const PROFILE: &str = "TOP = $(_HERE_)/..\n\
    NVVMIR_LIBRARY_DIR = $(TOP)/libdevice\n\
    PATH += $(_HERE_):\n";

/// PTX alone, for a target that CUDA 13 has no more.
const CODE: [&str; 4] = ["-arch=compute_70", "-code=compute_70", "-cudadevrt", "none"];

/// The toolkit in `root/target/cuda12-toolkit`; installs it when it is not there yet.
fn ensure(root: &Path) -> Result<Toolkit, Failure> {
    let folder = root.join("target/cuda12-toolkit");
    let toolkit = Toolkit::at(folder.clone());
    let installed = folder.join("installed");
    let wanted = WHEELS.join("\n");
    if fs::read_to_string(&installed).is_ok_and(|text| text == wanted) {
        return Ok(toolkit);
    }

    step(
        "installing the CUDA 12.4 compiler from Debian 13 and its headers from PyPI (about 115 MB)",
    );
    fs::create_dir_all(&folder).map_err(|error| cannot("make", &folder, &error))?;
    let package = wormhole_images::fetch_package(&folder, SOURCE, PACKAGE)
        .map_err(|error| Failure::new(format!("cannot fetch {PACKAGE}: {error}")))?;
    for (from, to) in TOOLS {
        place(&package.path().join(from), &folder.join(to))?;
    }
    // Nothing needs the package any more.
    drop(package);
    let downloads = folder.join("apt");
    fs::remove_dir_all(&downloads).map_err(|error| cannot("remove", &downloads, &error))?;
    let wheels = folder.join("wheels");
    Run::new("python3")
        .args(["-m", "pip", "install", "--quiet", "--upgrade", "--no-deps"])
        .args(["--root-user-action", "ignore", "--target"])
        .args([&wheels])
        .args(WHEELS)
        .check()?;
    let library = "libcudart.so.12";
    let runtime = wheels.join("nvidia/cuda_runtime/lib").join(library);
    place(&runtime, &toolkit.libraries().join(library))?;
    place(&runtime, &toolkit.libraries().join("libcudart.so"))?;
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

fn cannot(verb: &str, path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(format!("cannot {verb} {}: {error}", path.display()))
}

/// Builds the demo's programs into `root/target/programs/cuda12`, for the runtime of CUDA 12, where they are out of
/// date.
pub fn build_programs(root: &Path) -> Result<(), Failure> {
    let toolkit = ensure(root)?;
    let output = root.join("target/programs/cuda12");
    let runtime = output.join("libcudart.so.12");
    if !runtime.is_file() {
        place(&toolkit.libraries().join("libcudart.so.12"), &runtime)?;
    }
    for (name, sources) in programs::demo(root)? {
        let path = output.join(&name);
        if programs::is_older(&path, &sources) {
            step(&format!("compiling {name} (CUDA 12.4)"));
            let sources: Vec<&Path> = sources.iter().map(PathBuf::as_path).collect();
            let mut flags = CODE.to_vec();
            flags.extend((sources.len() > 1).then_some("-rdc=true"));
            programs::compile(&toolkit, &sources, Link::Shared, &flags, &path)?;
        }
    }
    Ok(())
}

/// Compiles the kernels of the PTX engine's tests and says where the PTX is.
pub fn build_kernels(root: &Path) -> Result<PathBuf, Failure> {
    let toolkit = ensure(root)?;
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
