//! Names that a process has made in folders, and removes again.
//!
//! Another user may be able to write a folder on the way, and put another one in its place. So a name is removed only in the
//! folder in which it was made, and only from the file that it was made for.

use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, openat, unlinkat};
use serde::{Deserialize, Serialize};

/// Place of a name, in a folder that stays the same whatever becomes of its path.
#[derive(Debug)]
pub struct Place {
    path: PathBuf,
    folder: File,
    name: OsString,
}

/// A name that was made, with the identities of its folder and of the file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Made {
    /// As a string of the system, which need not be UTF-8.
    path: OsString,
    folder: Identity,
    file: Identity,
}

/// Device and number of a file, its type, and the time at which it was made, since numbers are used again. Some file systems
/// have no such time.
type Identity = (u64, u64, u32, Option<SystemTime>);

impl Place {
    /// Returns the place at a path. There need not be a file.
    ///
    /// # Errors
    /// The path has no name, or its folder cannot be reached.
    pub fn of(path: &Path) -> io::Result<Self> {
        let name = path.file_name().ok_or(io::ErrorKind::IsADirectory)?;
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        Ok(Self {
            path: path.to_owned(),
            folder: open(CWD, folder, OFlags::DIRECTORY)?,
            name: name.to_owned(),
        })
    }

    /// Returns the name that was made here, and its file, opened for its facts alone. Follows no link to the file.
    ///
    /// # Errors
    /// There is no file.
    pub fn made(&self) -> io::Result<(Made, File)> {
        let file = open(&self.folder, Path::new(&self.name), OFlags::NOFOLLOW)?;
        let made = Made {
            path: self.path.clone().into(),
            folder: identity(&self.folder.metadata()?),
            file: identity(&file.metadata()?),
        };
        Ok((made, file))
    }
}

impl Made {
    /// Removes the name, unless another folder or file has taken its place.
    pub fn remove(&self) {
        // A place that cannot be looked at stays as it is.
        let _ = self.try_remove();
    }

    fn try_remove(&self) -> io::Result<()> {
        let place = Place::of(Path::new(&self.path))?;
        let (there, _) = place.made()?;
        if (there.folder, there.file) == (self.folder, self.file) {
            unlinkat(&place.folder, &place.name, AtFlags::empty())?;
        }
        Ok(())
    }
}

fn identity(file: &Metadata) -> Identity {
    let kind = file.mode() & libc::S_IFMT;
    (file.dev(), file.ino(), kind, file.created().ok())
}

fn open(folder: impl AsFd, path: &Path, flags: OFlags) -> io::Result<File> {
    let flags = flags | OFlags::PATH | OFlags::CLOEXEC;
    Ok(openat(folder, path, flags, Mode::empty())?.into())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use tempfile::TempDir;

    use super::*;

    fn made_at(path: &Path) -> io::Result<(Made, File)> {
        Place::of(path)?.made()
    }

    /// Returns two folders with a free path between them, and the folder that has them.
    fn folders() -> (TempDir, [PathBuf; 3]) {
        let all = tempfile::tempdir().unwrap();
        let paths = ["folder", "moved", "other"].map(|name| all.path().join(name));
        for folder in [&paths[0], &paths[2]] {
            fs::create_dir(folder).unwrap();
        }
        (all, paths)
    }

    #[test]
    fn a_name_is_removed_where_it_was_made_alone() {
        let (_all, [folder, moved, other]) = folders();
        let path = folder.join("name");
        fs::write(&path, "").unwrap();
        let (made, _) = made_at(&path).unwrap();
        // The same file in another folder, which has taken the place of the first one.
        fs::hard_link(&path, other.join("name")).unwrap();
        fs::rename(&folder, &moved).unwrap();
        symlink(&other, &folder).unwrap();
        made.remove();
        assert!(other.join("name").exists() && moved.join("name").exists());
        fs::remove_file(&folder).unwrap();
        fs::rename(&moved, &folder).unwrap();
        made.remove();
        assert!(!path.exists());
    }

    #[test]
    fn a_name_that_is_made_behind_a_link_is_not_taken_for_one_of_the_folder() {
        let (_all, [folder, moved, other]) = folders();
        fs::write(other.join("name"), "another's").unwrap();
        let place = Place::of(&folder.join("name")).unwrap();
        fs::rename(&folder, &moved).unwrap();
        symlink(&other, &folder).unwrap();
        assert!(place.made().is_err());
    }

    #[test]
    fn a_name_of_another_file_stays() {
        let folder = tempfile::tempdir().unwrap();
        let [path, moved] = ["name", "moved"].map(|name| folder.path().join(name));
        assert!(made_at(&path).is_err());
        assert!(Place::of(Path::new("/")).is_err());
        symlink("/nowhere", &path).unwrap();
        let (made, _) = made_at(&path).unwrap();
        fs::rename(&path, &moved).unwrap();
        made.remove();
        assert!(moved.is_symlink());
        symlink("/nowhere", &path).unwrap();
        made.remove();
        assert!(path.is_symlink());
        made_at(&moved).unwrap().0.remove();
        assert!(!moved.is_symlink());
    }
}
