//! Maps granted parts of the window, and a page that is zeroed in forked children.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::ptr;

use wormhole_ring::band;
use wormhole_ring::layout::SEGMENT_BYTES;

use super::page_range::{NoNode, PageRange};

/// Address band of the window, reserved, into which granted segments are mapped.
#[derive(Debug)]
pub struct Window {
    base: u64,
    file: File,
    segments: u64,
    /// The last segments, if they have a file of their own that is mapped in pages.
    pages: Option<PageRange>,
    /// Whether the backend grants segments where this process wants them.
    is_placed: bool,
    /// True if the file also holds the segments of other sessions.
    shared: bool,
}

impl Window {
    /// Describes the window whose band `base..base + bytes` has been reserved. The file belongs to this session alone,
    /// or is `shared` by the processes of a VM.
    pub fn new(base: u64, bytes: u64, file: File, shared: bool) -> Self {
        Self {
            base,
            file,
            segments: bytes / SEGMENT_BYTES as u64,
            pages: None,
            is_placed: false,
            shared,
        }
    }

    /// Gives the last segments a file of their own. The backend grants segments in a part of the window if `is_placed`.
    pub fn with_pages(self, pages: Option<PageRange>, is_placed: bool) -> Self {
        Self {
            pages,
            is_placed,
            ..self
        }
    }

    /// Returns the segments that have a file of their own, if they can be requested. This process may lack the file
    /// ([`Window::has_pages`]).
    pub fn page_segments(&self) -> Option<Range<u32>> {
        let end = u32::try_from(self.segments).unwrap_or(u32::MAX);
        let pages = self.pages.as_ref().filter(|_| self.is_placed);
        pages.map(|pages| pages.first..end)
    }

    /// Returns true if arena can be requested that can be mapped in pages.
    pub fn has_pages(&self) -> bool {
        let has_file = self.pages.as_ref().is_some_and(|pages| pages.file.is_ok());
        !self.shared || has_file && self.is_placed
    }

    /// Returns true if this process cannot map the last segments.
    pub fn lacks_pages(&self) -> bool {
        self.pages.as_ref().is_some_and(|pages| pages.file.is_err())
    }

    /// Returns the file and the offset in it of each part of a range of the window, with the part's offset and bytes.
    fn parts(
        &self,
        offset: u64,
        bytes: u64,
    ) -> impl Iterator<Item = (u64, u64, Result<&File, &NoNode>, u64)> {
        let end = offset.saturating_add(bytes);
        let segment = |pages: &PageRange| u64::from(pages.first) * SEGMENT_BYTES as u64;
        let border = self.pages.as_ref().map_or(u64::MAX, segment);
        let before =
            (offset < border).then(|| (offset, end.min(border) - offset, Ok(&self.file), offset));
        let behind = self.pages.as_ref().filter(|_| end > border).map(|pages| {
            let start = offset.max(border);
            (start, end - start, pages.file.as_ref(), start - border)
        });
        before.into_iter().chain(behind)
    }

    pub fn is_shared(&self) -> bool {
        self.shared
    }

    pub fn segments(&self) -> u64 {
        self.segments
    }

    /// Returns the address of a segment.
    pub fn address(&self, segment: u32) -> u64 {
        self.base + u64::from(segment) * SEGMENT_BYTES as u64
    }

    /// Maps a granted run of segments. Forked children do not inherit them if `private` is set or the file is shared: a
    /// segment that this process returns goes to another session while the child would still map it.
    pub fn map(&self, first: u32, count: u32, private: bool) -> io::Result<*mut u8> {
        if u64::from(first) + u64::from(count) > self.segments {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!(
                    "segments {first}+{count} lie outside a window of {}",
                    self.segments
                ),
            ));
        }
        let bytes = count as usize * SEGMENT_BYTES;
        let offset = u64::from(first) * SEGMENT_BYTES as u64;
        let address = self.map_at(self.address(first), offset, bytes as u64)?;
        if private || self.shared {
            keep_from_children(address, bytes)?;
        }
        Ok(address)
    }

    /// Maps a mapped range of the window a second time, at an address in the band of managed memory that this library
    /// has reserved.
    pub fn map_again(&self, address: u64, home: u64, bytes: u64) -> io::Result<()> {
        let mapped = self.map_at(address, home - self.base, bytes)?;
        if self.shared {
            keep_from_children(mapped, usize::try_from(bytes).map_err(io::Error::other)?)?;
        }
        Ok(())
    }

    /// Maps a range of the window in place of a reservation of this library's, or of pages whose accesses it serves.
    fn map_at(&self, address: u64, offset: u64, bytes: u64) -> io::Result<*mut u8> {
        let mut first = ptr::null_mut();
        for (start, part, file, at) in self.parts(offset, bytes) {
            let file = file.map_err(|error| io::Error::other(error.clone()))?;
            // SAFETY: the callers map only where this library has reserved addresses or serves accesses.
            let mapped = unsafe { band::map(address + (start - offset), part, file, at) }?;
            if start == offset {
                first = mapped;
            }
        }
        Ok(first)
    }

    /// Returns the file and the offset of an address.
    pub fn file_at(&self, address: u64) -> io::Result<(&File, u64)> {
        let outside = || io::Error::other("the address is not the window's");
        let offset = address.checked_sub(self.base).ok_or_else(outside)?;
        let (_, _, file, at) = self.parts(offset, 1).next().ok_or_else(outside)?;
        let file = file.map_err(|error| io::Error::other(error.clone()))?;
        Ok((file, at))
    }

    /// Returns the file and the offset of a mapped address, if the file can be mapped in pages. The file of a VM's
    /// window cannot, but that of its last segments.
    pub fn file_range(&self, address: u64) -> Option<(&File, u64)> {
        let (file, at) = self.file_at(address).ok()?;
        let can = !self.shared || !ptr::eq(file, &raw const self.file);
        can.then_some((file, at))
    }

    /// Returns the first segment and the number of segments of a run that is mapped at an address.
    pub fn run(&self, address: u64, bytes: u64) -> Option<(u32, u32)> {
        let segment = |bytes: u64| u32::try_from(bytes / SEGMENT_BYTES as u64).ok();
        Some((segment(address.checked_sub(self.base)?)?, segment(bytes)?))
    }

    /// Replaces a mapped range by the reservation again.
    ///
    /// # Safety
    /// The range was mapped by [`Window::map`], and memory in it is no longer used.
    pub unsafe fn unmap(&self, address: u64, bytes: u64) -> io::Result<()> {
        // SAFETY: as the caller promises, the mapping that is replaced is no longer used.
        unsafe { band::unmap(address, bytes) }
    }
}

