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
    #[error(
        "the window's device {name} has {found} bytes instead of {wanted}, and no other device has the rest; \
         `wormhole-guest bind` as root mends it, or says why not"
    )]
    Part {
        name: String,
        found: u64,
        wanted: u64,
    },
    #[error("{name} has {found} bytes instead of {wanted}")]
    Size {
        name: String,
        found: u64,
        wanted: u64,
    },
    #[error("{path} cannot be read: {source}")]
    Read { path: PathBuf, source: io::Error },
}

impl PageRangeError {
    /// Returns true if this process cannot have all of the window by this device.
    pub fn is_fatal(&self) -> bool {
        matches!(self, Self::Part { .. } | Self::Size { .. })
    }
}

/// Cause why this process cannot map the last segments of a window.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "{path} cannot be opened ({cause}); a process needs this node beside {window}, and the right to read and write both"
)]
pub struct NoNode {
    pub path: String,
    pub window: String,
    pub cause: String,
}

/// The last segments of a window.
#[derive(Debug)]
pub struct PageRange {
    pub first: u32,
    /// Device whose start is the first segment. A process may have the window's first device alone.
    pub file: Result<File, NoNode>,
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
        let (before, name, pages) = beside(&device, bytes)?;
        if before.saturating_add(pages) != bytes || before % SEGMENT_BYTES as u64 != 0 {
            return Err(PageRangeError::Size {
                name,
                found: pages,
                wanted: bytes.saturating_sub(before),
            });
        }
        let path = format!("/dev/{name}");
        let opened = OpenOptions::new().read(true).write(true).open(&path);
        Ok(Self {
            first: u32::try_from(before / SEGMENT_BYTES as u64).unwrap_or(u32::MAX),
            file: opened.map_err(|error| NoNode {
                path,
                window: format!("/dev/{}", name_of(&device)),
                cause: error.to_string(),
            }),
        })
    }
}

fn name_of(device: &Path) -> String {
    let name = device.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// Returns the size of a device (a folder of sysfs), and name and size of the device of pages in its region. Without that
/// device, the first one must have all `bytes` of the window.
fn beside(device: &Path, bytes: u64) -> Result<(u64, String, u64), PageRangeError> {
    let found = number(&device.join("size"))?;
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
            match number(&entry.path().join("size"))? {
                // A remainder of a division that failed.
                0 => {}
                size => return Ok((found, name, size)),
            }
        }
    }
    if found < bytes {
        return Err(PageRangeError::Part {
            name: name_of(device),
            found,
            wanted: bytes,
        });
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
        device(region, "dax0.3", "0", "4096");
        let error = beside(&window, 14 << 20).unwrap_err();
        assert!(matches!(error, PageRangeError::Undivided), "{error}");
        assert!(!error.is_fatal());
        device(region, "dax0.1", "2097152", "4096");
        let found = beside(&window, 16 << 20).unwrap();
        assert_eq!(found, (14 << 20, "dax0.1".to_owned(), 2 << 20));
    }

    #[test]
    fn a_device_that_is_not_all_of_the_window_is_refused() {
        let region = tempfile::tempdir().unwrap();
        let window = device(region.path(), "dax0.0", "14680064", "2097152");
        let error = beside(&window, 16 << 20).unwrap_err();
        assert!(error.is_fatal());
        let text = error.to_string();
        assert!(
            text.contains("dax0.0 has 14680064 bytes instead of 16777216"),
            "{text}"
        );
        assert!(text.contains("wormhole-guest bind"), "{text}");
    }

    #[test]
    fn a_file_has_no_such_part() {
        let file = tempfile::tempfile().unwrap();
        let error = PageRange::find(&file, 1 << 24).unwrap_err();
        assert!(matches!(error, PageRangeError::NoDevice), "{error}");
    }
}
