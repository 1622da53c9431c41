//! Space that the commands of a driver's Makefile may take.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, StatVfsMountFlags, openat, statat, statvfs,
};
use rustix::io::Errno;

use super::DriverError;
use crate::error::{ImageError, io};

/// Free space that a build needs: the compiler, the unpacked driver, its modules, and the image.
pub(super) const SPACE: u64 = 3 << 30;
/// Most space and most files in the folders that the commands can write, and most folders in each other.
pub(super) const MOST_SPACE: u64 = 4 << 30;
pub(super) const MOST_FILES: u64 = 200_000;
const DEEPEST: usize = 64;
/// Least space that is left to others.
pub(super) const LEAST_LEFT: u64 = 256 << 20;

/// A folder, and no link to one.
const FOLDER: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// Refuses a folder of images in which a driver cannot be built, before anything is fetched.
pub(crate) fn check_folder(folder: &Path) -> Result<(), ImageError> {
    let system = statvfs(folder).map_err(|error| io("read", folder)(error.into()))?;
    let free = system.f_bavail.saturating_mul(system.f_frsize);
    Ok(check(folder, system.f_flag, free)?)
}

fn check(folder: &Path, flags: StatVfsMountFlags, free: u64) -> Result<(), DriverError> {
    let folder = folder.to_owned();
    if flags.contains(StatVfsMountFlags::NOEXEC) {
        return Err(DriverError::NoExecution(folder));
    }
    match free {
        ..SPACE => Err(DriverError::Space { folder, free }),
        _ => Ok(()),
    }
}

/// Returns whether all below some folders of one file system takes no more than so many bytes, and leaves others enough.
pub(super) fn is_within(folders: &[PathBuf], most: u64) -> io::Result<bool> {
    let mut left = Left {
        bytes: most,
        files: MOST_FILES,
    };
    for path in folders {
        let folder = openat(CWD, path, FOLDER, Mode::empty())?;
        if !left.take(&folder, DEEPEST)? {
            return Ok(false);
        }
        let system = statvfs(path)?;
        if system.f_bavail.saturating_mul(system.f_frsize) < LEAST_LEFT {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Space and files that may still be taken.
struct Left {
    bytes: u64,
    files: u64,
}

impl Left {
    /// Takes those below a folder, with at most so many folders in each other. Returns whether they were left. Follows no
    /// link.
    fn take(&mut self, folder: &OwnedFd, deepest: usize) -> Result<bool, Errno> {
        for entry in Dir::read_from(folder)? {
            let entry = entry?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            let found = match statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
                // It was removed meanwhile.
                Err(Errno::NOENT) => continue,
                found => found?,
            };
            let bytes = u64::try_from(found.st_blocks).map_or(0, |blocks| blocks * 512);
            let left = self.bytes.checked_sub(bytes);
            let Some((bytes, files)) = left.zip(self.files.checked_sub(1)) else {
                return Ok(false);
            };
            *self = Self { bytes, files };
            if FileType::from_raw_mode(found.st_mode) != FileType::Directory {
                continue;
            }
            let inner = match openat(folder, name, FOLDER, Mode::empty()) {
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => continue,
                inner => inner?,
            };
            if deepest == 0 || !self.take(&inner, deepest - 1)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn all_below_the_folders_counts_and_nothing_elsewhere() {
        let folder = tempfile::tempdir().expect("a folder");
        let [one, two] = ["one", "two"].map(|name| folder.path().join(name));
        fs::create_dir_all(one.join("inner")).expect("a folder");
        fs::create_dir(&two).expect("a folder");
        fs::write(folder.path().join("large"), vec![1; 1 << 20]).expect("room");
        symlink("../large", one.join("link")).expect("a link");
        symlink("..", one.join("above")).expect("a link");
        fs::write(one.join("inner/file"), vec![1; 300 << 10]).expect("room");
        fs::write(two.join("file"), vec![1; 300 << 10]).expect("room");
        let folders = [one.clone(), two.clone()];
        let within = |folders: &[PathBuf], most| is_within(folders, most).expect("they are there");
        assert!(within(&folders, 900 << 10) && within(&folders[..1], 500 << 10));
        assert!(!within(&folders, 500 << 10));
        let deep = two.join("d/".repeat(DEEPEST));
        fs::create_dir_all(&deep).expect("a folder");
        assert!(within(&folders, 1 << 30));
        fs::create_dir(deep.join("d")).expect("a folder");
        assert!(!within(&folders, 1 << 30));
        assert!(is_within(&[folder.path().join("none")], 1 << 30).is_err());
    }

    #[test]
    fn a_driver_is_built_where_programs_can_be_executed_and_space_is_left() {
        let check = |flags, free| check(Path::new("/images"), flags, free);
        let plain = StatVfsMountFlags::NOSUID;
        check(plain, SPACE).expect("a build has room");
        let noexec = check(plain | StatVfsMountFlags::NOEXEC, SPACE).expect_err("none can");
        let said = noexec.to_string();
        assert!(
            said.contains("compiled in /images, where no program"),
            "{said}"
        );
        let said = check(plain, 2 << 30).expect_err("too little").to_string();
        assert!(said.contains("2048 MiB are free there"), "{said}");
    }
}
