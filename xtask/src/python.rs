//! `cargo xtask python`: runs the programs of `programs/python`, which use NumPy, Numba and CuPy.

use std::ffi::OsStr;
use std::fs;
use std::ops::RangeInclusive;
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

/// Minor versions of Python 3 for which the packages exist.
const VERSIONS: RangeInclusive<u32> = 11..=14;

/// Script that runs its arguments by Python, each with a line of its status, its duration and what it says.
const IN_A_GUEST: &str = r#"
for program; do
    begin=$(date +%s)
    said=$(python3 "$program")
    echo "$program in a guest: $?, $(($(date +%s) - begin)) s: $said"
done
"#;

#[derive(Debug, Args)]
pub struct Options {
    /// Run these programs alone, as in `arrays`.
    #[arg(long)]
    program: Vec<String>,
    /// Run them in a guest too, one after another.
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

/// Installs what [`environment`] does, where there are such packages for this machine's Python.
pub fn environment_for_tests(root: &Path) -> Result<(), Failure> {
    let command = "import sys; print(sys.version_info.minor)";
    let (_, minor) = Run::new("python3").args(["-c", command]).output()?;
    match minor.trim().parse() {
        Ok(minor) if VERSIONS.contains(&minor) => environment(root).map(drop),
        _ => Ok(()),
    }
}

/// Runs the programs, and returns whether all pass. They run at `process` placement first: Python, Numba and CuPy then
/// have compiled the modules and kernels, for which an emulated processor would take long. `WORMHOLE_STAGE` names the
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
    let names = &options.program;
    let is_wanted = |path: &PathBuf| {
        let stem = path.file_stem();
        names.is_empty()
            || names
                .iter()
                .any(|name| stem.is_some_and(|stem| stem == &**name))
    };
    programs.retain(is_wanted);
    programs.sort();
    let path = std::env::var("PATH").unwrap_or_default();
    let path = format!("{}:{path}", environment.join("bin").display());
    let kernels = environment.join("kernels");
    let caches =
        ["CUPY_CACHE_DIR", "NUMBA_CACHE_DIR"].map(|name| format!("{name}={}", kernels.display()));
    let run = |options: &[&str], command: &[&OsStr]| {
        Run::new(stage.wormhole())
            .args(["run", "--quiet"])
            .args(options)
            .args(CUPY_WITH_PTX)
            .args(caches.iter().flat_map(|cache| ["-e", cache]))
            .args(command)
            .env("PATH", &path)
            .env("PYTHONDONTWRITEBYTECODE", "")
            .output()
    };
    let mut all_pass = !programs.is_empty();
    for program in &programs {
        let start = Instant::now();
        let command = [OsStr::new("python3"), program.as_os_str()];
        let (status, text) = run(&["--placement", "process"], &command)?;
        let seconds = start.elapsed().as_secs();
        println!(
            "{} with --placement process: {status}, {seconds} s: {}",
            program.display(),
            text.trim()
        );
        all_pass &= status.success() && text.starts_with("PASS ");
    }
    if options.guest {
        let shell = ["sh", "-c", IN_A_GUEST, "sh"].map(OsStr::new);
        let command: Vec<&OsStr> = shell
            .into_iter()
            .chain(programs.iter().map(|program| program.as_os_str()))
            .collect();
        let (status, text) = run(&["--memory", MEMORY], &command)?;
        print!("{text}");
        println!("the guest's shell: {status}");
        let passed = text
            .lines()
            .filter(|line| line.contains(": 0, ") && line.contains(": PASS "));
        all_pass &= status.success() && passed.count() == programs.len();
    }
    Ok(all_pass)
}
