//! One word in a file of each tenant, written by the tenant's process and read by its workers: whether other tenants use the
//! devices as well.
//!
//! `F_SEAL_FUTURE_WRITE` leaves the process's own mapping as the only way to write the file. The seal also refuses holes. A
//! worker that holds the page up holds up that process alone.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::counters::PAGE_BYTES;
use crate::memory::{self, Mapping};

/// The side of the tenant's process.
#[derive(Debug)]
pub struct NeighboursFile {
    file: File,
    page: Mapping,
}

impl NeighboursFile {
    /// Creates and seals a memfd with the word 0.
    ///
    /// # Errors
    /// The kernel has no memory or no descriptor for it.
    pub fn create() -> io::Result<Self> {
        let file = File::from(memory::anonymous_file(c"wormhole-neighbours")?);
        file.set_len(PAGE_BYTES as u64)?;
        let page = Mapping::new(&file, 0, PAGE_BYTES)?;
        let page = Self { file, page };
        // Allocates the page before any worker has the file.
        page.set(false);
        memory::seal_writes(&page.file)?;
        memory::seal_size(&page.file)?;
        Ok(page)
    }

    /// Duplicates the descriptor for a worker.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.file.try_clone().map(OwnedFd::from)
    }

    /// Sets whether other tenants use the devices as well.
    pub fn set(&self, has_neighbours: bool) {
        self.word()
            .store(u64::from(has_neighbours), Ordering::Relaxed);
    }

    /// Returns the value that was set last.
    pub fn is_set(&self) -> bool {
        self.word().load(Ordering::Relaxed) != 0
    }

    fn word(&self) -> &AtomicU64 {
        // SAFETY: the first word of a page that is mapped as long as this lives, of a file that cannot shrink.
        unsafe { &*self.page.base().cast::<AtomicU64>() }
    }
}

/// A worker's side: the page, mapped for the life of the process.
#[derive(Debug)]
pub struct Neighbours {
    page: NonNull<AtomicU64>,
}

// SAFETY: the page is reached through an atomic only.
unsafe impl Send for Neighbours {}
// SAFETY: as above.
unsafe impl Sync for Neighbours {}

impl Neighbours {
    /// Maps the page of the worker's tenant.
    ///
    /// # Errors
    /// The descriptor is no page that can be mapped.
    pub fn map(file: &impl AsRawFd) -> io::Result<Self> {
        let page = memory::map_to_read(file, PAGE_BYTES)?.cast();
        Ok(Self { page })
    }

    /// Returns true if there are neighbours, as last set.
    pub fn has_some(&self) -> bool {
        // SAFETY: the first word of the page, which is only read.
        unsafe { self.page.as_ref() }.load(Ordering::Relaxed) != 0
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_worker_reads_the_word_and_cannot_change_it() {
        let neighbours = NeighboursFile::create().unwrap();
        let file = File::from(neighbours.descriptor().unwrap());
        let worker = Neighbours::map(&file).unwrap();
        assert!(!worker.has_some());
        neighbours.set(true);
        assert!(worker.has_some() && neighbours.is_set());

        let denied = |result: io::Result<()>, number| {
            assert_eq!(result.unwrap_err().raw_os_error(), Some(number));
        };
        denied(file.write_all_at(&[0; 8], 0), libc::EPERM);
        denied(file.set_len(0), libc::EPERM);
        denied(Mapping::new(&file, 0, PAGE_BYTES).map(drop), libc::EPERM);
        let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: system calls on an open descriptor, and on a mapping of this length, which they leave as it is.
        unsafe {
            assert_eq!(libc::fallocate(file.as_raw_fd(), punch, 0, 4096), -1);
            denied(Err(io::Error::last_os_error()), libc::EPERM);
            let page = worker.page.as_ptr().cast();
            let writable = libc::PROT_READ | libc::PROT_WRITE;
            assert_eq!(libc::mprotect(page, PAGE_BYTES, writable), -1);
            assert_eq!(libc::madvise(page, PAGE_BYTES, libc::MADV_REMOVE), -1);
        }
        neighbours.set(false);
        assert!(!worker.has_some());
    }
}