/// Leaves a mapping out of forked children.
fn keep_from_children(address: *mut u8, bytes: usize) -> io::Result<()> {
    // SAFETY: changes no contents.
    if unsafe { libc::madvise(address.cast(), bytes, libc::MADV_DONTFORK) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Maps a zeroed page that is zeroed again in every forked child.
pub fn wiped_page() -> io::Result<*mut u8> {
    const PAGE: usize = 4096;
    // SAFETY: an anonymous mapping wherever the kernel likes.
    let page = unsafe {
        libc::mmap(
            ptr::null_mut(),
            PAGE,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if page == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the page was mapped above.
    if unsafe { libc::madvise(page, PAGE, libc::MADV_WIPEONFORK) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(page.cast())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    const SEGMENT: u64 = SEGMENT_BYTES as u64;

    fn file(segments: u64) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(segments * SEGMENT).unwrap();
        file
    }

    #[test]
    fn a_run_on_both_sides_of_the_border_is_mapped_from_both_files() {
        const BASE: u64 = 0x4b10_0000_0000;
        let (first, last) = (file(2), file(2));
        let pages = PageRange {
            first: 2,
            file: Ok(last.try_clone().unwrap()),
        };
        let window = Window::new(BASE, 4 * SEGMENT, first.try_clone().unwrap(), true);
        assert!(!window.has_pages());
        let window = window.with_pages(Some(pages), true);
        assert!(window.has_pages());
        assert_eq!(window.page_segments(), Some(2..4));
        band::reserve(BASE, 4 * SEGMENT).unwrap();
        let address = window.map(1, 3, false).unwrap();
        assert_eq!(address.addr() as u64, BASE + SEGMENT);

        let memory = File::options().write(true).open("/proc/self/mem").unwrap();
        let border = BASE + 2 * SEGMENT;
        memory.write_all_at(b"abcd", border - 2).unwrap();
        let mut two = [0; 2];
        first.read_exact_at(&mut two, 2 * SEGMENT - 2).unwrap();
        assert_eq!(&two, b"ab");
        last.read_exact_at(&mut two, 0).unwrap();
        assert_eq!(&two, b"cd");
        assert!(window.file_range(border - 1).is_none());
        let (_, offset) = window.file_range(border + 4096).unwrap();
        assert_eq!(offset, 4096);
    }

    #[test]
    fn a_process_without_the_second_node_has_the_segments_before_it() {
        const BASE: u64 = 0x4b30_0000_0000;
        let pages = PageRange {
            first: 2,
            file: Err(NoNode {
                path: "/dev/dax0.1".to_owned(),
                window: "/dev/dax0.0".to_owned(),
                cause: "no such file".to_owned(),
            }),
        };
        let window = Window::new(BASE, 4 * SEGMENT, file(2), true).with_pages(Some(pages), true);
        assert!(window.lacks_pages() && !window.has_pages());
        assert_eq!(window.page_segments(), Some(2..4));
        band::reserve(BASE, 4 * SEGMENT).unwrap();
        window.map(0, 2, true).unwrap();
        assert!(window.file_range(BASE + 2 * SEGMENT).is_none());
        let error = window.map(2, 1, true).unwrap_err().to_string();
        for node in ["/dev/dax0.0", "/dev/dax0.1"] {
            assert!(error.contains(node), "{error}");
        }
    }

    #[test]
    fn a_backend_that_places_no_run_gives_no_pages() {
        let pages = PageRange {
            first: 2,
            file: Ok(file(2)),
        };
        let window = Window::new(0x4b20_0000_0000, 4 * SEGMENT, file(2), true);
        let window = window.with_pages(Some(pages), false);
        assert!(!window.has_pages() && window.page_segments().is_none());
        let own = Window::new(0x4b20_0000_0000, 4 * SEGMENT, file(4), false);
        assert!(own.has_pages() && own.page_segments().is_none());
    }
}
