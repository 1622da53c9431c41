//! Defines the errors of building and running images.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use wormhole_init::InterpreterFault;
use wormhole_init::report::ReportError;

use crate::driver::DriverError;
use crate::kernel::Kernel;
use crate::sums::Damage;

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    #[error("cannot {action} {path}")]
    Io {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("cannot put the machine's first file system into memory")]
    Initrd { source: io::Error },
    #[error("{program} is not installed: install the Debian package {package}")]
    NoTool {
        program: &'static str,
        package: &'static str,
    },
    #[error("cannot start {program}")]
    Start {
        program: &'static str,
        source: io::Error,
    },
    #[error("{command} failed ({status}): {output}")]
    Tool {
        command: String,
        status: ExitStatus,
        output: String,
    },
    #[error(
        "the keys of Debian's archive are not at {0}: install the package debian-archive-keyring"
    )]
    NoKeyring(PathBuf),
    #[error("Debian's archive offers no kernel {kernel} as {package}")]
    NoKernel {
        kernel: Kernel,
        package: &'static str,
    },
    #[error("the package {package} holds no {what}")]
    Package { package: String, what: &'static str },
    #[error(
        "there is no {what} for kernel {kernel} in {folder}: make it with `wormhole image build {what} --kernel {kernel}`"
    )]
    NotBuilt {
        what: &'static str,
        kernel: Kernel,
        folder: PathBuf,
    },
    #[error(
        "the {what} image in {place} is damaged: {damage}: make it anew with `wormhole image build {what}{option} --kernel {kernel} --rebuild`"
    )]
    Damaged {
        what: &'static str,
        kernel: Kernel,
        place: PathBuf,
        damage: Damage,
        /// The option that names a driver, if the image has one.
        option: &'static str,
    },
    #[error(
        "the image in {place} has {driver} and is to be built again: name its driver with `wormhole image build backend \
         --driver FILE`, or --rebuild builds it without a driver"
    )]
    LosesDriver { place: PathBuf, driver: String },
    #[error(
        "the driver of the image in {place} is damaged: {damage}: make it anew with `wormhole image build backend --driver \
         FILE --rebuild`"
    )]
    DamagedDriver { place: PathBuf, damage: Damage },
    #[error(
        "the disk image in {place} is damaged or was built of other packages: --rebuild replaces it and all that a guest \
         has written to it, --folder builds another beside it"
    )]
    OtherDisk { place: PathBuf },
    #[error(
        "{disk} is in use: stop the guest that has it, or build another disk beside it with --folder"
    )]
    DiskInUse { disk: PathBuf },
    #[error(
        "only root can build a disk image, since its files belong to several users: run the command as root"
    )]
    NotRoot,
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error("the kernel has no module {name}")]
    NoModule { name: String },
    #[error("{path} is not a kernel module")]
    NotAModule { path: PathBuf },
    #[error("{path} cannot be unpacked")]
    Xz { path: PathBuf, source: io::Error },
    #[error("the kernel module {name} depends on itself")]
    ModuleCycle { name: String },
    #[error("{path} has {bytes} bytes, more than an image's file can have")]
    FileTooLarge { path: String, bytes: usize },
    #[error("{0} is not an absolute path, which files in an image need")]
    Path(PathBuf),
    #[error("{path} is a program for another machine or a damaged one: {reason}")]
    Elf { path: PathBuf, reason: String },
    #[error("{needed_by} needs the library {name}, which is not on this machine")]
    MissingLibrary { name: String, needed_by: PathBuf },
    #[error(
        "the script {} names the interpreter {}, which is {fault}",
        .script.display(),
        .interpreter.display()
    )]
    Interpreter {
        script: PathBuf,
        interpreter: PathBuf,
        fault: InterpreterFault,
    },
    #[error("the emulated host did not end within {} s; its console says: {console}", .after.as_secs())]
    HostTimeout { after: Duration, console: String },
    #[error("the emulated host was not ready within {} s; its console says: {console}", .after.as_secs())]
    HostNotReady { after: Duration, console: String },
    #[error("the emulated host ended without a report ({status}); its console says: {console}")]
    HostDied {
        status: ExitStatus,
        console: String,
        source: ReportError,
    },
}

/// Returns a constructor of [`ImageError::Io`] for an action on a path.
pub fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ImageError {
    let path = path.to_owned();
    move |source| ImageError::Io {
        action,
        path,
        source,
    }
}
