//! Compiles the driver's kernel modules with Debian's compiler, in a root of its packages.
//!
//! The commands come from the driver's Makefile. They run in namespaces of their own, without a network, with the packages
//! and the modules' sources as their only files. Of root they run as nobody.

use std::fs::{self, File, Permissions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use super::parts::{Parts, is_file};
use super::{DriverError, Surroundings};
use crate::debian::Archive;
use crate::error::{ImageError, io};

/// Packages of the compiler beside the kernel's headers, which name the kernel's own compiler.
const PACKAGES: [&str; 9] = [
    "coreutils",
    "dash",
    "diffutils",
    "findutils",
    "gcc",
    "grep",
    "make",
    "mawk",
    "sed",
];
/// Folders of the root that Debian's installed systems have as links into `/usr`.
const MERGED: [&str; 4] = ["bin", "sbin", "lib", "lib64"];
/// Links that Debian's packages make when they are installed, and their targets.
const LINKS: [(&str, &str); 2] = [("usr/bin/awk", "mawk"), ("bin/sh", "dash")];
/// Folder of the sources in the root.
const SOURCES: &str = "build";
/// Modules of the driver that are built, and their files. Those for screens are left out.
const BUILT: [(&str, &str); 2] = [("nvidia", "nvidia.ko"), ("nvidia_uvm", "nvidia-uvm.ko")];
const LEFT_OUT: &str = "nvidia-modeset nvidia-drm nvidia-peermem";
/// User and group of the commands, if root builds an image: nobody.
const NOBODY: u32 = 65534;
/// Makes the null device of the root, and enters it.
const ENTER: &str = "mount --bind /dev/null dev/null && exec chroot \"$@\"";
/// Compiles, and removes what is for debuggers.
const COMPILE: &str = "make \"$@\" modules && strip --strip-debug nvidia.ko nvidia-uvm.ko";
/// Lines of the compiler that are shown if it fails, and bytes at the end of its log among which they are.
const SHOWN: usize = 8;
const SHOWN_BYTES: u64 = 1 << 20;
/// Parts of lines that name an error.
const ERRORS: [&str; 3] = [": error: ", ": not found", "*** ["];

/// Compiles the modules, whose sources move away. Returns their names and files.
pub(super) fn modules(
    parts: &Parts,
    surroundings: &Surroundings<'_>,
) -> Result<Vec<(&'static str, PathBuf)>, ImageError> {
    let &Surroundings {
        release,
        scratch,
        log,
        progress,
        ..
    } = surroundings;
    let root = root(surroundings)?;
    let sources = root.join(SOURCES);
    fs::rename(&parts.sources, &sources).map_err(io("move", &parts.sources))?;
    let is_root = rustix::process::geteuid().is_root();
    if is_root {
        give_away(&sources).map_err(io("give away", &sources))?;
    }
    progress(&format!(
        "building the modules of driver {} for kernel {release}, which takes minutes",
        parts.version
    ));
    let output = scratch.join("log");
    let log_file = File::create(&output).map_err(io("write", &output))?;
    let both = log_file.try_clone().map_err(io("write", &output))?;
    let mut command = command(release, is_root);
    command
        .current_dir(&root)
        .stdin(Stdio::null())
        .stdout(log_file)
        .stderr(both);
    let status = command.status().map_err(|source| ImageError::Start {
        program: "unshare",
        source,
    })?;
    let built = BUILT.map(|(name, file)| (name, sources.join(file)));
    if status.success() && built.iter().all(|(_, path)| is_file(path)) {
        return Ok(built.into());
    }
    for line in telling_lines(&output).map_err(io("read", &output))? {
        progress(&line);
    }
    fs::rename(&output, log).map_err(io("write", log))?;
    Err(DriverError::Compile {
        version: parts.version.clone(),
        release: release.to_owned(),
        log: log.to_owned(),
    }
    .into())
}

/// Makes the root, a folder with the compiler and the kernel's headers.
fn root(surroundings: &Surroundings<'_>) -> Result<PathBuf, ImageError> {
    let place = surroundings.scratch.join("compiler");
    fs::create_dir(&place).map_err(io("make", &place))?;
    (surroundings.progress)("fetching Debian's compiler and the headers of the kernel");
    let archive = Archive::of(&place, &surroundings.kernel.suite().sources())?;
    let headers = format!("linux-headers-{}", surroundings.release);
    let packages: Vec<&str> = PACKAGES.into_iter().chain([headers.as_str()]).collect();
    let root = place.join("root");
    fs::create_dir(&root).map_err(io("make", &root))?;
    for package in archive.download_with_dependencies(&packages)? {
        archive.extract(&package, &root)?;
    }
    prepare(&root).map_err(io("prepare", &root))?;
    Ok(root)
}

/// Makes what installing the packages would have made.
fn prepare(root: &Path) -> std::io::Result<()> {
    fs::set_permissions(root, Permissions::from_mode(0o755))?;
    for name in MERGED {
        let place = root.join(name);
        if fs::symlink_metadata(&place).is_err() {
            symlink(Path::new("usr").join(name), place)?;
        }
    }
    for (name, target) in LINKS {
        let place = root.join(name);
        if fs::symlink_metadata(&place).is_err() {
            symlink(target, place)?;
        }
    }
    fs::create_dir_all(root.join("dev"))?;
    fs::write(root.join("dev/null"), "")?;
    fs::create_dir_all(root.join("tmp"))?;
    fs::set_permissions(root.join("tmp"), Permissions::from_mode(0o1777))
}

/// Gives a folder and all in it to nobody.
fn give_away(folder: &Path) -> std::io::Result<()> {
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        chown(&folder, Some(NOBODY), Some(NOBODY))?;
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            match entry.file_type()?.is_dir() {
                true => folders.push(entry.path()),
                // There are no links among them.
                false => chown(entry.path(), Some(NOBODY), Some(NOBODY))?,
            }
        }
    }
    Ok(())
}

