//! The parts of an unpacked driver that an image needs.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use super::description::is_plain;
use super::{DriverError, check_version};
use crate::error::{ImageError, io};
use crate::libraries::{self, Names};

/// Libraries of the driver that a worker or the supervisor opens, or that one of these opens itself, and whether a driver
/// must have them.
const LIBRARIES: [(&str, bool); 6] = [
    ("libcuda", true),
    ("libnvidia-ml", true),
    ("libnvidia-ptxjitcompiler", true),
    ("libnvidia-nvvm", false),
    ("libnvidia-nvvm70", false),
    ("libnvidia-gpucomp", false),
];
/// Words for those that a driver must have.
const REQUIRED: &str = "libcuda, libnvidia-ml or libnvidia-ptxjitcompiler of its version";
/// The file of the modules' sources that names their version.
const KBUILD: &str = "Kbuild";
/// Most bytes of it that are read.
const MOST_KBUILD: u64 = 1 << 20;

/// An unpacked driver.
#[derive(Debug)]
pub(super) struct Parts {
    pub version: String,
    pub origin: String,
    /// Sources of its kernel modules.
    pub sources: PathBuf,
    /// Names and paths of the firmware of GPUs.
    pub firmware: Vec<(String, PathBuf)>,
    pub libraries: Vec<Library>,
    /// Names of libraries that these need of others.
    pub needed: BTreeSet<String>,
}

/// A library of a driver.
#[derive(Debug)]
pub(super) struct Library {
    pub name: String,
    pub path: PathBuf,
    /// Name by which programs open it.
    pub link: String,
}

/// Folders of a driver's parts.
pub(super) struct Folders {
    pub sources: PathBuf,
    pub firmware: PathBuf,
    /// Folders of its libraries.
    pub libraries: Vec<PathBuf>,
}

impl Parts {
    /// Finds the parts of a driver, all of one version.
    pub(super) fn find(
        folders: Folders,
        origin: String,
        version: String,
    ) -> Result<Self, ImageError> {
        let lacks = |what| DriverError::Lacks {
            origin: origin.clone(),
            what,
        };
        check_version(&origin, &version)?;
        let kbuild = folders.sources.join(KBUILD);
        let mut text = String::new();
        let read =
            File::open(&kbuild).and_then(|file| file.take(MOST_KBUILD).read_to_string(&mut text));
        if read.is_err() {
            return Err(lacks("sources of open kernel modules (kernel-open)").into());
        }
        if !text.contains(&format!("\"{version}\\\"")) {
            let path = kbuild;
            return Err(DriverError::Other { path, version }.into());
        }
        let mut firmware = firmware(&folders.firmware)?;
        firmware.sort();
        if firmware.is_empty() {
            return Err(lacks("firmware of GPUs (gsp_*.bin)").into());
        }
        let mut parts = Self {
            origin: origin.clone(),
            sources: folders.sources,
            firmware,
            libraries: Vec::new(),
            needed: BTreeSet::new(),
            version,
        };
        for (start, is_required) in LIBRARIES {
            let name = format!("{start}.so.{}", parts.version);
            let paths = folders.libraries.iter().map(|folder| folder.join(&name));
            match paths.into_iter().find(|path| is_file(path)) {
                Some(path) => parts.add(name, path)?,
                None if is_required => return Err(lacks(REQUIRED).into()),
                None => {}
            }
        }
        let own: Vec<&String> = parts
            .libraries
            .iter()
            .map(|library| &library.link)
            .collect();
        parts.needed.retain(|name| !own.contains(&name));
        Ok(parts)
    }

    fn add(&mut self, name: String, path: PathBuf) -> Result<(), ImageError> {
        let Names { own, needed } = libraries::names(&path)?;
        let link = own.filter(|link| is_plain(link));
        let link = link.ok_or_else(|| DriverError::Other {
            path: path.clone(),
            version: self.version.clone(),
        })?;
        if let Some(name) = needed.iter().find(|name| !is_plain(name)) {
            let name = name.clone();
            return Err(DriverError::LibraryName { path, name }.into());
        }
        self.needed.extend(needed);
        self.libraries.push(Library { name, path, link });
        Ok(())
    }
}

/// Lists the firmware in a folder.
fn firmware(folder: &Path) -> Result<Vec<(String, PathBuf)>, ImageError> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Ok(Vec::new());
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(io("list", folder))?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        let is_one = |name: &&str| name.starts_with("gsp_") && name.ends_with(".bin");
        if let Some(name) = name.filter(is_one).map(str::to_owned)
            && is_file(&path)
        {
            found.push((name, path));
        }
    }
    Ok(found)
}

/// Returns whether a path is a file, and no link to one.
pub(super) fn is_file(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|data| data.is_file())
}
