//! Debian's packages of the driver.
//!
//! Each kernel gets those of Debian 13: Debian 12 has driver 535, which is older than the CUDA device takes. The kernel
//! modules are those of non-free. The open ones, in contrib, do not compile with Linux 6.1.192, where `pci_resize_resource`
//! has one more argument.

use std::fs::{self, File};
use std::io::BufReader;
use std::path::Path;

use super::parts::{Folders, Parts};
use super::run_file::{MOST_BYTES, decompressed, extract};
use super::{DriverError, is_version};
use crate::debian::Archive;
use crate::error::{ImageError, io};

/// The archive of these packages.
const SOURCE: &str = "http://deb.debian.org/debian trixie non-free non-free-firmware";
/// The package of the kernel modules' sources, which names the version of all.
const SOURCES: &str = "nvidia-kernel-source";
/// The other packages.
const OTHERS: [&str; 6] = [
    "firmware-nvidia-gsp",
    "libcuda1",
    "libnvidia-gpucomp",
    "libnvidia-ml1",
    "libnvidia-nvvm4",
    "libnvidia-ptxjitcompiler1",
];
/// Archive of the sources in its package, and their folder in that.
const TAR: &str = "usr/src/nvidia-kernel.tar.xz";
const FOLDER: &str = "modules/nvidia-kernel";

/// Folders of libraries in their packages.
const LIBRARIES: [&str; 2] = [
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/x86_64-linux-gnu",
];

/// Fetches the driver into an empty folder.
pub(super) fn fetch(folder: &Path, progress: &dyn Fn(&str)) -> Result<Parts, ImageError> {
    progress("fetching Debian's packages of NVIDIA's driver");
    let archive = Archive::of(folder, &[SOURCE])?;
    let root = folder.join("root");
    fs::create_dir(&root).map_err(io("make", &root))?;
    let package = archive.download(SOURCES)?;
    archive.extract(&package, &root)?;
    for name in OTHERS {
        archive.extract(&archive.download(name)?, &root)?;
    }
    let name = package.file_name().unwrap_or_default().to_string_lossy();
    let whole = name.split('_').nth(1).unwrap_or_default().to_owned();
    let version = whole.split('-').next().unwrap_or_default().to_owned();
    let origin = format!("Debian's {SOURCES} {whole}");
    if !is_version(&version) {
        let what = "version of NVIDIA's";
        return Err(DriverError::Lacks { origin, what }.into());
    }
    let path = root.join(TAR);
    let file = File::open(&path).map_err(io("read", &path))?;
    let content = decompressed(BufReader::new(file)).map_err(io("read", &path))?;
    extract(&path, content, &root, MOST_BYTES, |name| {
        name.starts_with(FOLDER)
    })?;
    let folders = Folders {
        sources: root.join(FOLDER),
        firmware: root.join("usr/lib/firmware/nvidia").join(&version),
        libraries: LIBRARIES.map(|folder| root.join(folder)).into(),
    };
    Parts::find(folders, origin, version)
}