/// Returns the command that compiles, for the root as its folder.
fn command(release: &str, is_root: bool) -> Command {
    let mut command = Command::new("unshare");
    command.args([
        "--mount",
        "--net",
        "--pid",
        "--ipc",
        "--fork",
        "--kill-child",
    ]);
    if !is_root {
        command.arg("--map-root-user");
    }
    command.args(["--", "sh", "-c", ENTER, "sh"]);
    if is_root {
        command.arg(format!("--userspec={NOBODY}:{NOBODY}"));
    }
    let (version, _) = release.split_once("-cloud").unwrap_or((release, ""));
    let processors = thread::available_parallelism().map_or(1, usize::from);
    command
        .args([".", "/usr/bin/env", "-i"])
        .args([
            "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME=/tmp",
            "LC_ALL=C",
        ])
        .args(["sh", "-c", &format!("cd /{SOURCES} && {COMPILE}"), "sh"])
        .arg(format!("--jobs={processors}"))
        .arg(format!("SYSSRC=/usr/src/linux-headers-{version}-common"))
        .arg(format!("SYSOUT=/usr/src/linux-headers-{release}"))
        .arg(format!("KERNEL_UNAME={release}"))
        .arg(format!("NV_EXCLUDE_KERNEL_MODULES={LEFT_OUT}"));
    command
}

/// Returns the first lines of a log that name an error, or else its last lines.
fn telling_lines(log: &Path) -> std::io::Result<Vec<String>> {
    let mut file = File::open(log)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(SHOWN_BYTES)))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    let is_error = |line: &&&str| ERRORS.iter().any(|part| line.contains(part));
    let errors: Vec<String> = lines
        .iter()
        .filter(is_error)
        .map(|line| (*line).to_owned())
        .take(SHOWN)
        .collect();
    if !errors.is_empty() {
        return Ok(errors);
    }
    let last = lines.iter().rev().take(SHOWN).rev();
    Ok(last.map(|line| (*line).to_owned()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_shown_before_the_last_lines() {
        let folder = tempfile::tempdir().expect("a folder");
        let log = folder.path().join("log");
        let shown = |text: &str| {
            fs::write(&log, text).expect("room");
            telling_lines(&log).expect("it is read")
        };
        let steps: String = (0..20)
            .map(|step| format!("CC {step} -Werror\n\n"))
            .collect();
        let last = shown(&steps);
        assert_eq!((last.len(), last[7].as_str()), (SHOWN, "CC 19 -Werror"));
        let error = "nv.c:1:2: error: too few arguments";
        let failed = format!("{steps}{error}\nmake[1]: *** [nv.o] Error 1\n{steps}");
        assert_eq!(shown(&failed), [error, "make[1]: *** [nv.o] Error 1"]);
        assert!(shown("").is_empty());
    }

    #[test]
    fn the_root_has_what_installed_packages_have_and_keeps_what_is_there() {
        let root = tempfile::tempdir().expect("a folder");
        let root = root.path();
        fs::create_dir_all(root.join("usr/bin")).expect("a folder");
        fs::create_dir_all(root.join("bin")).expect("a folder");
        fs::write(root.join("bin/sh"), "of a package").expect("room");
        prepare(root).expect("room");
        let link = |name: &str| fs::read_link(root.join(name)).ok();
        assert_eq!(link("lib"), Some("usr/lib".into()));
        assert_eq!(link("usr/bin/awk"), Some("mawk".into()));
        assert_eq!((link("bin"), link("bin/sh")), (None, None));
        assert!(root.join("dev/null").is_file());
    }
}
