//! `cargo xtask setup`: everything that comes from elsewhere. Debian's packages, NVIDIA's compiler, Rust's
//! nightly tools, the kernels of the images. Each part is looked at first, so that a second run does nothing.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use wormhole_images::{
    BuildOptions, Image, ImageError, Kernel, build_emulated_host, build_guest,
    build_guest_that_takes_its_window,
};

use crate::command::{Failure, Run, step};
use crate::{earlier, programs, toolchain};

/// Files that show whether a Debian package is there.
const PACKAGES: [(&str, &str); 7] = [
    ("/usr/bin/qemu-system-x86_64", "qemu-system-x86"),
    ("/usr/bin/g++", "g++"),
    ("/usr/bin/make", "make"),
    ("/usr/bin/python3", "python3"),
    ("/usr/bin/pip3", "python3-pip"),
    ("/usr/bin/dpkg-deb", "dpkg"),
    (
        "/usr/share/keyrings/debian-archive-keyring.gpg",
        "debian-archive-keyring",
    ),
];

/// A builder of one kind of image.
type Build = fn(&BuildOptions<'_>) -> Result<Image, ImageError>;

/// Installs, downloads and builds what is not there yet.
pub fn setup(root: &Path) -> Result<(), Failure> {
    for_demo(root)?;
    nightly()?;
    earlier::build_programs(root)?;
    build_images(
        root,
        &[
            (build_guest, Kernel::V6_12),
            (build_guest_that_takes_its_window, Kernel::V6_12),
        ],
    )
}

/// As [`setup`], but only what the demo needs.
pub fn for_demo(root: &Path) -> Result<(), Failure> {
    packages()?;
    emulator(root)?;
    programs::build(&toolchain::ensure(root)?, root)?;
    build_images(
        root,
        &[
            (build_guest, Kernel::V6_1),
            (build_emulated_host, Kernel::V6_1),
        ],
    )
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

/// The folder of images in which the staged `wormhole run` looks: `$WORMHOLE_IMAGES`, or the installation's.
pub fn images(root: &Path) -> PathBuf {
    std::env::var_os("WORMHOLE_IMAGES")
        .filter(|folder| !folder.is_empty())
        .map_or_else(
            || root.join("target/wormhole/share/wormhole/images"),
            PathBuf::from,
        )
}

fn packages() -> Result<(), Failure> {
    let missing: Vec<&str> = PACKAGES
        .iter()
        .filter(|(file, _)| !tool_is_there(Path::new(file)))
        .map(|&(_, package)| package)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    step(&format!(
        "installing Debian packages: {}",
        missing.join(" ")
    ));
    apt(&["update"])?;
    let mut install = vec!["--yes", "--no-install-recommends", "install"];
    install.extend(missing);
    apt(&install)
}

/// The first QEMU whose emulation of virtualization takes a loaded machine: of QEMU 7.2's, about one in
/// twenty hangs or dies then.
const QEMU: u32 = 10;

/// Where Debian 12 has it.
const BACKPORTS: &str = "deb http://deb.debian.org/debian bookworm main\n\
    deb http://deb.debian.org/debian bookworm-backports main\n";

/// Takes QEMU from Debian 12's backports where it is older. The system's list of sources stays as it is.
fn emulator(root: &Path) -> Result<(), Failure> {
    if qemu_version().is_none_or(|version| version >= QEMU) || !is_bookworm() {
        return Ok(());
    }
    step(&format!(
        "installing QEMU {QEMU} from Debian's backports: older ones lose machines under load"
    ));
    let folder = root.join("target/apt");
    let lists = folder.join("lists");
    let sources = folder.join("backports.list");
    std::fs::create_dir_all(&lists)
        .and_then(|()| std::fs::write(&sources, BACKPORTS))
        .map_err(|error| Failure::new(format!("cannot write {}: {error}", sources.display())))?;
    let sources = format!("Dir::Etc::SourceList={}", sources.display());
    let lists = format!("Dir::State::Lists={}", lists.display());
    let options = [
        "-o",
        &sources,
        "-o",
        "Dir::Etc::SourceParts=-",
        "-o",
        &lists,
    ];
    let install = [
        "--yes",
        "--no-install-recommends",
        "--target-release",
        "bookworm-backports",
        "install",
        "qemu-system-x86",
    ];
    let installed = apt(&[&options[..], &["update"]].concat())
        .and_then(|()| apt(&[&options[..], &install].concat()));
    if let Err(failure) = installed {
        step(&format!("{failure}: going on with the QEMU that is there"));
    }
    Ok(())
}

/// The major version of QEMU, if it says one.
fn qemu_version() -> Option<u32> {
    let output = Command::new("qemu-system-x86_64")
        .arg("--version")
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text.split("version ").nth(1)?;
    version.split('.').next()?.parse().ok()
}

fn is_bookworm() -> bool {
    std::fs::read_to_string("/etc/os-release")
        .is_ok_and(|text| text.contains("VERSION_CODENAME=bookworm"))
}

/// `apt-get`, as root.
fn apt(args: &[&str]) -> Result<(), Failure> {
    // SAFETY: geteuid takes nothing and always succeeds.
    let run = if unsafe { libc::geteuid() } == 0 {
        Run::new("apt-get")
    } else {
        Run::new("sudo").args(["apt-get"])
    };
    run.args(["--quiet"])
        .args(args)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .check()
}

/// At its usual place, or elsewhere in PATH.
fn tool_is_there(file: &Path) -> bool {
    let in_path = || {
        let name = file.file_name()?;
        let path = std::env::var_os("PATH")?;
        std::env::split_paths(&path).find(|folder| folder.join(name).is_file())
    };
    file.exists() || in_path().is_some()
}

/// What the ring's tests under miri and the fuzz targets need.
fn nightly() -> Result<(), Failure> {
    if !succeeds("cargo", &["+nightly", "miri", "--version"]) {
        step("installing Rust's nightly toolchain with miri");
        Run::new("rustup")
            .args(["toolchain", "install", "nightly", "--profile", "minimal"])
            .args(["--component", "miri", "--component", "rust-src"])
            .check()?;
    }
    if !succeeds("cargo", &["fuzz", "--version"]) {
        step("installing cargo-fuzz");
        Run::new("cargo")
            .args(["install", "--quiet", "--locked", "cargo-fuzz"])
            .check()?;
    }
    Ok(())
}

fn succeeds(program: &str, args: &[&str]) -> bool {
    Command::new(program)
        .args(args)
        // The toolchain that runs this command must not be asked in the place of the named one.
        .env_remove("RUSTUP_TOOLCHAIN")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// An error and its causes as one sentence.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}
