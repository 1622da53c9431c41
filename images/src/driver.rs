//! NVIDIA's driver in the image of backend VMs, which an operator chooses by `--driver`.
//!
//! The driver is unpacked and its kernel modules are compiled beside the image. Neither the installer nor any other program
//! of the driver's is executed, but the commands of its modules' Makefile are, as nobody, without a network and without the
//! files of this machine ([`compile`]). The image gets an archive of its own for the driver, `driver.cpio`, which a VM without a GPU
//! does not have to load, and the file `driver`, a [`Driver`] as text.

mod compile;
mod debian;
mod description;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod parts;
mod run_file;
mod space;

use std::convert::Infallible;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use self::parts::Parts;
use self::run_file::RunFile;
use crate::cpio::Archive;
use crate::error::{ImageError, io};
use crate::image::{Wanted, add_modules};
use crate::kernel::Kernel;
use crate::modules::Modules;

pub use self::description::Driver;
pub(crate) use self::space::check_folder;

/// Folder of the driver's libraries in a backend VM.
pub(crate) const LIBRARIES: &str = "/usr/lib/wormhole/driver";
/// The oldest driver that the CUDA device takes: the first part of its version.
const OLDEST: u32 = 550;
/// Modules of the driver, and their parameters. With heterogeneous memory management kernels could access all memory of a
/// worker, which the CUDA device refuses.
const WANTED: [Wanted; 2] = [("nvidia", ""), ("nvidia_uvm", "uvm_disable_hmm=1")];
/// Reason why an image has no driver.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    #[error("cannot read the driver {}", .path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error(
        "{} is not NVIDIA's driver: --driver takes a file NVIDIA-Linux-x86_64-VERSION.run, or debian",
        .0.display()
    )]
    NotADriver(PathBuf),
    #[error("{} is a driver for {machine}: backend VMs are x86_64", .path.display())]
    Machine { path: PathBuf, machine: String },
    #[error("{origin} is driver {version}: Wormhole needs {OLDEST} or a later one")]
    TooOld { origin: String, version: String },
    #[error(
        "{} is truncated or damaged, since it does not have the sum that it names: copy it again",
        .0.display()
    )]
    Damaged(PathBuf),
    #[error("cannot unpack {}", .path.display())]
    Unpack { path: PathBuf, source: io::Error },
    #[error("{} has the file {}, which lies outside of it", .path.display(), .name.display())]
    Outside { path: PathBuf, name: PathBuf },
    #[error("{} has more than {most} files or {} MiB for an image", .path.display(), .bytes >> 20)]
    TooLarge {
        path: PathBuf,
        most: u64,
        bytes: u64,
    },
    #[error("{origin} has no {what}")]
    Lacks { origin: String, what: &'static str },
    #[error("{} needs a library with the name {name:?}, which is no file's name", .path.display())]
    LibraryName { path: PathBuf, name: String },
    #[error("{} is not of driver {version}", .path.display())]
    Other { path: PathBuf, version: String },
    #[error(
        "the driver takes up to {} MiB in {} while it is built, and {} MiB are free there",
        space::SPACE >> 20,
        .folder.display(),
        .free >> 20
    )]
    Space { folder: PathBuf, free: u64 },
    #[error(
        "only root can build a driver into an image, since the commands of its Makefile run as another user: run the command as root"
    )]
    NotRoot,
    #[error(
        "this machine does not let root confine the commands of a driver's Makefile ({0}): run the command outside of \
         containers, or with CAP_SYS_ADMIN"
    )]
    NoNamespaces(String),
    #[error(
        "a driver's modules are compiled in {}, where no program can be executed (mount option noexec): choose another folder \
         with --folder",
        .0.display()
    )]
    NoExecution(PathBuf),
    #[error(
        "the commands that build the modules of driver {version} took more than {} MiB or {} files in {}, or left less than {} \
         MiB to others, and were ended",
        space::MOST_SPACE >> 20,
        space::MOST_FILES,
        .folder.display(),
        space::LEAST_LEFT >> 20
    )]
    TakesSpace { version: String, folder: PathBuf },
    #[error(
        "the modules of driver {version} were not built after {} minutes, and the build was ended",
        .after.as_secs() / 60
    )]
    Late { version: String, after: Duration },
    #[error("the driver's module {} has more than {} MiB", .path.display(), .most >> 20)]
    LargeModule { path: PathBuf, most: u64 },
    #[error(
        "the modules of driver {version} cannot be built for kernel {release}: lines of the compiler are above, and all of \
         them in {}",
        .log.display()
    )]
    Compile {
        version: String,
        release: String,
        log: PathBuf,
    },
}

/// Origin of a driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DriverSource {
    /// Debian's packages.
    Debian,
    /// NVIDIA's file.
    File(PathBuf),
}

