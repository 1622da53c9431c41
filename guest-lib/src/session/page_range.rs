//! Finds the part of a VM's window that is mapped in single pages: a DAX device of its own behind the window's device,
//! which the guest's first process or the guest package makes.

use std::fs::{self, File, FileType, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use wormhole_ring::layout::SEGMENT_BYTES;

use crate::pages::PAGE;

/// Cause why the arena of a VM cannot be mapped in single pages.
#[derive(Debug, thiserror::Error)]
pub enum PageRangeError {
    #[error("the window is no DAX device")]
    NoDevice,
    #[error(
        "the guest's window is not divided; `wormhole-guest bind` as root divides it and says why not"
    )]
    Undivided,
    #[error("{name} has {found} bytes instead of {wanted}")]
    Size {
        name: String,
        found: u64,
        wanted: u64,
    },
    #[error("{path} cannot be read: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path} cannot be opened: {source}")]
    Open { path: PathBuf, source: io::Error },
}

impl PageRangeError {
    /// Returns true if the window is divided and this process cannot have its end.
    pub fn is_fatal(&self) -> bool {
        matches!(self, Self::Size { .. } | Self::Open { .. })
    }
}

/// The last segments of a window.
#[derive(Debug)]
pub struct PageRange {
    pub first: u32,
    /// Device whose start is the first segment.
    pub file: File,
}

impl PageRange {
    /// Finds the part of a window of this size.
    pub fn find(window: &File, bytes: u64) -> Result<Self, PageRangeError> {
        let data = window.metadata().map_err(|_| PageRangeError::NoDevice)?;
        if !FileType::is_char_device(&data.file_type()) {
            return Err(PageRangeError::NoDevice);
        }
        let (major, minor) = (libc::major(data.rdev()), libc::minor(data.rdev()));
        let link = PathBuf::from(format!("/sys/dev/char/{major}:{minor}"));
        let device = fs::canonicalize(&link)
            .map_err(|source| PageRangeError::Read { path: link, source })?;
        let (before, name, pages) = beside(&device)?;
        if before.saturating_add(pages) != bytes || before % SEGMENT_BYTES as u64 != 0 {
            return Err(PageRangeError::Size {
                name,
                found: pages,
                wanted: bytes.saturating_sub(before),
            });
        }
        let path = Path::new("/dev").join(name);
        let opened = OpenOptions::new().read(true).write(true).open(&path);
        Ok(Self {
            first: u32::try_from(before / SEGMENT_BYTES as u64).unwrap_or(u32::MAX),
            file: opened.map_err(|source| PageRangeError::Open { path, source })?,
        })
    }
}

/// Returns the size of a device (a folder of sysfs), and name and size of the device of pages in its region.
fn beside(device: &Path) -> Result<(u64, String, u64), PageRangeError> {
    let region = device.parent().unwrap_or(device);
    let entries = fs::read_dir(region).map_err(|source| PageRangeError::Read {
        path: region.to_owned(),
        source,
    })?;
    for entry in entries.flatten().filter(|entry| entry.path() != device) {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("dax")
            && number(&entry.path().join("align")).is_ok_and(|align| align == PAGE)
        {
            let size = number(&entry.path().join("size"))?;
            return Ok((number(&device.join("size"))?, name, size));
        }
    }
    Err(PageRangeError::Undivided)
}

fn number(path: &Path) -> Result<u64, PageRangeError> {
    let failed = |source| PageRangeError::Read {
        path: path.to_owned(),
        source,
    };
    let text = fs::read_to_string(path).map_err(failed)?;
    let parsed = text.trim().parse();
    parsed.map_err(|error| failed(io::Error::other(error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(region: &Path, name: &str, size: &str, align: &str) -> PathBuf {
        let folder = region.join(name);
        fs::create_dir_all(&folder).unwrap();
        for (file, text) in [("size", size), ("align", align)] {
            fs::write(folder.join(file), format!("{text}\n")).unwrap();
        }
        folder
    }

    #[test]
    fn the_device_of_pages_is_the_one_with_the_alignment_of_a_page() {
        let region = tempfile::tempdir().unwrap();
        let region = region.path();
        let window = device(region, "dax0.0", "14680064", "2097152");
        device(region, "dax_region", "16777216", "4096x");
        device(region, "dax0.2", "0", "2097152");
        let error = beside(&window).unwrap_err();
        assert!(matches!(error, PageRangeError::Undivided), "{error}");
        device(region, "dax0.1", "2097152", "4096");
        let found = beside(&window).unwrap();
        assert_eq!(found, (14 << 20, "dax0.1".to_owned(), 2 << 20));
    }

    #[test]
    fn a_file_has_no_such_part() {
        let file = tempfile::tempfile().unwrap();
        let error = PageRange::find(&file, 1 << 24).unwrap_err();
        assert!(matches!(error, PageRangeError::NoDevice), "{error}");
    }
}
