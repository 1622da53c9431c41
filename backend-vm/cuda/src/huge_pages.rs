//! Huge pages for memory that the device reaches.
//!
//! The window is a memfd, which has huge pages only where the system's administrator has chosen that
//! (`/sys/kernel/mm/transparent_hugepage/shmem_enabled`, as a rule `never`). `MADV_COLLAPSE` gives a range huge pages
//! whatever the administrator has chosen, unless that is `deny`. The kernel clears one huge page faster than it clears and
//! inserts 512 pages.

use std::ffi::{c_int, c_void};
use std::ptr;

/// Bytes of a huge page, and of an ordinary one.
const HUGE: usize = 2 << 20;
const ORDINARY: usize = 4096;
/// `MADV_COLLAPSE` (Linux 6.1, `asm-generic/mman-common.h`).
const MADV_COLLAPSE: c_int = 25;

/// Returns the calls of `madvise` after which a mapped range of shared memory has huge pages, if it consists of several whole
/// ones and the kernel has them. A range of one, such as a session's ring or its staging buffers, stays as it is. None of the calls changes the memory's content. A range without huge pages stays as it was, so
/// that a failed call harms nothing.
pub fn advice(address: usize, bytes: usize) -> impl Iterator<Item = (*mut c_void, usize, c_int)> {
    let whole = address.is_multiple_of(HUGE) && bytes.is_multiple_of(HUGE);
    let end = if whole && bytes > HUGE {
        address + bytes
    } else {
        address
    };
    // The kernel collapses no range without any page.
    let fill = (address..end)
        .step_by(HUGE)
        .map(|start| (start, ORDINARY, libc::MADV_POPULATE_WRITE));
    let collapse = (address < end).then_some((address, bytes, MADV_COLLAPSE));
    fill.chain(collapse)
        .map(|(start, bytes, advice)| (ptr::with_exposed_provenance_mut(start), bytes, advice))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls(address: usize, bytes: usize) -> Vec<(usize, usize, c_int)> {
        advice(address, bytes)
            .map(|(start, bytes, advice)| (start.addr(), bytes, advice))
            .collect()
    }

    #[test]
    fn a_page_of_each_huge_page_is_filled_before_all_are_collapsed() {
        let filled = |start| (start, ORDINARY, libc::MADV_POPULATE_WRITE);
        assert_eq!(
            calls(3 * HUGE, 2 * HUGE),
            [
                filled(3 * HUGE),
                filled(4 * HUGE),
                (3 * HUGE, 2 * HUGE, MADV_COLLAPSE)
            ]
        );
    }

    #[test]
    fn one_huge_page_and_parts_of_some_stay_as_they_are() {
        let parts = [
            (HUGE, 2 * HUGE + ORDINARY),
            (HUGE + ORDINARY, 2 * HUGE),
            (HUGE, HUGE),
            (HUGE, 0),
        ];
        for (address, bytes) in parts {
            assert_eq!(calls(address, bytes), []);
        }
    }
}
