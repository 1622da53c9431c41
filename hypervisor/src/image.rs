//! `wormhole image`.

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::{Args, Subcommand, ValueEnum};
use wormhole_images::{
    BuildOptions, DebianOptions, DriverSource, GuestParts, Image, ImageError, ListedDriver,
    PackageName, build_backend, build_backend_with, build_disk, build_emulated_host, build_guest,
};
use wormhole_link::harmless;

use crate::backend_vm::KERNEL;
use crate::installation::{Installation, InstallationError};
use crate::run::Kernel;
use crate::say;
use crate::table::{self, Column};

#[derive(Debug, Subcommand)]
#[command(arg_required_else_help = false)]
pub enum Action {
    /// Build an image from Debian's packages.
    #[command(subcommand)]
    Build(Build),
    /// List the images that programs and backends boot from, with their kernels and drivers.
    List(Folder),
}

#[derive(Debug, Subcommand)]
#[command(arg_required_else_help = false)]
pub enum Build {
    /// The image that guests boot from: with --suite a disk with Debian, otherwise what `wormhole run` needs.
    Guest(GuestOptions),
    /// The image that backend VMs boot from, with NVIDIA's driver if --driver names one.
    Backend(BackendOptions),
    /// A machine with emulated virtualization, for hosts whose KVM cannot run Linux.
    EmulatedHost(Options),
}

#[derive(Debug, Args)]
pub struct GuestOptions {
    /// The release of Debian on a disk.
    #[arg(long, value_enum, conflicts_with = "kernel")]
    suite: Option<Suite>,
    /// One more Debian package on the disk.
    #[arg(long, value_name = "NAME", requires = "suite")]
    package: Vec<PackageName>,
    #[command(flatten)]
    options: Options,
}

/// A release of Debian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Suite {
    /// Debian 12, with Linux 6.1.
    Bookworm,
    /// Debian 13, with Linux 6.12.
    Trixie,
}

impl From<Suite> for wormhole_images::Suite {
    fn from(suite: Suite) -> Self {
        match suite {
            Suite::Bookworm => Self::Bookworm,
            Suite::Trixie => Self::Trixie,
        }
    }
}

#[derive(Debug, Args)]
pub struct BackendOptions {
    /// NVIDIA's driver for GPUs of backend VMs: a file NVIDIA-Linux-x86_64-VERSION.run, or `debian` for Debian's packages.
    /// Its kernel modules are built for the image's kernel.
    #[arg(long, value_name = "FILE")]
    driver: Option<DriverSource>,
    #[command(flatten)]
    options: Options,
}

#[derive(Debug, Args)]
pub struct Options {
    /// The Debian kernel to take.
    #[arg(long, value_enum, default_value = "6.1")]
    kernel: Kernel,
    #[command(flatten)]
    folder: Folder,
    /// Build again what is there already.
    #[arg(long)]
    rebuild: bool,
}

#[derive(Debug, Args)]
pub struct Folder {
    /// Folder of images; WORMHOLE_IMAGES, the installation's, or that of the user if not given.
    #[arg(long)]
    folder: Option<PathBuf>,
}

