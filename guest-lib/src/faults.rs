//! Accesses to absent pages that this library serves (userfaultfd(2)).
//!
//! The kernel blocks a thread that accesses such a page, in the program's own code or in a system call, until the page is
//! replaced and the thread woken. Pages become absent in one step (`mremap`), so no access falls between.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{OFlags, fcntl_setfl};
use wormhole_lock::Mutex;

use crate::pages::{self, Pages, Spare};
use crate::signals::BlockedSignals;

/// `UFFD_FEATURE_EVENT_REMAP`: moved pages still block. The thread that moves them waits until [`Faults::next`] has read
/// the event.
const FEATURES: u64 = 1 << 2;
/// Bytes of a message, and offset of the address in one.
const MESSAGE: usize = 32;
const ADDRESS: usize = 16;
const PAGE_FAULT: u8 = 0x12;
/// Offset of a fault's flags, and those of an access that writes (`UFFD_PAGEFAULT_FLAG_WRITE`, `…_WP`).
const FLAGS: usize = 8;
const WRITES: u8 = 1 | 1 << 1;

/// An access that blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    pub address: u64,
    /// Whether it is a write.
    pub writes: bool,
}

/// Descriptor of the process's absent pages.
#[derive(Debug)]
pub struct Faults {
    descriptor: OwnedFd,
    messages: File,
    /// Pages that [`Faults::bring_back`] fills now.
    filled: Mutex<Option<Pages>>,
    /// Whether an access found zeros in a page that nothing fills.
    has_strays: AtomicBool,
    /// Whether writes can be blocked alone.
    can_protect: bool,
}

/// Failure to bring pages back.
#[derive(Debug, thiserror::Error)]
pub enum BringBackError {
    #[error(transparent)]
    Unchanged(#[from] io::Error),
    #[error("private memory is in its place, and a part of that reads as zeros: {0}")]
    Lost(io::Error),
}

impl Faults {
    /// Fails if this process may not block accesses by system calls.
    pub fn open() -> io::Result<Self> {
        let both = pages::descriptor(FEATURES | pages::HOLD_FEATURES);
        let can_protect = both.is_ok();
        let descriptor = both.or_else(|_| pages::descriptor(FEATURES))?;
        // A read waits for the next message.
        fcntl_setfl(&descriptor, OFlags::empty())?;
        let messages = File::from(descriptor.try_clone()?);
        Ok(Self {
            descriptor,
            messages,
            filled: Mutex::new(None),
            has_strays: AtomicBool::new(false),
            can_protect,
        })
    }

    /// Waits for the next message, and returns the access if it is a fault. Must be called by a thread that does nothing
    /// else meanwhile.
    pub fn next(&self) -> io::Result<Option<Access>> {
        let mut message = [0; MESSAGE];
        match (&self.messages).read(&mut message) {
            Ok(MESSAGE) if message[0] == PAGE_FAULT => {
                let mut address = [0; 8];
                address.copy_from_slice(&message[ADDRESS..ADDRESS + 8]);
                Ok(Some(Access {
                    address: u64::from_ne_bytes(address),
                    writes: message[FLAGS] & WRITES != 0,
                }))
            }
            // Another kind of message.
            Ok(_) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Maps memory without pages, which is to make pages absent whose place it takes.
    pub fn missing(&self, bytes: u64) -> io::Result<Spare> {
        Spare::missing(&self.descriptor, bytes)
    }

    /// Maps a part of a file. Writes to it block.
    pub fn protected(&self, file: &File, offset: u64, bytes: u64) -> io::Result<Spare> {
        if !self.can_protect {
            return Err(io::ErrorKind::Unsupported.into());
        }
        Spare::protected(&self.descriptor, file, offset, bytes)
    }

    /// Returns the descriptor that blocks accesses.
    pub fn descriptor(&self) -> &OwnedFd {
        &self.descriptor
    }

    /// Blocks writes to a part of pages that are aside.
    pub fn protect(&self, spare: &Spare, offset: u64, bytes: u64) -> io::Result<()> {
        spare.protect(&self.descriptor, offset, bytes)
    }

    /// Lets threads write to pages of [`Faults::protected`].
    pub fn let_write(&self, pages: Pages) -> io::Result<()> {
        pages::let_write(&self.descriptor, pages)
    }

    /// Replaces pages by private memory with the contents of a second mapping of the same memory, at `source`. Accesses of
    /// other threads wait meanwhile, so none is lost. Callers take turns.
    ///
    /// # Errors
    /// Nothing changes, or the pages are replaced and not all filled.
    ///
    /// # Safety
    /// This library has mapped the pages and `source`, and neither is the calling thread's own (`pages::are_own`). Another
    /// thread, which accesses none of the pages, calls [`Faults::next`] again and again, and [`Faults::end_stray`] for each
    /// fault.
    pub unsafe fn bring_back(&self, pages: Pages, source: u64) -> Result<(), BringBackError> {
        let spare = Spare::absent(&self.descriptor, pages.bytes())?;
        // The pages may hold anything, also the data of handlers. This thread must access none until they are filled.
        let _signals = BlockedSignals::new();
        *self.filled.lock() = Some(pages);
        // SAFETY: the caller's promise; the contents stay at `source`.
        let replaced = unsafe { spare.take_place_of(pages) };
        let result = match replaced {
            Ok(()) => {
                pages::copy_to_absent(&self.descriptor, pages, source).map_err(BringBackError::Lost)
            }
            Err(error) => Err(BringBackError::Unchanged(error)),
        };
        *self.filled.lock() = None;
        result
    }

    /// Ends the wait at an address, unless [`Faults::bring_back`] fills the page. A thread of the program may have moved or
    /// enlarged the mapping (mremap(2)) while it was filled. The rest is absent, and nothing else ever fills it.
    pub fn end_stray(&self, address: u64) {
        let filled = self.filled.lock();
        let is_filled = filled.is_some_and(|pages| (pages.start..pages.end).contains(&address));
        if !is_filled && pages::give_up(&self.descriptor, address).is_ok() {
            self.has_strays.store(true, Ordering::Relaxed);
        }
    }

    /// Returns true if an access found zeros in a page that nothing fills, since the last call.
    pub fn take_strays(&self) -> bool {
        self.has_strays.swap(false, Ordering::Relaxed)
    }

    /// Lets blocked threads try again.
    pub fn wake(&self, pages: Pages) -> io::Result<()> {
        pages::wake(&self.descriptor, pages)
    }
}
