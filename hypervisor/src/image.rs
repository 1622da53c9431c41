//! `wormhole image`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use wormhole_images::{BuildOptions, ImageError, build_emulated_host, build_guest};

use crate::installation::{Installation, InstallationError};
use crate::run::Kernel;
use crate::say;

#[derive(Debug, Subcommand)]
#[command(arg_required_else_help = false)]
pub enum Action {
    /// Build an image from Debian's packages.
    #[command(subcommand)]
    Build(Build),
}

#[derive(Debug, Subcommand)]
#[command(arg_required_else_help = false)]
pub enum Build {
    /// The image that guests boot from.
    Guest(Options),
    /// A machine with emulated virtualization, for hosts whose KVM cannot run Linux.
    EmulatedHost(Options),
}

#[derive(Debug, Args)]
pub struct Options {
    /// The Debian kernel to take.
    #[arg(long, value_enum, default_value = "6.1")]
    kernel: Kernel,
    /// Where images lie; WORMHOLE_IMAGES, the installation's or the user's data folder otherwise.
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Build again what is there already.
    #[arg(long)]
    rebuild: bool,
}

/// Reason why there is no image.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot tell where images lie: set WORMHOLE_IMAGES or HOME")]
    NoFolder,
    #[error(transparent)]
    Installation(#[from] InstallationError),
    #[error(transparent)]
    Image(#[from] ImageError),
}

pub fn run(action: &Action) -> Result<(), Error> {
    let Action::Build(build) = action;
    let (Build::Guest(options) | Build::EmulatedHost(options)) = build;
    let folder = match &options.folder {
        Some(folder) => folder.clone(),
        None => Installation::locate()?.images().ok_or(Error::NoFolder)?,
    };
    let wanted = BuildOptions {
        folder: &folder,
        kernel: options.kernel.into(),
        rebuild: options.rebuild,
        progress: &|line| say::line(format_args!("{line}")),
    };
    let image = match build {
        Build::Guest(_) => build_guest(&wanted),
        Build::EmulatedHost(_) => build_emulated_host(&wanted),
    }?;
    say::result(format_args!(
        "{}: kernel {}",
        image.kernel.display(),
        image.release
    ));
    Ok(())
}
