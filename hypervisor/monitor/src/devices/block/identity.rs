//! Tells whether a disk is still the one that a snapshot knows.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};

use serde::{Deserialize, Serialize};

use super::image::SECTOR;

/// The file of a disk, beside the disk's thread.
#[derive(Debug)]
pub(crate) struct DiskFile {
    pub(super) file: File,
    pub(super) sectors: u64,
}

/// Facts that tell a disk from another one, and from itself after a write.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskIdentity {
    bytes: u64,
    /// The file's number, or the device's. The file system's number is left out, since it can change at a reboot: a
    /// file elsewhere with the same number, size and time of change is taken for a clone.
    number: u64,
    /// Time of the last change, in seconds and nanoseconds since 1970. A block device has none.
    changed: Option<(i64, i64)>,
}

impl DiskFile {
    /// Brings the disk to stable storage, and returns its identity. The guest does not write meanwhile.
    ///
    /// # Errors
    /// The disk cannot be written or examined.
    pub fn settle(&self) -> io::Result<DiskIdentity> {
        self.file.sync_data()?;
        self.identity()
    }

    /// Returns the disk's identity.
    ///
    /// # Errors
    /// The disk cannot be examined.
    pub fn identity(&self) -> io::Result<DiskIdentity> {
        let data = self.file.metadata()?;
        let is_device = data.file_type().is_block_device();
        Ok(DiskIdentity {
            bytes: self.sectors * SECTOR,
            number: if is_device { data.rdev() } else { data.ino() },
            changed: (!is_device).then(|| (data.mtime(), data.mtime_nsec())),
        })
    }
}

impl DiskIdentity {
    /// Returns how another disk differs, or the same one later.
    pub fn difference(&self, other: &Self) -> Option<Difference> {
        if self.bytes != other.bytes {
            Some(Difference::Size(self.bytes, other.bytes))
        } else if self.number != other.number {
            Some(Difference::File)
        } else if self.changed != other.changed {
            Some(Difference::Changed)
        } else {
            None
        }
    }
}

/// A difference between two disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Difference {
    /// Their sizes in bytes.
    Size(u64, u64),
    /// Two files.
    File,
    /// One file was written in between.
    Changed,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Size(saved, here) => write!(f, "it had {saved} bytes, and has {here}"),
            Self::File => f.write_str("it is another file, perhaps a copy"),
            Self::Changed => f.write_str("it was written after the snapshot"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::path::Path;
    use std::time::{Duration, SystemTime};

    use super::super::image::{DiskAccess, DiskImage};
    use super::*;

    fn identity(path: &Path) -> DiskIdentity {
        let image = DiskImage::open(path, DiskAccess::ReadWrite).expect("an image");
        let handle = image.handle().expect("a descriptor");
        handle.settle().expect("it is written")
    }

    #[test]
    fn a_disk_is_another_one_when_it_is_copied_written_or_extended() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, copy) = (folder.path().join("disk"), folder.path().join("copy"));
        std::fs::write(&path, [0; 1024]).expect("room");
        let saved = identity(&path);
        assert_eq!(saved.difference(&identity(&path)), None);
        std::fs::copy(&path, &copy).expect("room");
        assert_eq!(saved.difference(&identity(&copy)), Some(Difference::File));
        let mut file = File::options().append(true).open(&path).expect("a file");
        let later = SystemTime::now() + Duration::from_secs(1);
        file.set_modified(later).expect("it is ours");
        assert_eq!(
            saved.difference(&identity(&path)),
            Some(Difference::Changed)
        );
        file.write_all(&[0; 512]).expect("room");
        let extended = saved.difference(&identity(&path));
        assert_eq!(extended, Some(Difference::Size(1024, 1536)));
    }
}
