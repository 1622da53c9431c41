//! Builds Wormhole and stages the installation in `target/wormhole/{bin,lib/wormhole}`. Set-up builds the images into
//! `share/wormhole/images` beside them. An installation with random delays, for tests, is in `target/delays`.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::checks;
use crate::command::{Failure, Run, cargo, megabytes, step};
use crate::linker::{self, Linker};

/// The only supported target. With an explicit target cargo does not apply the flags to build scripts.
pub const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Cargo profile of installed files.
const PROFILE: [&str; 2] = ["--profile", "dist"];

/// Packages with the same linkage.
struct Build {
    /// Version of glibc that they need; `None` for a static program.
    glibc: Option<&'static str>,
    packages: &'static [&'static str],
    /// Built files and their paths in the installation.
    parts: &'static [(&'static str, &'static str)],
}

const BUILDS: [Build; 3] = [
    Build {
        glibc: Some(linker::HOST),
        packages: &[
            "wormhole",
            "wormhole-fs",
            "wormhole-supervisor",
            "wormhole-worker",
        ],
        parts: &[
            ("wormhole", "bin/wormhole"),
            ("wormhole-fs", "lib/wormhole/wormhole-fs"),
            ("wormhole-supervisor", "lib/wormhole/wormhole-supervisor"),
            ("wormhole-worker", "lib/wormhole/wormhole-worker"),
        ],
    },
    Build {
        glibc: Some(linker::OLDEST),
        packages: &["wormhole-guest", "wormhole-nvml"],
        parts: &[
            ("libcuda.so", "lib/wormhole/libcuda.so.1"),
            ("libnvidia_ml.so", "lib/wormhole/libnvidia-ml.so.1"),
        ],
    },
    // The first process of an image is linked statically, because the image has no libraries, and the guests' command,
    // because it runs on each of their systems.
    Build {
        glibc: None,
        packages: &["wormhole-guest-command", "wormhole-init"],
        parts: &[
            ("wormhole-guest", "lib/wormhole/wormhole-guest"),
            ("wormhole-init", "lib/wormhole/wormhole-init"),
        ],
    },
];

/// Folder of the symbols beside a stripped file. Debuggers and Rust's backtraces look there.
const SYMBOLS: &str = ".debug";

/// A staged installation.
#[derive(Debug, Clone)]
pub struct Stage {
    pub prefix: PathBuf,
}

impl Stage {
    pub fn wormhole(&self) -> PathBuf {
        self.prefix.join("bin/wormhole")
    }
}

/// Returns the installation in `WORMHOLE_STAGE` if it is set, else the one that [`stage`] builds.
pub fn given_or_built(root: &Path) -> Result<Stage, Failure> {
    match std::env::var_os("WORMHOLE_STAGE") {
        Some(prefix) => Ok(Stage {
            prefix: prefix.into(),
        }),
        None => stage(root),
    }
}

/// Returns the programs and libraries below `root/target/wormhole`, without their symbols.
pub fn parts(root: &Path) -> impl Iterator<Item = PathBuf> {
    let prefix = prefix(root);
    BUILDS
        .iter()
        .flat_map(|build| build.parts)
        .map(move |(_, destination)| prefix.join(destination))
}

/// Returns the symbol files of [`parts`].
pub fn symbols(root: &Path) -> impl Iterator<Item = PathBuf> {
    parts(root).map(|part| symbols_of(&part))
}

fn prefix(root: &Path) -> PathBuf {
    root.join("target/wormhole")
}

/// Builds everything with the dist profile and stages it under `root/target/wormhole`.
pub fn stage(root: &Path) -> Result<Stage, Failure> {
    let prefix = prefix(root);
    build(root, &prefix, &root.join("target/dist"), &[])?;
    let size = |files: &mut dyn Iterator<Item = PathBuf>| -> u64 {
        let sizes = files.filter_map(|file| fs::metadata(file).ok());
        sizes.map(|data| data.len()).sum()
    };
    step(&format!(
        "staged in target/wormhole: {}, and {} of symbols",
        megabytes(size(&mut parts(root))),
        megabytes(size(&mut symbols(root)))
    ));
    let complaints = checks::glibc(root)?;
    if let Some(complaint) = complaints.first() {
        return Err(Failure::new(complaint));
    }
    Ok(Stage { prefix })
}

/// Builds everything with random delays on both sides of the window, and stages it under `root/target/delays`.
pub fn with_delays(root: &Path) -> Result<Stage, Failure> {
    let prefix = root.join("target/delays");
    build(root, &prefix, &prefix.join("built"), &["--cfg", "delays"])?;
    Ok(Stage { prefix })
}

/// Builds everything below a folder, and places it below a prefix.
fn build(root: &Path, prefix: &Path, target: &Path, own_flags: &[&str]) -> Result<(), Failure> {
    let linker = linker::ensure(root)?;
    step("building wormhole, its backend and the frontend libraries");
    for build in &BUILDS {
        let built = build.run(root, &linker, target, own_flags)?;
        for (source, destination) in build.parts {
            place_stripped(&built.join(source), &prefix.join(destination))?;
        }
    }
    // Some programs open the libraries by these names, which in a toolkit belong to stub libraries.
    for name in ["libcuda.so", "libnvidia-ml.so"] {
        let link = prefix.join("lib/wormhole").join(name);
        let target = format!("{name}.1");
        if fs::read_link(&link).is_ok_and(|found| found == Path::new(&target)) {
            continue;
        }
        symlink(&target, &link)
            .map_err(|error| Failure::new(format!("cannot place {}: {error}", link.display())))?;
    }
    Ok(())
}

