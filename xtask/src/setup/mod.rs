//! `cargo xtask setup`: installs Debian packages, NVIDIA's compiler and Rust's nightly tools, and builds programs and
//! images. Each step first checks whether it is done, so that a second run changes nothing.

mod apt;
mod host;

use std::path::{Path, PathBuf};
use std::time::Instant;

use wormhole_images::{
    BuildOptions, DebianOptions, GuestParts, Image, ImageError, Kernel, NotAPackage, Suite,
    build_backend, build_base, build_disk, build_emulated_host, build_guest,
    build_guest_that_takes_its_window,
};

use crate::command::{Failure, Run, at_once, megabytes, step};
use crate::stage::{self, Stage};
use crate::{linker, older_cuda, programs, python, toolchain};
use host::Facts;

/// Debian packages that the tests' disk has beside those of each disk, as in a command of docs/images.md. A test executes their
/// programs (`DISK_PACKAGES` in `hypervisor/tests/runs/harness.rs`).
const DISK_PACKAGES: [&str; 2] = ["hello", "strace"];

/// Folders below `target` that set-up fills.
const FOLDERS: [&str; 8] = [
    "apt",
    "cuda-toolkit",
    "cuda11-toolkit",
    "cuda12-toolkit",
    "linker",
    "programs",
    "python",
    "wormhole/share/wormhole/images",
];

/// A builder of one kind of image.
type Build = fn(&BuildOptions<'_>) -> Result<Image, ImageError>;

/// Installs, downloads and builds missing parts that the demo and `wormhole run` need; with `tests`, also those that
/// only the tests need. Prints the duration and the disk space at the end.
pub fn setup(root: &Path, tests: bool) -> Result<(), Failure> {
    let start = Instant::now();
    install_tools(root, tests)?;
    build_parts(root, tests, start)
}

/// Sets up as [`setup`] does, and stages Wormhole meanwhile: set-up mostly waits for downloads and the disk.
pub fn setup_and_stage(root: &Path, tests: bool) -> Result<Stage, Failure> {
    let start = Instant::now();
    install_tools(root, tests)?;
    let (stage, parts) = at_once(|| stage::stage(root), || build_parts(root, tests, start));
    parts.and(stage)
}

/// Installs Debian packages and the linker.
fn install_tools(root: &Path, tests: bool) -> Result<(), Failure> {
    // Fails before any change on a machine on which the rest cannot work.
    let plan = Facts::of_this_machine().plan(tests).map_err(Failure::new)?;
    apt::install(&plan, root)?;
    linker::ensure(root).map(drop)
}

/// Installs and builds everything but the tools that staging needs. Prints the duration since `start`.
fn build_parts(root: &Path, tests: bool, start: Instant) -> Result<(), Failure> {
    programs::build(&toolchain::ensure(root)?, root)?;
    build_images(
        root,
        &[
            (build_guest, Kernel::V6_1),
            (build_backend, Kernel::V6_1),
            (build_emulated_host, Kernel::V6_1),
        ],
    )?;
    if tests {
        nightly()?;
        older_cuda::build_programs(root)?;
        python::environment_for_tests(root)?;
        build_images(
            root,
            &[
                (build_guest, Kernel::V6_12),
                (build_guest_that_takes_its_window, Kernel::V6_12),
            ],
        )?;
        with_debian(root, build_base)?;
    }
    let mut total = 0;
    let mut parts = Vec::new();
    for folder in FOLDERS {
        let bytes = bytes_below(&root.join("target").join(folder));
        total += bytes;
        parts.extend((bytes > 0).then(|| format!("{folder} {}", megabytes(bytes))));
    }
    step(&format!(
        "set up in {} s; in target: {}; {} in all",
        start.elapsed().as_secs(),
        parts.join(", "),
        megabytes(total)
    ));
    Ok(())
}

fn build_images(root: &Path, wanted: &[(Build, Kernel)]) -> Result<(), Failure> {
    let folder = images(root);
    for &(build, kernel) in wanted {
        build(&BuildOptions {
            folder: &folder,
            kernel,
            rebuild: false,
            progress: &step,
        })
        .map_err(|error| Failure::new(chain(&error)))?;
    }
    Ok(())
}

/// Builds the disk image that the tests boot from the staged parts, unless it is there.
pub fn build_disk_for_tests(root: &Path, stage: &Path) -> Result<(), Failure> {
    let part = |name| stage.join("lib/wormhole").join(name);
    let parts = GuestParts {
        command: part("wormhole-guest"),
        frontends: ["libcuda.so.1", "libnvidia-ml.so.1"].map(part).to_vec(),
    };
    with_debian(root, |options| match build_disk(options, &parts) {
        // Nothing but tests has used it, and these copy it.
        Err(ImageError::OtherDisk { place }) => {
            std::fs::remove_dir_all(place).ok();
            build_disk(options, &parts).map(drop)
        }
        built => built.map(drop),
    })
}

/// Builds a disk image or its base, unless this user may not: the test that boots the disk is skipped then.
fn with_debian(
    root: &Path,
    build: impl FnOnce(&DebianOptions<'_>) -> Result<(), ImageError>,
) -> Result<(), Failure> {
    let packages: Result<Vec<_>, NotAPackage> =
        DISK_PACKAGES.iter().map(|name| name.parse()).collect();
    let packages = packages.map_err(|error| Failure::new(error.to_string()))?;
    let built = build(&DebianOptions {
        folder: &images(root),
        suite: Suite::Bookworm,
        packages: &packages,
        rebuild: false,
        progress: &step,
    });
    match built {
        Err(error @ ImageError::NotRoot) => step(&chain(&error)),
        built => built.map_err(|error| Failure::new(chain(&error)))?,
    }
    Ok(())
}

/// Returns the folder in which the staged `wormhole run` looks for images: `$WORMHOLE_IMAGES`, or the installation's.
pub fn images(root: &Path) -> PathBuf {
    std::env::var_os("WORMHOLE_IMAGES")
        .filter(|folder| !folder.is_empty())
        .map_or_else(
            || root.join("target/wormhole/share/wormhole/images"),
            PathBuf::from,
        )
}

/// Installs the tools for the tests under miri.
fn nightly() -> Result<(), Failure> {
    if !host::has_miri() {
        step("installing Rust's nightly toolchain with miri");
        Run::new("rustup")
            .args(["toolchain", "install", "nightly", "--profile", "minimal"])
            .args(["--component", "miri", "--component", "rust-src"])
            .check()?;
    }
    Ok(())
}

/// Returns the bytes of all files below a folder. Unreadable files count as 0.
fn bytes_below(folder: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return 0;
    };
    entries
        .flatten()
        .filter_map(|entry| Some((entry.path(), entry.metadata().ok()?)))
        .map(|(path, data)| {
            if data.is_dir() {
                bytes_below(&path)
            } else {
                data.len()
            }
        })
        .sum()
}

/// Formats an error and its causes as one sentence.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}