impl FromStr for DriverSource {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text {
            "debian" => Self::Debian,
            path => Self::File(path.into()),
        })
    }
}

/// A driver that was looked at, and can be built.
#[derive(Debug)]
pub(crate) enum Chosen {
    Debian,
    File(RunFile),
}

impl DriverSource {
    /// Looks at the driver before anything is written.
    pub(crate) fn choose(&self) -> Result<Chosen, DriverError> {
        Ok(match self {
            Self::Debian => Chosen::Debian,
            Self::File(path) => Chosen::File(RunFile::open(path)?),
        })
    }
}

impl Chosen {
    /// A line that differs from those of other drivers. Debian's newer versions have the same, as its kernels do.
    pub(crate) fn recipe(&self) -> String {
        match self {
            Self::Debian => "driver debian\n".to_owned(),
            Self::File(file) => format!("driver {}\n", file.sum),
        }
    }
}

/// Free space, and everything else that a build needs of its surroundings.
pub(crate) struct Surroundings<'a> {
    pub kernel: Kernel,
    /// Full release of the kernel.
    pub release: &'a str,
    /// Folder of the kernel's own modules.
    pub modules: &'a Path,
    /// An empty folder for what is not kept.
    pub scratch: &'a Path,
    /// File that keeps the compiler's output if it fails.
    pub log: &'a Path,
    pub progress: &'a dyn Fn(&str),
}

/// Builds a driver for a kernel. Returns its description, and the archive of its files.
pub(crate) fn build(
    chosen: &Chosen,
    surroundings: &Surroundings<'_>,
) -> Result<(Driver, Vec<u8>), ImageError> {
    let &Surroundings {
        scratch, progress, ..
    } = surroundings;
    let place = scratch.join("driver");
    fs::create_dir(&place).map_err(io("make", &place))?;
    let parts = match chosen {
        Chosen::Debian => debian::fetch(&place, progress)?,
        Chosen::File(file) => {
            progress(&format!("unpacking driver {}", file.version));
            file.unpack(&place)?
        }
    };
    let built = compile::modules(&parts, surroundings)?;
    let mut modules = Modules::in_folder(surroundings.modules)?;
    for (name, path) in built {
        modules.add(name, path);
    }
    pack(&parts, &modules, surroundings.release)
}

/// Packs a driver's modules, firmware and libraries.
fn pack(parts: &Parts, modules: &Modules, release: &str) -> Result<(Driver, Vec<u8>), ImageError> {
    let mut archive = Archive::new();
    let mut driver = Driver {
        version: parts.version.clone(),
        origin: parts.origin.clone(),
        release: release.to_owned(),
        modules: Vec::new(),
        libraries: parts.needed.iter().cloned().collect(),
    };
    for (path, parameters) in add_modules(&mut archive, modules, &WANTED)? {
        driver.modules.push((path.into(), parameters.to_owned()));
    }
    let mut add = |folder: &str, path: &Path, name: &str| -> Result<(), ImageError> {
        let data = fs::read(path).map_err(io("read", path))?;
        archive.file(
            format!("{}/{name}", folder.trim_start_matches('/')),
            0o644,
            &data,
        )
    };
    let firmware = format!("usr/lib/firmware/nvidia/{}", parts.version);
    for (name, path) in &parts.firmware {
        add(&firmware, path, name)?;
    }
    for library in &parts.libraries {
        add(LIBRARIES, &library.path, &library.name)?;
    }
    for library in &parts.libraries {
        let link = format!("{}/{}", LIBRARIES.trim_start_matches('/'), library.link);
        archive.link(link, &library.name);
    }
    let text = driver.to_string();
    archive.file(Driver::FILE.trim_start_matches('/'), 0o644, text.as_bytes())?;
    Ok((driver, archive.finish()))
}

/// Returns whether a text is a version: numbers with dots between them, which is safe as a part of a path.
fn is_version(text: &str) -> bool {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    text.len() <= 32 && text.contains('.') && text.split('.').all(is_number)
}

/// Refuses another user than root, and a machine on which root cannot build a driver, before anything is fetched.
pub(crate) fn check_machine(is_root: bool) -> Result<(), ImageError> {
    match is_root {
        true => compile::check_machine(),
        false => Err(DriverError::NotRoot.into()),
    }
}

/// Refuses a driver that the CUDA device does not take.
fn check_version(origin: &str, version: &str) -> Result<(), DriverError> {
    let first = version.split('.').next().map(str::parse::<u32>);
    match first {
        Some(Ok(first)) if first >= OLDEST => Ok(()),
        _ => Err(DriverError::TooOld {
            origin: origin.to_owned(),
            version: version.to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests;