impl Build {
    /// Builds the packages and returns the folder of the built files.
    fn run(
        &self,
        root: &Path,
        linker: &Linker,
        target: &Path,
        own_flags: &[&str],
    ) -> Result<PathBuf, Failure> {
        // cargo rebuilds everything when the linker changes, so each linker has its own target folder.
        let target = target.join(self.glibc.unwrap_or("static"));
        let (run, mut own) = match self.glibc {
            Some(glibc) => (linker.build(root, glibc), shared()?.to_vec()),
            None => (
                cargo(root).args(["build", "--target", TARGET]),
                vec!["-Ctarget-feature=+crt-static".into()],
            ),
        };
        own.extend(own_flags.iter().map(OsString::from));
        run.args(PROFILE)
            .args(self.packages.iter().flat_map(|&name| ["--package", name]))
            .env("CARGO_TARGET_DIR", &target)
            .env("CARGO_ENCODED_RUSTFLAGS", flags(root, &own)?)
            .check()?;
        Ok(target.join(TARGET).join("dist"))
    }
}

/// Returns the flags that replace this machine's folders by names, and `others`, encoded for `CARGO_ENCODED_RUSTFLAGS`.
/// If several prefixes match a path, the compiler uses the last one.
fn flags(root: &Path, others: &[OsString]) -> Result<OsString, Failure> {
    let (_, sysroot) = Run::new("rustc")
        .dir(root)
        .args(["--print", "sysroot"])
        .output()?;
    let mapped = [
        (cargo_home(), "cargo"),
        (PathBuf::from(sysroot.trim()), "rust"),
        (root.to_path_buf(), "wormhole"),
    ];
    let mut flags = OsString::new();
    for (folder, name) in mapped {
        flags.push("--remap-path-prefix=");
        flags.push(folder);
        flags.push(format!("={name}\x1f"));
    }
    flags.push(others.join(OsStr::new("\x1f")));
    Ok(flags)
}

/// Returns the folder in which cargo stores the sources of crates.
pub fn cargo_home() -> PathBuf {
    std::env::var_os("CARGO_HOME").map_or_else(
        || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cargo"),
        PathBuf::from,
    )
}

/// Returns the flags that link the system's libgcc_s. By default the linker adds its own unwinder, which must not be
/// mixed with libgcc's: glibc unwinds threads that end by `pthread_exit` or `pthread_cancel` with libgcc's. This
/// machine's libgcc may need newer glibc symbols than the linker offers, so undefined symbols in it are allowed;
/// another machine uses its own libgcc.
fn shared() -> Result<[OsString; 2], Failure> {
    const NAME: &str = "libgcc_s.so.1";
    let (_, path) = Run::new("cc")
        .args([format!("-print-file-name={NAME}")])
        .output()?;
    let path = path.trim();
    if path == NAME {
        return Err(Failure::new(format!("the C compiler has no {NAME}")));
    }
    Ok([
        format!("-Clink-arg={path}").into(),
        "-Clink-arg=-Wl,--allow-shlib-undefined".into(),
    ])
}

/// Places a stripped program or library, and its symbols beside it.
fn place_stripped(source: &Path, destination: &Path) -> Result<(), Failure> {
    let symbols = symbols_of(destination);
    if let Some(folder) = symbols.parent() {
        fs::create_dir_all(folder)
            .map_err(|error| Failure::new(format!("cannot make {}: {error}", folder.display())))?;
    }
    let objcopy = || Run::new("objcopy");
    objcopy()
        .args(["--only-keep-debug"])
        .args([source, &symbols])
        .check()?;
    // Replaces the file by rename, so that a running program keeps the old one.
    let fresh = destination.with_extension("fresh");
    let mut link = OsString::from("--add-gnu-debuglink=");
    link.push(&symbols);
    objcopy()
        .args(["--strip-unneeded"])
        .args([link.as_os_str(), source.as_os_str(), fresh.as_os_str()])
        .check()?;
    fs::rename(&fresh, destination)
        .map_err(|error| Failure::new(format!("cannot place {}: {error}", destination.display())))
}

/// Copies an installation without its symbols. Tests look for leftovers of a run by its installation's folder, so tests that are
/// executed at the same time need one each.
pub fn copy(stage: &Stage, prefix: &Path) -> Result<Stage, Failure> {
    for part in ["bin", "lib/wormhole"] {
        let folder = stage.prefix.join(part);
        let entries = fs::read_dir(&folder)
            .map_err(|error| Failure::new(format!("cannot list {}: {error}", folder.display())))?;
        for entry in entries.flatten().filter(|entry| entry.path().is_file()) {
            place(&entry.path(), &prefix.join(part).join(entry.file_name()))?;
        }
    }
    Ok(Stage {
        prefix: prefix.to_owned(),
    })
}

fn symbols_of(part: &Path) -> PathBuf {
    let mut name = part.file_name().unwrap_or_default().to_owned();
    name.push(".debug");
    part.with_file_name(SYMBOLS).join(name)
}

/// Copies a file and renames the copy to its destination, so that a running program keeps the old file.
pub fn place(source: &Path, destination: &Path) -> Result<(), Failure> {
    let copy = || {
        if let Some(folder) = destination.parent() {
            fs::create_dir_all(folder)?;
        }
        let fresh = destination.with_extension("fresh");
        fs::copy(source, &fresh)?;
        fs::rename(&fresh, destination)
    };
    copy().map_err(|error| Failure::new(format!("cannot place {}: {error}", destination.display())))
}
