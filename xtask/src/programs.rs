//! Builds the CUDA programs in `programs/`, each with the static and with the shared CUDA runtime.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::command::Failure;
use crate::nvcc::{self, Build, Link};
use crate::stage::place;
use crate::toolchain::Toolkit;

/// Folders below `programs/` that hold programs.
const FOLDERS: [&str; 11] = [
    "",
    "api",
    "devices",
    "exits",
    "faults",
    "input",
    "lives",
    "memory",
    "nvml",
    "order",
    "workloads",
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
    "memory/copies_3d",
    "memory/managed",
    "memory/pools",
];

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
    let mut outdated = Vec::new();
    for folder in FOLDERS {
        let demo = folder.is_empty();
        let folder = sources.join(folder);
        let header = newest(header, &files(&folder, "cuh")?);
        for source in files(&folder, "cu")? {
            let build = with_both_runtimes(&output, &name_of(&source), vec![source], &[]);
            programs.extend(build.outputs.iter().map(|(_, path)| Program {
                path: path.clone(),
                demo,
            }));
            outdated.extend(outdated_part(build, header));
        }
    }
    for name in UNITS {
        let folder = sources.join(name);
        let header = newest(header, &files(&folder, "cuh")?);
        let build = with_both_runtimes(&output, name, files(&folder, "cu")?, &["-rdc=true"]);
        programs.extend(build.outputs.iter().map(|(_, path)| Program {
            path: path.clone(),
            demo: true,
        }));
        outdated.extend(outdated_part(build, header));
    }
    outdated.extend(broken(root).filter_map(|build| outdated_part(build, header)));
    outdated.extend(per_thread(root).filter_map(|build| outdated_part(build, header)));
    nvcc::build(toolkit, outdated)?;
    Ok(programs)
}

/// Returns name and sources of each of the demo's programs.
pub fn demo(root: &Path) -> Result<Vec<(String, Vec<PathBuf>)>, Failure> {
    let folder = root.join("programs");
    let mut programs = Vec::new();
    for source in files(&folder, "cu")? {
        programs.push((name_of(&source), vec![source]));
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

/// Describes a program that is linked with both kinds of runtime.
fn with_both_runtimes(output: &Path, name: &str, sources: Vec<PathBuf>, flags: &[&str]) -> Build {
    let links = [Link::Static, Link::Shared];
    Build {
        name: name.to_owned(),
        sources,
        flags: flags.iter().map(|&flag| flag.to_owned()).collect(),
        outputs: links
            .map(|link| (link, output.join(link.name()).join(name)))
            .into(),
    }
}

/// Drops the outputs that are as new as the sources and the headers. Returns `None` if no output is left.
fn outdated_part(mut build: Build, header: SystemTime) -> Option<Build> {
    let newest = newest(header, &build.sources);
    build.outputs.retain(|(_, path)| modified(path) < newest);
    (!build.outputs.is_empty()).then_some(build)
}

/// Returns the path of the program during whose launches VM exits are counted.
pub fn steady(root: &Path) -> PathBuf {
    root.join("target/programs/static/steady")
}

/// Returns the path of a short program that verifies its results.
pub fn verified(root: &Path) -> PathBuf {
    root.join("target/programs/static/vector_add")
}

/// Describes the programs with wrong kernels, which their own verification must detect.
fn broken(root: &Path) -> impl Iterator<Item = Build> {
    BROKEN
        .into_iter()
        .map(|name| variant(root, name, "broken", &["-DBROKEN_KERNEL"]))
}

/// Describes the programs for per-thread default streams.
fn per_thread(root: &Path) -> impl Iterator<Item = Build> {
    let flags = ["--default-stream", "per-thread"];
    PER_THREAD
        .into_iter()
        .map(move |name| variant(root, name, "per-thread", &flags))
}

/// Describes a program that is compiled with other flags into a folder of its own.
fn variant(root: &Path, name: &str, folder: &str, flags: &[&str]) -> Build {
    let source = root.join("programs").join(name).with_extension("cu");
    let name = name_of(&source);
    Build {
        outputs: vec![(
            Link::Static,
            root.join("target/programs").join(folder).join(&name),
        )],
        name: format!("{name} ({folder})"),
        sources: vec![source],
        flags: flags.iter().map(|&flag| flag.to_owned()).collect(),
    }
}

/// Returns the name of a source without folder and extension.
fn name_of(source: &Path) -> String {
    source
        .file_stem()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
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

/// Returns the latest of a time and the files' modification times.
fn newest(time: SystemTime, files: &[PathBuf]) -> SystemTime {
    let times = files.iter().map(|file| modified(file));
    times.fold(time, SystemTime::max)
}

/// Returns a file's modification time. A missing file is older than any other.
fn modified(path: &Path) -> SystemTime {
    fs::metadata(path)
        .and_then(|data| data.modified())
        .unwrap_or(SystemTime::UNIX_EPOCH)
}
