//! Builds disk images of Debian with systemd and the package `wormhole-guest`.
//!
//! `FOLDER/guest-bookworm/{disk.raw,vmlinuz,initrd,recipe,SHA256SUMS}` and the package. The base, which is Debian without
//! the package, is kept in `FOLDER/debian-bookworm` ([`base`]). The package is installed in a folder, and mke2fs writes
//! that into a file, without a mount and a loop device. SHA256SUMS has no sum of the disk, since guests write to it.

mod base;
mod packages;
mod system;

use std::fs::{self, DirBuilder, File};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::debian::run;
use crate::error::{ImageError, io};
use crate::guest_package::{GuestParts, PACKAGE};
use crate::remove_unpacked;
use crate::sums;

pub use base::{DebianOptions, build_base};
pub use packages::{NotAPackage, PackageName, Suite};

/// Files of an image.
const DISK: &str = "disk.raw";
const KERNEL: &str = "vmlinuz";
const INITRD: &str = "initrd";
const RECIPE: &str = "recipe";
/// Files that guests do not change.
const CONSTANT: [&str; 3] = [KERNEL, INITRD, PACKAGE];

/// Size of the file system. The file is sparse: it occupies what is written to it.
const DISK_BYTES: u64 = 8 << 30;

/// Bit of a mode that lets all users read.
const OTHERS_READ: u32 = 0o004;

/// Kernel command line of a guest whose first disk is the image.
pub const DISK_COMMAND_LINE: &str =
    "root=/dev/vda rw console=ttyS0 quiet panic=-1 reboot=k tsc=reliable net.ifnames=0";

/// A disk image and what boots it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DebianDisk {
    pub disk: PathBuf,
    pub kernel: PathBuf,
    pub initrd: PathBuf,
    /// The Debian package that the image has installed.
    pub package: PathBuf,
}

impl DebianDisk {
    fn at(place: &Path) -> Self {
        Self {
            disk: place.join(DISK),
            kernel: place.join(KERNEL),
            initrd: place.join(INITRD),
            package: place.join(PACKAGE),
        }
    }

    /// Returns the bytes that the disk occupies; it is sparse.
    pub fn occupied_bytes(&self) -> Result<u64, ImageError> {
        let data = fs::metadata(&self.disk).map_err(io("read", &self.disk))?;
        Ok(data.blocks() * 512)
    }
}

/// Builds a disk image with a package of these parts, unless it exists.
///
/// # Errors
/// The image exists and was built of other packages: it may have a guest's data, so that only `rebuild` replaces it.
pub fn build_disk(
    options: &DebianOptions<'_>,
    parts: &GuestParts,
) -> Result<DebianDisk, ImageError> {
    let _lock = options.lock()?;
    in_fresh(&options.folder.join("unfinished-guest"), |fresh| {
        build_in(fresh, options, parts)
    })
}

/// Works in an empty folder below `fresh`, which is gone afterwards, also if it stems from an attempt that was interrupted.
/// Other users cannot reach it: until the image is whole, its programs with set-user-ID bits are those of no system.
pub(crate) fn in_fresh<T>(
    fresh: &Path,
    work: impl FnOnce(&Path) -> Result<T, ImageError>,
) -> Result<T, ImageError> {
    remove(fresh)?;
    let mut private = DirBuilder::new();
    private
        .mode(0o700)
        .create(fresh)
        .map_err(io("make", fresh))?;
    // It is moved away, and then has the rights that its user gives to folders.
    let inner = fresh.join("image");
    fs::create_dir(&inner).map_err(io("make", &inner))?;
    let done = work(&inner);
    remove(fresh)?;
    done
}

/// Builds the image in an empty folder and moves it to its place, unless it is there.
fn build_in(
    fresh: &Path,
    options: &DebianOptions<'_>,
    parts: &GuestParts,
) -> Result<DebianDisk, ImageError> {
    let place = options.folder.join(format!("guest-{}", options.suite));
    let package = parts.package(fresh)?;
    let recipe = recipe(options, &package)?;
    if place.exists() && !options.rebuild {
        return existing(&place, &recipe, options.progress)?.ok_or(ImageError::OtherDisk { place });
    }
    let _held = hold(&DebianDisk::at(&place).disk)?;
    let base = base::ensure(options)?;
    (options.progress)("writing the disk");
    let image = DebianDisk::at(fresh);
    let root = fresh.join("root");
    fs::create_dir(&root).map_err(io("make", &root))?;
    let mut tar = Command::new("tar");
    tar.args(["--extract", "--numeric-owner", "--preserve-permissions"])
        .args(["--xattrs", "--xattrs-include=*", "--file"])
        .arg(base)
        .arg("--directory")
        .arg(&root);
    run("tar", "tar", "--extract", tar)?;
    configure(&root, &package)?;
    for (name, to) in [("vmlinuz", &image.kernel), ("initrd.img", &image.initrd)] {
        let from = root.join(name);
        fs::copy(&from, to).map_err(io("copy", &from))?;
    }
    let disk = &image.disk;
    // Private: a user who can read it sees the guest's files, and can lock it.
    let mut private = File::options();
    private.write(true).create_new(true).mode(0o600);
    let file = private.open(disk).map_err(io("make", disk))?;
    file.set_len(DISK_BYTES).map_err(io("size", disk))?;
    drop(file);
    let mut mke2fs = Command::new("mke2fs");
    mke2fs
        .args(["-q", "-t", "ext4", "-L", system::LABEL, "-d"])
        .args([&root, disk]);
    run("mke2fs", "e2fsprogs", "-t ext4", mke2fs)?;
    remove(&root)?;
    let path = fresh.join(RECIPE);
    fs::write(&path, recipe).map_err(io("write", &path))?;
    sums::write(fresh, &CONSTANT)?;

    remove(&place)?;
    fs::rename(fresh, &place).map_err(io("place", &place))?;
    Ok(DebianDisk::at(&place))
}

