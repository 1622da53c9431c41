//! Builds the Debian package `wormhole-guest`: what a Debian guest needs to run CUDA programs.
//!
//! The same parts make the same bytes, so that the package's sum tells whether an image has the present one.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use wormhole_init::PARTS;

use crate::debian::run;
use crate::error::{ImageError, io};

/// File name of the package.
pub const PACKAGE: &str = concat!("wormhole-guest_", env!("CARGO_PKG_VERSION"), "_amd64.deb");

/// Greatest time of a file in the package, in seconds since 1970: the same for each build.
pub const TIME: &str = "1735689600";

/// A file of the package: its path, its mode and its text.
type Text = (&'static str, u32, &'static str);

/// Gives a file below `images/guest-package`.
macro_rules! text {
    ($path:literal, $mode:literal, $name:literal) => {
        (
            $path,
            $mode,
            include_str!(concat!("../guest-package/", $name)),
        )
    };
}

const TEXTS: [Text; 14] = [
    text!("DEBIAN/postinst", 0o755, "postinst"),
    text!("DEBIAN/prerm", 0o755, "prerm"),
    text!("DEBIAN/postrm", 0o755, "postrm"),
    text!("DEBIAN/triggers", 0o644, "triggers"),
    text!("DEBIAN/conffiles", 0o644, "conffiles"),
    text!("etc/ld.so.conf.d/wormhole-guest.conf", 0o644, "ld.so.conf"),
    text!(
        "usr/lib/modprobe.d/wormhole-guest.conf",
        0o644,
        "modprobe.conf"
    ),
    text!(
        "usr/lib/modules-load.d/wormhole-guest.conf",
        0o644,
        "modules-load.conf"
    ),
    text!(
        "usr/lib/udev/rules.d/60-wormhole-guest.rules",
        0o644,
        "udev.rules"
    ),
    text!(
        "usr/lib/systemd/system/wormhole-guest-window.service",
        0o644,
        "wormhole-guest-window.service"
    ),
    text!(
        "usr/lib/systemd/system/wormhole-guest-control.service",
        0o644,
        "wormhole-guest-control.service"
    ),
    text!(
        "usr/lib/systemd/system/wormhole-guest-files.service",
        0o644,
        "wormhole-guest-files.service"
    ),
    text!(
        "usr/lib/systemd/system/wormhole-guest-keeper.service",
        0o644,
        "wormhole-guest-keeper.service"
    ),
    text!("usr/share/doc/wormhole-guest/copyright", 0o644, "copyright"),
];

const CONTROL: &str = include_str!("../guest-package/control");

/// Built files that the package consists of.
#[derive(Clone, Debug)]
pub struct GuestParts {
    /// The command `wormhole-guest`.
    pub command: PathBuf,
    /// The frontend libraries, by the names that programs load.
    pub frontends: Vec<PathBuf>,
}

impl GuestParts {
    /// Builds the package in a folder and returns its path.
    pub fn package(&self, folder: &Path) -> Result<PathBuf, ImageError> {
        let tree = tempfile::Builder::new()
            .prefix("package-")
            .tempdir_in(folder)
            .map_err(io("make a folder in", folder))?;
        let root = tree.path();
        set_mode(root, 0o755)?;
        for (path, mode, text) in TEXTS {
            write(root, path, mode, text.as_bytes())?;
        }
        let mut bytes = self.copy(root, &self.command, Path::new("/usr/bin"), 0o755)?;
        for library in &self.frontends {
            bytes += self.copy(root, library, Path::new(PARTS), 0o644)?;
            // Some programs load the library without its version.
            let name = library.file_name().unwrap_or_default().to_string_lossy();
            if let Some(short) = name.strip_suffix(".1") {
                let link = below(root, Path::new(PARTS)).join(short);
                symlink(&*name, &link).map_err(io("make", &link))?;
            }
        }
        let control = CONTROL
            .replace("@VERSION@", env!("CARGO_PKG_VERSION"))
            .replace("@KIBIBYTES@", &bytes.div_ceil(1024).to_string());
        write(root, "DEBIAN/control", 0o644, control.as_bytes())?;

        let package = folder.join(PACKAGE);
        let mut build = Command::new("dpkg-deb");
        build
            .env("SOURCE_DATE_EPOCH", TIME)
            .args(["--root-owner-group", "--build"])
            .args([root, &package]);
        run("dpkg-deb", "dpkg", "--build", build)?;
        Ok(package)
    }

