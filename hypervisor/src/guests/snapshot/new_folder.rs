//! A folder that a command makes, with files in it.
//!
//! Root may make it in a folder of another user, who can put a link or another folder in its place at any time. So its path is
//! followed once, and all else is done in the folder itself.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, fstat, fsync, mkdirat, open, openat, statat, unlinkat,
};

use crate::places::is_believed;

/// The folder, and the files that the command has made in it.
#[derive(Debug)]
pub struct NewFolder {
    /// The folder above, and the name in it.
    above: OwnedFd,
    name: OsString,
    folder: OwnedFd,
    files: Vec<&'static str>,
}

impl NewFolder {
    /// Makes the folder, which this user alone can enter.
    ///
    /// # Errors
    /// The path is taken, or no folder can be made there.
    pub fn make(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        // A path without a name ends in a folder that is there.
        let name = path.file_name().ok_or(io::ErrorKind::AlreadyExists)?;
        let above = match path.parent() {
            Some(above) if !above.as_os_str().is_empty() => above,
            _ => Path::new("."),
        };
        let above = open(above, flags, Mode::empty())?;
        mkdirat(&above, name, Mode::RWXU)?;
        let folder = openat(&above, name, flags | OFlags::NOFOLLOW, Mode::empty())?;
        if !is_believed(&folder, FileType::Directory) {
            return Err(io::Error::other(
                "another folder took its place: name a path in a folder that only this user can write",
            ));
        }
        Ok(Self {
            above,
            name: name.to_owned(),
            folder,
            files: Vec::new(),
        })
    }

    /// Makes a file for writing, which this user alone can open.
    ///
    /// # Errors
    /// The file is there already, or cannot be made.
    pub fn create(&mut self, name: &'static str) -> io::Result<File> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = openat(&self.folder, name, flags, Mode::RUSR | Mode::WUSR)?;
        self.files.push(name);
        Ok(file.into())
    }

    /// Brings the names of the files, and the folder's own, to stable storage.
    ///
    /// # Errors
    /// As for fsync(2).
    pub fn sync(&self) -> io::Result<()> {
        fsync(&self.folder)?;
        Ok(fsync(&self.above)?)
    }

    /// Removes the files that were made, and the folder if it is still at its place and empty.
    pub fn remove(self) {
        for file in &self.files {
            let _ = unlinkat(&self.folder, *file, AtFlags::empty());
        }
        let there = statat(&self.above, &self.name, AtFlags::SYMLINK_NOFOLLOW);
        let is_there = fstat(&self.folder)
            .and_then(|own| Ok((there?, own)))
            .is_ok_and(|(there, own)| (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino));
        if is_there {
            let _ = unlinkat(&self.above, &self.name, AtFlags::REMOVEDIR);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_folder_is_removed_with_its_files_alone() {
        let all = tempfile::tempdir().expect("a folder");
        let path = all.path().join("saved");
        let mut folder = NewFolder::make(&path).expect("a folder");
        folder.create("one").expect("a file");
        folder.sync().expect("stable");
        let again = NewFolder::make(&path).expect_err("it is there");
        assert_eq!(again.kind(), io::ErrorKind::AlreadyExists);
        assert!(NewFolder::make(&path.join("..")).is_err());
        folder.remove();
        assert!(!path.exists());
        let mut folder = NewFolder::make(&path).expect("a folder");
        fs::write(path.join("one"), "another's").expect("room");
        assert!(folder.create("one").is_err());
        folder.create("two").expect("a file");
        folder.remove();
        assert!(path.join("one").exists() && !path.join("two").exists());
    }

    #[test]
    fn files_behind_a_link_that_took_the_folders_place_stay() {
        let all = tempfile::tempdir().expect("a folder");
        let [path, moved, other] = ["saved", "moved", "other"].map(|name| all.path().join(name));
        fs::create_dir(&other).expect("room");
        for name in ["one", "two"] {
            fs::write(other.join(name), "kept").expect("room");
        }
        let mut folder = NewFolder::make(&path).expect("a folder");
        folder.create("one").expect("a file");
        fs::rename(&path, &moved).expect("it is ours");
        symlink(&other, &path).expect("room");
        folder.create("two").expect("a file");
        folder.remove();
        assert!(other.join("one").exists() && other.join("two").exists());
        assert!(path.is_symlink());
        assert_eq!(fs::read_dir(&moved).expect("a folder").count(), 0);
        let link = NewFolder::make(&path).expect_err("it is there");
        assert_eq!(link.kind(), io::ErrorKind::AlreadyExists);
    }
}