/// Locks a disk that is going to be replaced, as a guest does that has it, if it is there.
///
/// # Errors
/// A guest has it. It would lose what it writes from then on.
fn hold(disk: &Path) -> Result<Option<File>, ImageError> {
    let held = match File::open(disk) {
        Ok(held) => held,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(io("open", disk)(error)),
    };
    match flock(&held, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(held)),
        Err(Errno::WOULDBLOCK) => Err(ImageError::DiskInUse {
            disk: disk.to_owned(),
        }),
        Err(error) => Err(io("lock", disk)(error.into())),
    }
}

/// Returns a text that differs from those of other disks: that of the base, and the sums of the package and of the
/// configuration.
fn recipe(options: &DebianOptions<'_>, package: &Path) -> Result<String, ImageError> {
    let data = fs::read(package).map_err(io("read", package))?;
    Ok(format!(
        "{}wormhole-guest {}\nsystem {}\n",
        base::recipe(options),
        sums::of(&data),
        sums::of(system::SCRIPT.as_bytes())
    ))
}

/// Returns the existing image; `None` if it has another recipe or is damaged.
fn existing(
    place: &Path,
    recipe: &str,
    progress: &dyn Fn(&str),
) -> Result<Option<DebianDisk>, ImageError> {
    let image = DebianDisk::at(place);
    let is_same = fs::read_to_string(place.join(RECIPE)).is_ok_and(|found| found == recipe);
    if !image.disk.is_file() {
        return Ok(None);
    }
    name_readers(&image.disk, progress);
    let is_whole = sums::compare(place, &CONSTANT)?.is_none();
    Ok((is_same && is_whole).then_some(image))
}

/// Says that other users can read a disk or a base, as earlier versions let them. Its mode stays, since its owner may have
/// chosen it.
fn name_readers(path: &Path, progress: &dyn Fn(&str)) {
    if fs::metadata(path).is_ok_and(|data| data.mode() & OTHERS_READ != 0) {
        progress(&format!(
            "all users can read {}: `chmod 600` takes it from them",
            path.display()
        ));
    }
}

/// Installs the package in a system below a folder, and configures the system.
fn configure(root: &Path, package: &Path) -> Result<(), ImageError> {
    let copy = root.join("tmp/wormhole-guest.deb");
    fs::copy(package, &copy).map_err(io("copy", package))?;
    let mut script = Command::new("sh");
    script
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("LC_ALL", "C")
        .env("DEBIAN_FRONTEND", "noninteractive")
        .args(["-c", system::SCRIPT, "sh"])
        .arg(root);
    run("sh", "dash", "-c system.sh", script).map(drop)
}