    /// Copies a file into a folder of the package and returns its size.
    fn copy(&self, root: &Path, from: &Path, to: &Path, mode: u32) -> Result<u64, ImageError> {
        let data = fs::read(from).map_err(io("read", from))?;
        let path = to.join(from.file_name().unwrap_or_default());
        write(root, &path, mode, &data)?;
        Ok(data.len() as u64)
    }
}

fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// Writes a file of the package. Its folders have mode 0755.
fn write(root: &Path, path: impl AsRef<Path>, mode: u32, data: &[u8]) -> Result<(), ImageError> {
    let path = below(root, path.as_ref());
    let mut folder = root.to_path_buf();
    let parents = path.strip_prefix(root).ok().and_then(Path::parent);
    for part in parents.into_iter().flatten() {
        folder.push(part);
        if !folder.is_dir() {
            fs::create_dir(&folder).map_err(io("make", &folder))?;
            set_mode(&folder, 0o755)?;
        }
    }
    fs::write(&path, data).map_err(io("write", &path))?;
    set_mode(&path, mode)
}

/// Sets a mode, whatever this process's umask is.
fn set_mode(path: &Path, mode: u32) -> Result<(), ImageError> {
    fs::set_permissions(path, Permissions::from_mode(mode)).map_err(io("set the mode of", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text_of(path: &str) -> &'static str {
        let found = TEXTS.iter().find(|(name, ..)| *name == path);
        found.expect(path).2
    }

    /// Builds a package in a folder of its own.
    fn package() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().expect("a folder");
        let part = |name: &str| {
            let path = folder.path().join(name);
            fs::write(&path, name).expect("a file");
            path
        };
        let parts = GuestParts {
            command: part("wormhole-guest"),
            frontends: vec![part("libcuda.so.1"), part("libnvidia-ml.so.1")],
        };
        let package = parts.package(folder.path()).expect("it is built");
        (folder, package)
    }

    fn dpkg_deb(option: &str, package: &Path) -> String {
        let run = Command::new("dpkg-deb")
            .arg(option)
            .arg(package)
            .env("TZ", "UTC")
            .output();
        let run = run.expect("dpkg-deb starts");
        assert!(run.status.success(), "{run:?}");
        String::from_utf8(run.stdout).expect("text")
    }

    #[test]
    fn the_package_has_each_file_with_its_owner_and_mode() {
        let (_folder, package) = package();
        let files = dpkg_deb("--contents", &package);
        for (mode, path) in [
            ("-rwxr-xr-x root/root", "./usr/bin/wormhole-guest"),
            ("-rw-r--r-- root/root", "./usr/lib/wormhole/libcuda.so.1"),
            (
                "lrwxrwxrwx root/root",
                "./usr/lib/wormhole/libcuda.so -> libcuda.so.1",
            ),
            (
                "-rw-r--r-- root/root",
                "./usr/lib/wormhole/libnvidia-ml.so.1",
            ),
            (
                "-rw-r--r-- root/root",
                "./usr/lib/udev/rules.d/60-wormhole-guest.rules",
            ),
            ("drwxr-xr-x root/root", "./usr/lib/"),
        ] {
            assert!(
                files
                    .lines()
                    .any(|line| line.starts_with(mode) && line.ends_with(path)),
                "{mode} {path}\n{files}"
            );
        }
        let control = dpkg_deb("--field", &package);
        assert!(
            control.contains(&format!("Version: {}\n", env!("CARGO_PKG_VERSION"))),
            "{control}"
        );
        assert!(control.contains("Installed-Size: 1\n"), "{control}");
    }

    #[test]
    fn the_same_parts_make_the_same_bytes() {
        let bytes = || {
            let (_folder, package) = package();
            fs::read(package).expect("it was built")
        };
        assert!(bytes() == bytes());
    }

    #[test]
    fn units_that_start_at_boot_are_enabled_stopped_and_forgotten() {
        let units = TEXTS
            .iter()
            .filter(|(path, _, text)| path.ends_with(".service") && text.contains("[Install]"));
        let mut count = 0;
        for (path, ..) in units {
            let name = path.rsplit('/').next().expect("a name");
            for script in ["postinst", "prerm", "postrm"] {
                let text = text_of(&format!("DEBIAN/{script}"));
                assert!(text.contains(name), "{script} leaves {name} out");
            }
            count += 1;
        }
        assert_eq!(count, 3);
    }

    #[test]
    fn the_loader_finds_the_folder_of_the_libraries() {
        let told = text_of("etc/ld.so.conf.d/wormhole-guest.conf");
        assert_eq!(told.trim(), PARTS);
    }
}
