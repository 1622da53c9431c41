//! Fetches packages from Debian's archive without root: apt runs with a private state and checks the
//! archive's signatures as usual.

use std::fmt::Display;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{ImageError, io};
use crate::kernel::Kernel;

pub(crate) const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
const META_PACKAGE: &str = "linux-image-cloud-amd64";

/// Private state of apt.
#[derive(Debug)]
pub struct Archive {
    folder: PathBuf,
}

/// An unpacked kernel package.
#[derive(Debug)]
pub struct Package {
    /// Full release of the kernel, such as `6.1.0-50-cloud-amd64`.
    pub release: String,
    /// Folder with the package's files, laid out as below `/`.
    pub root: tempfile::TempDir,
}

impl Archive {
    /// Downloads the current package index of the Debian that has this kernel.
    pub fn update(images: &Path, kernel: Kernel) -> Result<Self, ImageError> {
        Self::of(images, &kernel.suite().sources())
    }

    /// Downloads the package index of `sources`, with apt's state below `parent`.
    pub(crate) fn of(parent: &Path, sources: &[impl Display]) -> Result<Self, ImageError> {
        if !Path::new(KEYRING).is_file() {
            return Err(ImageError::NoKeyring(KEYRING.into()));
        }
        let folder = parent.join("apt");
        for part in ["lists/partial", "cache/archives/partial", "packages"] {
            let path = folder.join(part);
            fs::create_dir_all(&path).map_err(io("make", &path))?;
        }
        let sources: String = sources
            .iter()
            .map(|source| format!("deb [arch=amd64 signed-by={KEYRING}] {source}\n"))
            .collect();
        for (name, text) in [("sources.list", sources.as_str()), ("status", "")] {
            let path = folder.join(name);
            fs::write(&path, text).map_err(io("write", &path))?;
        }
        let archive = Self { folder };
        archive.apt("apt-get", &["--quiet", "--error-on=any", "update"], None)?;
        Ok(archive)
    }

    /// Downloads and unpacks the newest kernel of a series.
    pub fn fetch(&self, kernel: Kernel) -> Result<Package, ImageError> {
        let text = self.apt("apt-cache", &["show", META_PACKAGE], None)?;
        let package = kernel_package(&text, kernel).ok_or(ImageError::NoKernel {
            kernel,
            package: META_PACKAGE,
        })?;
        let root = self.unpack(&package)?;
        let release = package.trim_start_matches("linux-image-").to_owned();
        Ok(Package { release, root })
    }

    /// Downloads the newest version of a package and unpacks it into a folder, laid out as below `/`.
    fn unpack(&self, package: &str) -> Result<tempfile::TempDir, ImageError> {
        let file = self.download(package)?;
        let root = tempfile::Builder::new()
            .prefix("unpacked-")
            .tempdir_in(&self.folder)
            .map_err(io("make a folder in", &self.folder))?;
        self.extract(&file, root.path())?;
        Ok(root)
    }