/// Removes a folder and all below it, if it is there.
pub(crate) fn remove(folder: &Path) -> Result<(), ImageError> {
    match remove_unpacked(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(io("remove", folder)(error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{thread, time::Duration};

    fn parts(folder: &Path) -> GuestParts {
        let part = |name: &str| {
            let path = folder.join(name);
            fs::write(&path, name).expect("a file");
            path
        };
        GuestParts {
            command: part("wormhole-guest"),
            frontends: vec![part("libcuda.so.1")],
        }
    }

    fn options<'a>(folder: &'a Path, packages: &'a [PackageName]) -> DebianOptions<'a> {
        DebianOptions {
            folder,
            suite: Suite::Bookworm,
            packages,
            rebuild: false,
            progress: &|_| (),
        }
    }

    #[test]
    fn an_image_that_is_not_whole_is_out_of_reach_of_other_users() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().expect("a folder");
        let (fresh, place) = (folder.path().join("fresh"), folder.path().join("place"));
        let mode = |path: &Path| {
            fs::metadata(path)
                .expect("it is there")
                .permissions()
                .mode()
        };
        let ordinary = folder.path().join("ordinary");
        fs::create_dir(&ordinary).expect("a folder");
        // An attempt that was interrupted has left this.
        fs::create_dir(&fresh).expect("a folder");
        fs::write(fresh.join("left"), "").expect("a file");
        in_fresh(&fresh, |work| {
            assert_eq!(mode(&fresh) & 0o777, 0o700);
            assert_eq!(fs::read_dir(work).expect("a folder").count(), 0);
            fs::rename(work, &place).map_err(io("place", &place))
        })
        .expect("it is placed");
        assert!(!fresh.exists());
        assert_eq!(mode(&place), mode(&ordinary));
    }

    #[test]
    fn a_disk_that_a_guest_has_is_not_replaced() {
        let folder = tempfile::tempdir().expect("a folder");
        let image = DebianDisk::at(&folder.path().join("guest-bookworm"));
        fs::create_dir(image.disk.parent().expect("a folder")).expect("a folder");
        fs::write(&image.disk, "written by the guest").expect("a file");
        let guest = File::open(&image.disk).expect("a file");
        flock(&guest, FlockOperation::LockShared).expect("it is free");
        let parts = parts(folder.path());
        let options = DebianOptions {
            rebuild: true,
            ..options(folder.path(), &[])
        };
        let work = folder.path().join("work");
        fs::create_dir(&work).expect("a folder");
        let refused = build_in(&work, &options, &parts);
        let refused = refused.expect_err("a guest has it").to_string();
        assert!(
            refused.contains("is in use: stop the guest that has it"),
            "{refused}"
        );
        let kept = fs::read_to_string(&image.disk).expect("it is there");
        assert_eq!(kept, "written by the guest");
        drop(guest);
        // A process that another test starts has a copy of the guest's descriptor until it executes its program.
        let released = (0..500).any(|_| {
            thread::sleep(Duration::from_millis(10));
            hold(&image.disk).is_ok_and(|held| held.is_some())
        });
        assert!(released);
    }

    #[test]
    fn a_file_keeps_the_mode_that_its_owner_gave_it_and_readers_are_named() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().expect("a folder");
        let place = folder.path().join("guest-bookworm");
        fs::create_dir(&place).expect("a folder");
        let said = std::cell::RefCell::new(Vec::new());
        let progress = |line: &str| said.borrow_mut().push(line.to_owned());
        let options = DebianOptions {
            progress: &progress,
            ..options(folder.path(), &[])
        };
        let base = folder.path().join("debian-bookworm");
        fs::create_dir(&base).expect("a folder");
        fs::write(base.join(RECIPE), base::recipe(&options)).expect("a file");
        let image = DebianDisk::at(&place);
        let files = [
            image.disk.clone(),
            folder.path().join("lock"),
            base.join("base.tar"),
        ];
        for file in &files {
            fs::write(file, "").expect("a file");
        }
        for name in CONSTANT {
            fs::write(place.join(name), name).expect("a file");
        }
        fs::write(place.join(RECIPE), "a recipe").expect("a file");
        sums::write(&place, &CONSTANT).expect("sums");
        for (mode, named) in [(0o640, 0), (0o660, 0), (0o644, 2)] {
            for file in &files {
                fs::set_permissions(file, fs::Permissions::from_mode(mode)).expect("its mode");
            }
            let found = existing(&place, "a recipe", options.progress).expect("it is read");
            assert_eq!(found.as_ref(), Some(&image));
            build_base(&options).expect("it is there");
            for file in &files {
                let kept = fs::metadata(file).expect("it is there").permissions();
                assert_eq!(kept.mode() & 0o7777, mode, "{}", file.display());
            }
            assert_eq!(said.take().len(), named, "{mode:o}");
        }
    }

    #[test]
    fn a_disk_of_other_packages_is_kept_until_its_user_says_otherwise() {
        let folder = tempfile::tempdir().expect("a folder");
        let parts = parts(folder.path());
        let build =
            |packages: &[PackageName]| build_disk(&options(folder.path(), packages), &parts);
        // The image as a build of these parts without other packages leaves it.
        let place = folder.path().join("guest-bookworm");
        fs::create_dir(&place).expect("a folder");
        parts.package(&place).expect("it is built");
        for name in [DISK, KERNEL, INITRD] {
            fs::write(place.join(name), name).expect("a file");
        }
        let recipe = recipe(&options(folder.path(), &[]), &place.join(PACKAGE));
        let recipe = recipe.expect("it is read");
        fs::write(place.join(RECIPE), recipe).expect("a file");
        sums::write(&place, &CONSTANT).expect("sums");

        // A guest has written to its disk.
        fs::write(place.join(DISK), "a guest's data").expect("a file");
        assert_eq!(build(&[]).expect("it is there"), DebianDisk::at(&place));
        let other = ["python3".parse().expect("a name")];
        let error = build(&other)
            .expect_err("it is of other packages")
            .to_string();
        assert!(error.contains("--rebuild"), "{error}");
        let data = fs::read_to_string(place.join(DISK));
        assert_eq!(data.ok().as_deref(), Some("a guest's data"));
        fs::write(place.join(KERNEL), "another").expect("a file");
        assert!(build(&[]).is_err(), "a damaged image is none");
        assert!(!folder.path().join("unfinished-guest").exists());
    }
}
