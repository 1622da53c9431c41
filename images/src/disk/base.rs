//! The base of disk images: Debian as its packages leave it, in `FOLDER/debian-bookworm/{base.tar,recipe}`.

use std::fs::{self, File, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::packages::{self, PackageName, Suite};
use super::{RECIPE, in_fresh, name_readers, remove, system};
use crate::debian::KEYRING;
use crate::error::{ImageError, io};
use crate::{guest_package, image, sums};

const PROGRAM: &str = "/usr/bin/mmdebstrap";
const UNSHARE: &str = "unshare";
const BASE: &str = "base.tar";

/// Options of building a disk image or its base.
#[derive(Clone, Copy)]
pub struct DebianOptions<'a> {
    /// Folder of images.
    pub folder: &'a Path,
    pub suite: Suite,
    /// Debian packages beside those of each image.
    pub packages: &'a [PackageName],
    /// Builds the image even if it exists.
    pub rebuild: bool,
    /// Callback that receives progress messages, one sentence each.
    pub progress: &'a dyn Fn(&str),
}

impl std::fmt::Debug for DebianOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DebianOptions")
            .field("folder", &self.folder)
            .field("suite", &self.suite)
            .field("packages", &self.packages)
            .field("rebuild", &self.rebuild)
            .finish_non_exhaustive()
    }
}

impl DebianOptions<'_> {
    /// Locks the folder of images until the file is dropped.
    pub(super) fn lock(&self) -> Result<File, ImageError> {
        image::lock(self.folder, self.progress)
    }
}

/// Builds the base of a disk image unless it exists, so that the image itself takes less time.
pub fn build_base(options: &DebianOptions<'_>) -> Result<(), ImageError> {
    let _lock = options.lock()?;
    ensure(options).map(drop)
}

/// Builds the base unless it exists, and returns its path. The folder of images must be locked.
pub(super) fn ensure(options: &DebianOptions<'_>) -> Result<PathBuf, ImageError> {
    let place = options.folder.join(format!("debian-{}", options.suite));
    let recipe = recipe(options);
    let path = place.join(RECIPE);
    let is_same = fs::read_to_string(&path).is_ok_and(|found| found == recipe);
    if !is_same || options.rebuild {
        if !rustix::process::geteuid().is_root() {
            return Err(ImageError::NotRoot);
        }
        in_fresh(&options.folder.join("unfinished-debian"), |fresh| {
            bootstrap(fresh, options)?;
            // A user who can read the base can lock it.
            let base = fresh.join(BASE);
            let private = Permissions::from_mode(0o600);
            fs::set_permissions(&base, private).map_err(io("restrict", &base))?;
            let path = fresh.join(RECIPE);
            fs::write(&path, recipe).map_err(io("write", &path))?;
            remove(&place)?;
            fs::rename(fresh, &place).map_err(io("place", &place))
        })?;
    }
    let base = place.join(BASE);
    name_readers(&base, options.progress);
    Ok(base)
}

/// Returns a text that differs from those of other bases: the suite, the packages, and the sum of other options.
pub(super) fn recipe(options: &DebianOptions<'_>) -> String {
    let others = system::LEFT_OUT.concat() + system::INITRAMFS;
    let mut text = format!(
        "suite {}\noptions {}\n",
        options.suite,
        sums::of(others.as_bytes())
    );
    for name in packages::of(options.packages) {
        text.push_str(&format!("package {name}\n"));
    }
    text
}

/// Installs Debian into an archive in an empty folder.
fn bootstrap(fresh: &Path, options: &DebianOptions<'_>) -> Result<(), ImageError> {
    if !Path::new(PROGRAM).is_file() {
        return Err(ImageError::NoTool {
            program: "mmdebstrap",
            package: "mmdebstrap",
        });
    }
    if !Path::new(KEYRING).is_file() {
        return Err(ImageError::NoKeyring(KEYRING.into()));
    }
    // mmdebstrap mounts folders of this machine in the new system. In a namespace these mounts end with its processes,
    // however they end, so that removing what they leave reaches nothing else.
    let mut command = Command::new(UNSHARE);
    command
        .args(["--mount", "--pid", "--fork", "--mount-proc", "--kill-child"])
        .args(["--", PROGRAM])
        .env("TMPDIR", fresh)
        .env("LC_ALL", "C")
        .args(["--mode=root", "--format=tar", "--variant=minbase"])
        .arg(format!(
            "--include={}",
            packages::of(options.packages).join(",")
        ))
        .arg(format!("--keyring={KEYRING}"))
        .arg("--aptopt=APT::Install-Recommends \"false\"")
        // An interrupted build is started anew, so that its files need not survive.
        .arg("--dpkgopt=force-unsafe-io")
        .args(system::LEFT_OUT.map(|path| format!("--dpkgopt=path-exclude={path}")))
        .arg("--setup-hook=".to_owned() + system::INITRAMFS)
        .env("SOURCE_DATE_EPOCH", guest_package::TIME)
        .arg(options.suite.to_string())
        .arg(fresh.join(BASE))
        .args(
            options
                .suite
                .sources()
                .map(|source| format!("deb {source}")),
        )
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let failed = |source| ImageError::Start {
        program: UNSHARE,
        source,
    };
    let mut child = command.spawn().map_err(failed)?;
    let mut faults = Vec::new();
    let lines = child.stderr.take().map(BufReader::new);
    for line in lines
        .into_iter()
        .flat_map(BufRead::lines)
        .map_while(Result::ok)
    {
        if let Some(step) = step(&line) {
            (options.progress)(&format!("Debian {}: {step}", options.suite));
        } else if let Some(fault) = line.strip_prefix("E: ") {
            faults.push(fault.to_owned());
        }
    }
    let status = child.wait().map_err(failed)?;
    match status.success() {
        true => Ok(()),
        false => Err(ImageError::Tool {
            command: "mmdebstrap".to_owned(),
            status,
            output: faults.join("; "),
        }),
    }
}

/// Returns the step that a line of mmdebstrap announces, if it takes long.
fn step(line: &str) -> Option<&str> {
    let text = line.strip_prefix("I: ")?;
    let verbs = [
        "running apt-get update",
        "downloading",
        "extracting",
        "installing",
    ];
    verbs
        .iter()
        .any(|verb| text.starts_with(verb))
        .then(|| text.trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_steps_are_shown_and_no_others() {
        assert_eq!(
            step("I: downloading packages with apt..."),
            Some("downloading packages with apt")
        );
        assert_eq!(step("I: automatically chosen mode: root"), None);
        assert_eq!(step("E: installing failed"), None);
    }
}
