//! A tenant's window in the supervisor: the owner of each segment.
//!
//! The file that a launcher attaches contains the bootstrap. The memory of each session is in a
//! file of its own, see [`session_file`](super::session_file), or in the file of a static window,
//! see [`static_window`](super::static_window).

use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::SealFlags;
use wormhole_ring::control::Attach;
use wormhole_ring::layout::{SEGMENT_BYTES, WINDOW_MAX_BYTES};
use wormhole_ring::session::{GrantError, SegmentTable};

use wormhole_link::memory;

use super::window_memory;

const SEGMENT: u64 = SEGMENT_BYTES as u64;
/// Segments for the bootstrap, for one session, and for arena of that session.
pub const MINIMUM_BYTES: u64 = 4 * SEGMENT;

/// Reason why a window is refused.
#[derive(Debug, thiserror::Error)]
pub enum WindowError {
    #[error("the window is no anonymous file that can be sealed")]
    NotSealable(#[source] io::Error),
    #[error(
        "the window is a file of huge pages (MFD_HUGETLB), which cannot be freed in parts: make it of ordinary pages"
    )]
    HugePages,
    #[error(
        "the window can still be resized: it must be sealed with F_SEAL_GROW and F_SEAL_SHRINK"
    )]
    Resizable,
    #[error(
        "the window can no longer be written: it is sealed with F_SEAL_WRITE or F_SEAL_FUTURE_WRITE"
    )]
    ReadOnly,
    #[error("the window is a device, which is one window as a whole: attach it as a static window")]
    Device,
    #[error("the window has {actual} bytes, {announced} were announced")]
    Size { actual: u64, announced: u64 },
    #[error("a window of {0} bytes is not a multiple of {SEGMENT}")]
    Uneven(u64),
    #[error("a window of {0} bytes is too small: it takes at least {MINIMUM_BYTES}")]
    TooSmall(u64),
    #[error("a window of {0} bytes is too large: it takes at most {WINDOW_MAX_BYTES}")]
    TooLarge(u64),
    #[error("memory for files comes once, with its descriptor, for a window that is not static")]
    NoFiles,
    #[error(
        "it has {} MiB, and the tenant may use {}: wormhole backend start --window-limit lets it use more", .actual >> 20,
        .most >> 20
    )]
    FilesTooLarge { actual: u64, most: u64 },
    #[error("the window cannot be used")]
    Io(#[from] io::Error),
}

/// Size of a window, how much of it the tenant may use, and the owners of its segments.
#[derive(Debug)]
pub struct Window {
    bytes: u64,
    usable: u64,
    /// Bytes of a file that the operator lets the tenant use at a time.
    most: u64,
    pub segments: SegmentTable,
    /// The file of a static window.
    file: Option<OwnedFd>,
    /// Memory of the guest's file system.
    file_memory: Option<OwnedFd>,
}

impl Window {
    /// Checks the file that a launcher attached: a DAX device of this machine, or an anonymous file,
    /// as its seals show. Other files are not queried further, because that may block for as long as
    /// the file's owner likes. The operator lets the tenant use at most `most` bytes of a file at a time: it is
    /// sparse, so its own size costs nothing. A device may be larger than the window, which is then its first part.
    ///
    /// # Errors
    /// The file is not as announced, or its size can still change.
    pub fn accept(file: &OwnedFd, attach: &Attach, most: u64) -> Result<Self, WindowError> {
        // The memory of a device is not this system's own, and its size is the operator's choice.
        let (actual, most) = match window_memory::device_size(file)? {
            Some(_) if attach.static_window == 0 => return Err(WindowError::Device),
            Some(bytes) => {
                let part = bytes.min(attach.window_size);
                (part, part)
            }
            None => (sealed_size(file)?, most),
        };
        let announced = attach.window_size;
        if actual != announced {
            return Err(WindowError::Size { actual, announced });
        }
        if !actual.is_multiple_of(SEGMENT) {
            return Err(WindowError::Uneven(actual));
        }
        if actual < MINIMUM_BYTES {
            return Err(WindowError::TooSmall(actual));
        }
        if actual > WINDOW_MAX_BYTES {
            return Err(WindowError::TooLarge(actual));
        }
        let segments = |bytes: u64| u32::try_from(bytes / SEGMENT).unwrap_or(u32::MAX);
        let count = segments(actual);
        let own = match attach.segment_limit {
            0 => count,
            limit => limit.min(count),
        };
        // Segment 0 has the bootstrap. It is never granted, and the limits count it.
        let usable = u64::from(own.min(segments(most))) * SEGMENT;
        let file = match attach.static_window {
            0 => None,
            _ => Some(file.try_clone()?),
        };
        Ok(Self {
            bytes: actual,
            usable,
            most,
            segments: SegmentTable::new(count, segments(usable)),
            file,
            file_memory: None,
        })
    }

