//! Builds the CUDA programs in `programs/`, each with the static and with the shared CUDA runtime.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::command::{Failure, Run, step};
use crate::stage::place;
use crate::toolchain::Toolkit;

/// Folders below `programs/` that hold programs.
const FOLDERS: [&str; 10] = [
    "", "api", "devices", "exits", "faults", "input", "lives", "memory", "nvml", "order",
];

/// Folders below `programs/` whose sources are the translation units of one program, linked as device code.
const UNITS: [&str; 1] = ["linked_units"];

/// Programs that are also built with a wrong kernel: one whose result is far off, one that is off by one element, one
/// with an error of millionths.
const BROKEN: [&str; 3] = ["vector_add", "prefix_scan", "black_scholes"];

/// Programs that are also built for per-thread default streams, for which the API has separate function names.
const PER_THREAD: [&str; 8] = [
    "api/contexts",
    "api/graph_nodes",
    "api/host_functions",
    "api/kernels",
    "api/memory_operations",
    "memory/boxes",
    "memory/managed",
    "memory/pools",
];

/// Linkage of the CUDA runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    Static,
    Shared,
}

impl Link {
    /// Returns nvcc's name for the linkage, which is also the folder's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Static => "static",
            Self::Shared => "shared",
        }
    }
}

/// A built program.
#[derive(Debug, Clone)]
pub struct Program {
    pub path: PathBuf,
    /// Set if the program computes something and verifies it. The others provoke errors, test orders, or are measured.
    pub demo: bool,
}

/// Builds outdated programs into `root/target/programs/{static,shared}` and returns all programs.
pub fn build(toolkit: &Toolkit, root: &Path) -> Result<Vec<Program>, Failure> {
    let sources = root.join("programs");
    let output = root.join("target/programs");
    let headers = ["check.cuh", "api/driver.cuh"].map(|name| modified(&sources.join(name)));
    let header = headers.into_iter().max().unwrap_or(SystemTime::UNIX_EPOCH);
    let runtime = output.join("shared/libcudart.so.13");
    if !runtime.is_file() {
        place(&toolkit.runtime(), &runtime)?;
    }

    let mut programs = Vec::new();
    for folder in FOLDERS {
        for source in files(&sources.join(folder), "cu")? {
            let name = source.file_stem().unwrap_or_default().to_string_lossy();
            let paths = ensure(toolkit, &output, &name, &[&source], header, &[])?;
            let demo = folder.is_empty();
            programs.extend(paths.map(|path| Program { path, demo }));
        }
    }
    for name in UNITS {
        let folder = sources.join(name);
        let units = files(&folder, "cu")?;
        let units: Vec<&Path> = units.iter().map(PathBuf::as_path).collect();
        let headers = files(&folder, "cuh")?;
        let headers = headers
            .iter()
            .map(|own| modified(own))
            .fold(header, SystemTime::max);
        let paths = ensure(toolkit, &output, name, &units, headers, &["-rdc=true"])?;
        programs.extend(paths.map(|path| Program { path, demo: true }));
    }
    build_broken(toolkit, root)?;
    build_per_thread(toolkit, root, header)?;
    Ok(programs)
}

/// Returns name and sources of each of the demo's programs.
pub fn demo(root: &Path) -> Result<Vec<(String, Vec<PathBuf>)>, Failure> {
    let folder = root.join("programs");
    let mut programs = Vec::new();
    for source in files(&folder, "cu")? {
        let name = source.file_stem().unwrap_or_default().to_string_lossy();
        programs.push((name.into_owned(), vec![source]));
    }
    for name in UNITS {
        programs.push((name.to_owned(), files(&folder.join(name), "cu")?));
    }
    Ok(programs)
}

/// Returns true if a file is older than one of its sources.
pub fn is_older(path: &Path, sources: &[PathBuf]) -> bool {
    sources
        .iter()
        .any(|source| modified(path) < modified(source))
}

/// Builds a program with both linkages of the runtime if it is older than its sources.
fn ensure(
    toolkit: &Toolkit,
    output: &Path,
    name: &str,
    sources: &[&Path],
    header: SystemTime,
    extra: &[&str],
) -> Result<[PathBuf; 2], Failure> {
    let newest = sources.iter().map(|source| modified(source)).max();
    let newest = header.max(newest.unwrap_or(SystemTime::UNIX_EPOCH));
    let links = [Link::Static, Link::Shared];
    let paths = links.map(|link| output.join(link.name()).join(name));
    for (link, path) in links.into_iter().zip(&paths) {
        if modified(path) < newest {
            step(&format!("compiling {} ({} runtime)", name, link.name()));
            compile(toolkit, sources, link, extra, path)?;
        }
    }
    Ok(paths)
}

/// Returns the path of the program during whose launches VM exits are counted.
pub fn steady(root: &Path) -> PathBuf {
    root.join("target/programs/static/steady")
}

/// Builds the programs with wrong kernels, which their own verification must detect.
fn build_broken(toolkit: &Toolkit, root: &Path) -> Result<(), Failure> {
    for name in BROKEN {
        let source = root.join("programs").join(name).with_extension("cu");
        let path = root.join("target/programs/broken").join(name);
        if modified(&path) < modified(&source) {
            compile(
                toolkit,
                &[&source],
                Link::Static,
                &["-DBROKEN_KERNEL"],
                &path,
            )?;
        }
    }
    Ok(())
}

/// Builds the programs for per-thread default streams.
fn build_per_thread(toolkit: &Toolkit, root: &Path, header: SystemTime) -> Result<(), Failure> {
    for name in PER_THREAD {
        let source = root.join("programs").join(name).with_extension("cu");
        let name = source.file_stem().unwrap_or_default();
        let path = root.join("target/programs/per-thread").join(name);
        if modified(&path) < header.max(modified(&source)) {
            step(&format!(
                "compiling {} (per-thread streams)",
                name.display()
            ));
            let extra = ["--default-stream", "per-thread"];
            compile(toolkit, &[&source], Link::Static, &extra, &path)?;
        }
    }
    Ok(())
}

pub fn compile(
    toolkit: &Toolkit,
    sources: &[&Path],
    link: Link,
    extra: &[&str],
    path: &Path,
) -> Result<(), Failure> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)
            .map_err(|error| Failure::new(format!("cannot make {}: {error}", folder.display())))?;
    }
    let fresh = path.with_extension("fresh");
    Run::new(toolkit.nvcc())
        .args([
            "-O2",
            "-std=c++17",
            "-cudart",
            link.name(),
            "-Xlinker",
            "-rpath,$ORIGIN",
            "-L",
        ])
        .args([toolkit.libraries().as_path(), Path::new("-o"), &fresh])
        .args(sources)
        .args(extra)
        .check()?;
    fs::rename(&fresh, path)
        .map_err(|error| Failure::new(format!("cannot place {}: {error}", path.display())))
}

/// Returns the files of a folder with this extension, ordered by name.
pub fn files(folder: &Path, end: &str) -> Result<Vec<PathBuf>, Failure> {
    let entries = fs::read_dir(folder)
        .map_err(|error| Failure::new(format!("cannot list {}: {error}", folder.display())))?;
    let mut files: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == end))
        .collect();
    files.sort();
    Ok(files)
}

/// Returns a file's modification time. A missing file is older than any other.
fn modified(path: &Path) -> SystemTime {
    fs::metadata(path)
        .and_then(|data| data.modified())
        .unwrap_or(SystemTime::UNIX_EPOCH)
}