    /// Downloads the newest version of a package, and returns its file.
    pub(crate) fn download(&self, package: &str) -> Result<PathBuf, ImageError> {
        let downloads = self.folder.join("packages");
        // apt verifies an existing file and downloads it only if it differs.
        self.apt(
            "apt-get",
            &["--quiet", "download", package],
            Some(&downloads),
        )?;
        let prefix = format!("{package}_");
        fs::read_dir(&downloads)
            .map_err(io("list", &downloads))?
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| {
                path.file_name()
                    .is_some_and(|name| name.to_string_lossy().starts_with(&prefix))
            })
            .max_by_key(|path| fs::metadata(path).and_then(|data| data.modified()).ok())
            .ok_or_else(|| ImageError::Package {
                package: package.to_owned(),
                what: "file after its download",
            })
    }

    /// Downloads packages and all that they depend on, and returns their files.
    pub(crate) fn download_with_dependencies(
        &self,
        packages: &[&str],
    ) -> Result<Vec<PathBuf>, ImageError> {
        let options = [
            "--quiet",
            "--yes",
            "--no-install-recommends",
            "--download-only",
            "install",
        ];
        self.apt("apt-get", &[&options[..], packages].concat(), None)?;
        let downloads = self.folder.join("cache/archives");
        let mut files: Vec<PathBuf> = fs::read_dir(&downloads)
            .map_err(io("list", &downloads))?
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| path.extension().is_some_and(|end| end == "deb"))
            .collect();
        files.sort();
        Ok(files)
    }

    /// Unpacks a package's file into a folder, over what is there.
    pub(crate) fn extract(&self, file: &Path, folder: &Path) -> Result<(), ImageError> {
        let mut unpack = Command::new("dpkg-deb");
        unpack.arg("--extract").arg(file).arg(folder);
        run("dpkg-deb", "dpkg", "--extract", unpack).map(drop)
    }

    fn apt(
        &self,
        program: &'static str,
        args: &[&str],
        folder: Option<&Path>,
    ) -> Result<String, ImageError> {
        let at = |part: &str| self.folder.join(part).display().to_string();
        let options = [
            format!("Dir::Etc::SourceList={}", at("sources.list")),
            "Dir::Etc::SourceParts=/dev/null".to_owned(),
            format!("Dir::State={}", at("")),
            format!("Dir::State::Lists={}", at("lists")),
            format!("Dir::State::Status={}", at("status")),
            format!("Dir::Cache={}", at("cache")),
            "APT::Architecture=amd64".to_owned(),
            "APT::Sandbox::User=root".to_owned(),
            "Acquire::Languages=none".to_owned(),
            // Disables AppStream catalogues, which are not needed.
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false".to_owned(),
            "Acquire::Retries=3".to_owned(),
        ];
        let mut command = Command::new(program);
        command.env("LC_ALL", "C");
        for option in options {
            command.arg("-o").arg(option);
        }
        command.args(args);
        if let Some(folder) = folder {
            command.current_dir(folder);
        }
        run(program, "apt", &args.join(" "), command)
    }
}

/// Downloads the newest version of a package from a source, such as
/// `http://deb.debian.org/debian trixie non-free`, and unpacks it into a folder, laid out as below `/`. apt's state
/// and downloads are in `parent`.
pub fn fetch_package(
    parent: &Path,
    source: &str,
    package: &str,
) -> Result<tempfile::TempDir, ImageError> {
    Archive::of(parent, &[source])?.unpack(package)
}

/// Returns the kernel package of a series from the dependencies of the meta package's versions.
fn kernel_package(text: &str, kernel: Kernel) -> Option<String> {
    let prefix = format!("linux-image-{}.", kernel.series());
    text.lines()
        .filter_map(|line| line.strip_prefix("Depends: "))
        .flat_map(|depends| depends.split(','))
        .filter_map(|depend| depend.split_whitespace().next())
        .find(|package| package.starts_with(&prefix) && kernel.is_original(package))
        .map(str::to_owned)
}

/// Runs a tool and returns its standard output.
pub(crate) fn run(
    program: &'static str,
    package: &'static str,
    task: &str,
    mut command: Command,
) -> Result<String, ImageError> {
    let output = command.output().map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => ImageError::NoTool { program, package },
        _ => ImageError::Start { program, source },
    })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(ImageError::Tool {
        command: format!("{program} {task}"),
        status: output.status,
        output: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHOWN: &str = "Package: linux-image-cloud-amd64\n\
        Version: 6.12.95-1~bpo12+1\n\
        Depends: linux-image-6.12.95+deb12-cloud-amd64 (= 6.12.95-1~bpo12+1)\n\
        \n\
        Package: linux-image-cloud-amd64\n\
        Version: 6.12.90-1\n\
        Depends: linux-image-6.12.90+deb13-cloud-amd64 (= 6.12.90-1)\n\
        \n\
        Package: linux-image-cloud-amd64\n\
        Version: 6.1.176-1\n\
        Depends: linux-image-6.1.0-50-cloud-amd64 (= 6.1.176-1)\n";

    #[test]
    fn each_series_finds_its_own_package() {
        assert_eq!(
            kernel_package(SHOWN, Kernel::V6_1).as_deref(),
            Some("linux-image-6.1.0-50-cloud-amd64")
        );
        assert_eq!(
            kernel_package(SHOWN, Kernel::V6_12).as_deref(),
            Some("linux-image-6.12.90+deb13-cloud-amd64")
        );
        assert_eq!(
            kernel_package("Depends: linux-image-6.12.1-cloud-amd64\n", Kernel::V6_1),
            None
        );
    }
}