    /// Checks and takes the memory of the guest's file system, which a launcher attached. All workers of the tenant get it.
    ///
    /// # Errors
    /// The window is static or has such memory. The file is not as announced, its size can still change, or it is larger than
    /// what the operator lets the tenant use of a window: its workers can use all of it.
    pub fn take_file_memory(&mut self, file: &OwnedFd, announced: u64) -> Result<(), WindowError> {
        if self.file.is_some() || self.file_memory.is_some() {
            return Err(WindowError::NoFiles);
        }
        let actual = sealed_size(file)?;
        if actual != announced {
            return Err(WindowError::Size { actual, announced });
        }
        if actual > self.most {
            let most = self.most;
            return Err(WindowError::FilesTooLarge { actual, most });
        }
        self.file_memory = Some(file.try_clone()?);
        Ok(())
    }

    /// Returns the memory of the guest's file system.
    pub fn file_memory(&self) -> Option<&OwnedFd> {
        self.file_memory.as_ref()
    }

    /// Returns the file of a static window.
    pub fn file(&self) -> Option<&OwnedFd> {
        self.file.as_ref()
    }

    /// Returns its files, which the event loop must not close itself.
    pub fn into_files(self) -> impl Iterator<Item = OwnedFd> {
        self.file.into_iter().chain(self.file_memory)
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the bytes that the tenant may use at a time.
    pub fn usable(&self) -> u64 {
        self.usable
    }

    /// Explains why segments are not granted, and how the tenant's owner or the operator adds more.
    pub fn explain(&self, error: &GrantError) -> String {
        match error {
            GrantError::Empty { .. } => error.to_string(),
            GrantError::NoRunWithin { .. } => format!(
                "{error}: a part of the window of {} MiB is full, and wormhole run --window makes it larger",
                self.bytes >> 20
            ),
            _ if self.usable < self.bytes => format!(
                "{error}: the tenant may use {} MiB of its window, and wormhole backend start --window-limit lets it \
                 use more",
                self.usable >> 20
            ),
            _ => format!(
                "{error}: the window of {} MiB is full, and wormhole run --window makes it larger",
                self.bytes >> 20
            ),
        }
    }
}

/// Returns the size of an anonymous file, which can be written and not resized.
fn sealed_size(file: &OwnedFd) -> Result<u64, WindowError> {
    let seals = memory::seals(file).map_err(WindowError::NotSealable)?;
    if rustix::fs::fstatfs(file).map_err(io::Error::from)?.f_type == libc::HUGETLBFS_MAGIC {
        return Err(WindowError::HugePages);
    }
    if !seals.contains(SealFlags::GROW | SealFlags::SHRINK) {
        return Err(WindowError::Resizable);
    }
    if seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
        return Err(WindowError::ReadOnly);
    }
    let bytes = rustix::fs::fstat(file).map_err(io::Error::from)?.st_size;
    Ok(u64::try_from(bytes).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    use rustix::fs::fcntl_add_seals;
    use wormhole_ring::session::SessionId;

    fn attach(window_size: u64) -> Attach {
        Attach {
            window_size,
            ..Attach::default()
        }
    }

    fn file(bytes: u64, seals: SealFlags) -> OwnedFd {
        let fd = memory::anonymous_file(c"window").unwrap();
        let file = File::from(fd);
        file.set_len(bytes).unwrap();
        fcntl_add_seals(&file, seals).unwrap();
        file.into()
    }

    const SEALED: SealFlags = SealFlags::GROW.union(SealFlags::SHRINK);

    #[test]
    fn a_window_that_can_change_its_size_is_refused() {
        let size = MINIMUM_BYTES;
        for seals in [SealFlags::empty(), SealFlags::GROW, SealFlags::SHRINK] {
            let error = Window::accept(&file(size, seals), &attach(size), size).unwrap_err();
            assert!(matches!(error, WindowError::Resizable), "{error}");
        }
        let plain = OwnedFd::from(tempfile::tempfile().unwrap());
        let error = Window::accept(&plain, &attach(size), size).unwrap_err();
        assert!(
            matches!(error, WindowError::NotSealable(_) | WindowError::Resizable),
            "{error}"
        );
        assert!(Window::accept(&file(size, SEALED), &attach(size), size).is_ok());
    }

    #[test]
    fn memory_for_files_has_a_fixed_size_and_is_taken_once() {
        let size = MINIMUM_BYTES;
        let mut window = Window::accept(&file(size, SEALED), &attach(size), size).unwrap();
        let error = window.take_file_memory(&file(size, SealFlags::GROW), size);
        assert!(matches!(error, Err(WindowError::Resizable)), "{error:?}");
        let error = window.take_file_memory(&file(size, SEALED), 2 * size);
        assert!(matches!(error, Err(WindowError::Size { .. })), "{error:?}");
        assert!(window.file_memory().is_none());
        window.take_file_memory(&file(size, SEALED), size).unwrap();
        let again = window.take_file_memory(&file(size, SEALED), size);
        assert!(matches!(again, Err(WindowError::NoFiles)), "{again:?}");
        assert_eq!(window.into_files().count(), 1);

        let mut window = Window::accept(&file(size, SEALED), &attach(size), size).unwrap();
        let error = window.take_file_memory(&file(2 * size, SEALED), 2 * size);
        let is_too_large = matches!(error, Err(WindowError::FilesTooLarge { .. }));
        assert!(is_too_large, "{error:?}");
        assert!(window.file_memory().is_none());

        let fixed = Attach {
            static_window: 1,
            ..attach(size)
        };
        let mut window = Window::accept(&file(size, SEALED), &fixed, size).unwrap();
        let error = window.take_file_memory(&file(size, SEALED), size);
        assert!(matches!(error, Err(WindowError::NoFiles)), "{error:?}");
    }

    #[test]
    fn a_window_of_huge_pages_is_refused() {
        use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
        let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
        let Ok(file) = memfd_create("window", flags) else {
            return eprintln!("skipped: this kernel has no huge pages (CONFIG_HUGETLBFS)");
        };
        ftruncate(&file, MINIMUM_BYTES).unwrap();
        fcntl_add_seals(&file, SealFlags::GROW | SealFlags::SHRINK).unwrap();
        let error = Window::accept(&file, &attach(MINIMUM_BYTES), MINIMUM_BYTES).unwrap_err();
        assert!(matches!(error, WindowError::HugePages), "{error}");
    }

    #[test]
    fn a_window_of_an_impossible_size_is_refused_with_the_size() {
        let odd = MINIMUM_BYTES + 4096;
        let error = Window::accept(&file(odd, SEALED), &attach(odd), odd).unwrap_err();
        assert!(error.to_string().contains(&odd.to_string()));
        let small = MINIMUM_BYTES - SEGMENT;
        let error = Window::accept(&file(small, SEALED), &attach(small), small).unwrap_err();
        assert!(matches!(error, WindowError::TooSmall(_)));
        let large = WINDOW_MAX_BYTES + SEGMENT;
        let error = Window::accept(&file(large, SEALED), &attach(large), large).unwrap_err();
        assert!(matches!(error, WindowError::TooLarge(_)));
        let error = Window::accept(
            &file(MINIMUM_BYTES, SEALED),
            &attach(MINIMUM_BYTES * 2),
            MINIMUM_BYTES,
        )
        .unwrap_err();
        assert!(matches!(error, WindowError::Size { .. }));
    }

    /// The operator limits the use of a window and not its size, so that no launcher has to know the limit.
    #[test]
    fn a_window_larger_than_its_limit_is_used_up_to_that() {
        let size = 16 * SEGMENT;
        let session = SessionId {
            index: 0,
            generation: 1,
        };
        for (most, own, grants, how) in [
            (6 * SEGMENT, 0, 6, "--window-limit"),
            (6 * SEGMENT, 4, 4, "--window-limit"),
            (1 << 40, 0, 15, "run --window "),
            (1 << 40, u32::MAX, 15, "run --window "),
        ] {
            let attach = Attach {
                segment_limit: own,
                ..attach(size)
            };
            let mut window = Window::accept(&file(size, SEALED), &attach, most).unwrap();
            for _ in 0..grants {
                window.segments.grant(session, 1).unwrap();
            }
            let error = window.segments.grant(session, 1).unwrap_err();
            let text = window.explain(&error);
            assert!(text.contains(how), "{text}");
            let mib = format!("{} MiB", window.usable() >> 20);
            assert!(text.contains(&mib), "{text}");
        }
    }
}