/// Reason why there is no image.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot tell where images lie: set WORMHOLE_IMAGES or HOME")]
    NoFolder,
    #[error(
        "backend VMs boot kernel {KERNEL}, so that a driver for another one would not be used: leave --kernel {0} or --driver out"
    )]
    DriverKernel(wormhole_images::Kernel),
    #[error(transparent)]
    Installation(#[from] InstallationError),
    #[error(transparent)]
    Image(#[from] ImageError),
}

pub fn run(action: &Action) -> Result<(), Error> {
    let build = match action {
        Action::Build(build) => build,
        Action::List(folder) => return list(&folder.path()?),
    };
    let mut driver = None;
    let (wanted, options) = match build {
        Build::Guest(guest) => match guest.suite {
            Some(suite) => return disk(suite, guest),
            None => (GUEST, &guest.options),
        },
        Build::Backend(backend) => {
            driver = backend.driver.as_ref();
            (BACKEND, &backend.options)
        }
        Build::EmulatedHost(options) => (EMULATED_HOST, options),
    };
    let kernel = options.kernel.into();
    if driver.is_some() && kernel != KERNEL {
        return Err(Error::DriverKernel(kernel));
    }
    let folder = options.folder.path()?;
    let image = match driver {
        Some(driver) => made(&folder, kernel, options.rebuild, |options| {
            build_backend_with(driver, options)
        })?,
        None => made(&folder, kernel, options.rebuild, wanted.1)?,
    };
    let driver = image.driver.as_ref();
    let driver = driver.map(|driver| format!(", driver {} ({})", driver.version, driver.origin));
    say::result(format_args!(
        "{}: kernel {}{}",
        image.kernel.display(),
        harmless(&image.release),
        harmless(&driver.unwrap_or_default())
    ));
    Ok(())
}

/// Lists the images in a folder.
fn list(folder: &Path) -> Result<(), Error> {
    let rows: Vec<[String; 4]> = Image::list(folder)?
        .into_iter()
        .map(|image| {
            let damaged = || "damaged".to_owned();
            let (version, origin) = match image.driver {
                ListedDriver::None => (String::new(), String::new()),
                ListedDriver::Whole(driver) => (driver.version, driver.origin),
                ListedDriver::Damaged => (damaged(), String::new()),
            };
            let release = image.release.unwrap_or_else(damaged);
            [image.name, release, version, origin].map(|text| harmless(&text))
        })
        .collect();
    let columns = [
        Column::Text("IMAGE"),
        Column::Text("KERNEL"),
        Column::Text("DRIVER"),
        Column::Text("FROM"),
    ];
    say::result(format_args!("{}", table::format(columns, &rows).trim_end()));
    Ok(())
}

/// A kind of image: how it is opened, and how it is built.
pub type Wanted = (
    fn(&Path, wormhole_images::Kernel) -> Result<Image, ImageError>,
    fn(&BuildOptions<'_>) -> Result<Image, ImageError>,
);

pub const GUEST: Wanted = (Image::guest, build_guest);
pub const BACKEND: Wanted = (Image::backend, build_backend);
pub const EMULATED_HOST: Wanted = (Image::emulated_host, build_emulated_host);

/// Opens an image. If it is not there, builds it first, and says so.
pub fn ensure(
    wanted: Wanted,
    folder: &Path,
    kernel: wormhole_images::Kernel,
) -> Result<Image, ImageError> {
    match wanted.0(folder, kernel) {
        Err(ImageError::NotBuilt { .. }) => made(folder, kernel, false, wanted.1),
        found => found,
    }
}

fn made(
    folder: &Path,
    kernel: wormhole_images::Kernel,
    rebuild: bool,
    build: impl FnOnce(&BuildOptions<'_>) -> Result<Image, ImageError>,
) -> Result<Image, ImageError> {
    build(&BuildOptions {
        folder,
        kernel,
        rebuild,
        progress: &|line| say::line(format_args!("{line}")),
    })
}

/// Builds a disk with Debian.
fn disk(suite: Suite, guest: &GuestOptions) -> Result<(), Error> {
    let start = Instant::now();
    let installation = Installation::locate()?;
    let parts = GuestParts {
        command: installation.guest_command()?,
        frontends: installation.frontends()?,
    };
    let options = DebianOptions {
        folder: &guest.options.folder.path()?,
        suite: suite.into(),
        packages: &guest.package,
        rebuild: guest.options.rebuild,
        progress: &|line| say::line(format_args!("{line}")),
    };
    let disk = build_disk(&options, &parts)?;
    let occupied = disk.occupied_bytes()?;
    say::line(format_args!(
        "{} MiB on this machine's disk, after {} s",
        occupied >> 20,
        start.elapsed().as_secs()
    ));
    say::result(format_args!("{}", disk.disk.display()));
    Ok(())
}

impl Folder {
    fn path(&self) -> Result<PathBuf, Error> {
        match &self.folder {
            Some(folder) => Ok(folder.clone()),
            None => Installation::locate()?.images().ok_or(Error::NoFolder),
        }
    }
}
