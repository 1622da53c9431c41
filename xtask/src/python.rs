//! `cargo xtask python`: runs the programs of `programs/python`, which use NumPy, Numba and CuPy.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;

use crate::command::{Failure, Run};
use crate::pytest::install;
use crate::stage;

/// Memory of a guest. The libraries that the programs load take 300 MB.
const MEMORY: &str = "1G";
/// Options of `wormhole run` for an environment in which CuPy works on the CPU device: it has NVRTC compile to PTX instead of machine code, and does not
/// use the compiled kernels of CUB that it comes with, which are machine code.
pub const CUPY_WITH_PTX: [&str; 4] = ["-e", "CUPY_COMPILE_WITH_PTX=1", "-e", "CUPY_ACCELERATORS="];

#[derive(Debug, Args)]
pub struct Options {
    /// Run this program alone, as in `arrays`.
    #[arg(long)]
    program: Option<String>,
    /// Run it in a guest too.
    #[arg(long)]
    guest: bool,
}

/// Installs the packages of the programs and of Numba's tests under `target/python`, and returns that folder.
pub fn environment(root: &Path) -> Result<PathBuf, Failure> {
    let folder = root.join("target/python");
    install(
        "NumPy, Numba, CuPy and their needs (about 400 MB)",
        &root.join("xtask/python/requirements.txt"),
        &folder,
    )?;
    Ok(folder)
}

/// Runs the programs, and returns whether all pass. They run at `process` placement first: Python and CuPy then have
/// compiled the modules and kernels, for which an emulated processor would take long. `WORMHOLE_STAGE` names the
/// installation; without it the sources are staged first.
pub fn python(root: &Path, options: &Options) -> Result<bool, Failure> {
    let stage = stage::given_or_built(root)?;
    let environment = environment(root)?;
    let folder = root.join("programs/python");
    let failed = |error| Failure::new(format!("cannot list {}: {error}", folder.display()));
    let entries = fs::read_dir(&folder).map_err(failed)?;
    let mut programs = entries
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<Vec<_>, _>>()
        .map_err(failed)?;
    let name = options.program.as_deref();
    programs
        .retain(|path| name.is_none_or(|name| path.file_stem().is_some_and(|stem| stem == name)));
    programs.sort();
    let places: &[&[&str]] = match options.guest {
        true => &[&["--placement", "process"], &["--memory", MEMORY]],
        false => &[&["--placement", "process"]],
    };
    let path = std::env::var("PATH").unwrap_or_default();
    let path = format!("{}:{path}", environment.join("bin").display());
    let cache = format!("CUPY_CACHE_DIR={}", environment.join("kernels").display());
    let mut all_pass = !programs.is_empty();
    for program in programs {
        for place in places {
            let start = Instant::now();
            let (status, text) = Run::new(stage.wormhole())
                .args(["run", "--quiet"])
                .args(*place)
                .args(CUPY_WITH_PTX)
                .args(["-e", &*cache])
                .args(["python3".as_ref(), program.as_os_str()])
                .env("PATH", &path)
                .env("PYTHONDONTWRITEBYTECODE", "")
                .output()?;
            let passes = status.success() && text.starts_with("PASS ");
            let seconds = start.elapsed().as_secs();
            println!(
                "{} with {}: {status}, {seconds} s: {}",
                program.display(),
                place.join(" "),
                text.trim()
            );
            all_pass &= passes;
        }
    }
    Ok(all_pass)
}
