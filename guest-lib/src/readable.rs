//! Finds how many bytes behind a pointer can be read.
//!
//! Images come without a length, so their own headers state it. A damaged header must not lead to a read of unmapped
//! memory, so `process_vm_readv` probes the range first. Pages of a mapped file behind the file's end count as
//! unmapped.

use std::cell::Cell;
use std::io;
use std::iter::successors;

use rustix::param::page_size;

/// Ranges of one `process_vm_readv` (`UIO_MAXIOV`).
const MOST_RANGES: usize = 1024;

/// Range that was found to be readable last. Asking the system takes longer than reading a short image.
#[derive(Debug, Default)]
pub struct Known {
    start: Cell<usize>,
    end: Cell<usize>,
}

impl Known {
    /// Returns what [`readable`] does, and remembers it, up to the end of the page.
    pub fn readable(&self, start: *const u8, wanted: usize) -> usize {
        let first = start.addr();
        let known = match (self.start.get()..self.end.get()).contains(&first) {
            true => self.end.get() - first,
            false => 0,
        };
        if known >= wanted {
            return wanted;
        }
        if known == 0 {
            self.start.set(first);
        }
        let (from, rest) = (start.wrapping_add(known), wanted - known);
        let end = from.addr().checked_add(rest);
        let end = end.and_then(|end| end.checked_next_multiple_of(page_size()));
        let found = readable(from, end.map_or(rest, |end| end - from.addr()));
        self.end.set(from.addr() + found);
        wanted.min(known + found)
    }
}

/// Returns the number of bytes from `start` to the end of its page.
pub fn rest_of_page(start: *const u8) -> usize {
    page_size() - start.addr() % page_size()
}

/// Returns the number of bytes from `start` on that can be read, at most `wanted`. If `process_vm_readv` is refused, as
/// by a system-call filter, all of them count as readable.
pub fn readable(start: *const u8, wanted: usize) -> usize {
    let page = page_size();
    let first = start.addr();
    let Some(end) = first.checked_add(wanted) else {
        return readable(start, usize::MAX - first);
    };
    // One byte of each page: the first of the range, then each page's own first.
    let next = |at: &usize| (at / page + 1).checked_mul(page).filter(|at| *at < end);
    let mut probes = successors(Some(first).filter(|at| *at < end), next).peekable();
    while let Some(begin) = probes.peek().copied() {
        let ranges: Vec<libc::iovec> = probes
            .by_ref()
            .take(MOST_RANGES)
            .map(|at| libc::iovec {
                iov_base: start.with_addr(at).cast_mut().cast(),
                iov_len: 1,
            })
            .collect();
        let found = match count_readable(&ranges) {
            Ok(found) => found,
            Err(error) if matches!(error.raw_os_error(), Some(libc::EFAULT)) => 0,
            Err(_) => return wanted,
        };
        if found < ranges.len() {
            let unreadable = ranges
                .get(found)
                .map_or(begin, |range| range.iov_base.addr());
            return unreadable - first;
        }
    }
    wanted
}

/// Returns the number of these one-byte ranges before the first that cannot be read.
fn count_readable(ranges: &[libc::iovec]) -> io::Result<usize> {
    let mut bytes = [0_u8; MOST_RANGES];
    let local = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    };
    // SAFETY: the system checks the ranges that it reads, and writes to `bytes`, which has a byte for each.
    let read = unsafe {
        libc::process_vm_readv(
            libc::getpid(),
            &raw const local,
            1,
            ranges.as_ptr(),
            ranges.len() as libc::c_ulong,
            0,
        )
    };
    usize::try_from(read).map_err(|_| io::Error::last_os_error())
}

/// Readable pages, followed by one that is not.
#[cfg(test)]
pub mod tests {
    use super::*;

    /// Memory that ends at an unreadable page.
    pub struct Edge {
        start: *mut u8,
        bytes: usize,
    }

    impl Edge {
        pub fn new(pages: usize) -> Self {
            let bytes = pages * page_size();
            // SAFETY: a new mapping where the system likes, whose last page is then closed.
            let start = unsafe {
                let start = libc::mmap(
                    std::ptr::null_mut(),
                    bytes + page_size(),
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                    -1,
                    0,
                );
                assert_ne!(start, libc::MAP_FAILED);
                let closed = libc::mprotect(start.byte_add(bytes), page_size(), libc::PROT_NONE);
                assert_eq!(closed, 0);
                start.cast()
            };
            Self { start, bytes }
        }

        /// Address this many bytes before the end.
        pub fn before_end(&self, bytes: usize) -> *mut u8 {
            assert!(bytes <= self.bytes);
            // SAFETY: the place lies inside the mapping.
            unsafe { self.start.add(self.bytes - bytes) }
        }

        /// Puts bytes at the very end.
        pub fn put(&self, bytes: &[u8]) -> *const u8 {
            let place = self.before_end(bytes.len());
            // SAFETY: there is that much room up to the end.
            unsafe { place.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
            place
        }
    }

    impl Drop for Edge {
        fn drop(&mut self) {
            // SAFETY: the mapping is this one's own.
            unsafe { libc::munmap(self.start.cast(), self.bytes + page_size()) };
        }
    }

    #[test]
    fn what_is_readable_ends_where_the_memory_ends() {
        let edge = Edge::new(3000);
        for bytes in [0, 1, 5, 4095, 4096, 4097, 1024 * 4096, 2999 * 4096 + 1] {
            let start = edge.before_end(bytes);
            for wanted in [bytes + 1, bytes + 10_000_000, usize::MAX] {
                assert_eq!(readable(start, wanted), bytes, "{wanted}");
            }
            assert_eq!(readable(start, bytes / 2), bytes / 2);
        }
    }

    proptest::proptest! {
        #[test]
        fn what_is_known_to_be_readable_is(
            asked in proptest::collection::vec((0..3_usize, 0..20_000_usize, 0..20_000_usize), 1..12)
        ) {
            let edges = [Edge::new(1), Edge::new(2), Edge::new(4)];
            let known = Known::default();
            for (edge, before, wanted) in asked {
                let start = edges[edge].before_end(before.min(edges[edge].bytes));
                proptest::prop_assert_eq!(known.readable(start, wanted), readable(start, wanted));
            }
        }
    }

    #[test]
    fn nothing_is_readable_where_nothing_is_mapped() {
        for address in [0, 1, 1 << 46, 1 << 63, usize::MAX - 1, usize::MAX] {
            let nowhere = std::ptr::without_provenance(address);
            assert_eq!(readable(nowhere, 64), 0, "{address:#x}");
            assert_eq!(Known::default().readable(nowhere, 64), 0, "{address:#x}");
        }
    }
}
