//! What devices of several processes use together: parts of the files that their memory is in, and events, each
//! of which has a file of its own.

use std::fmt;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::thread;
use std::time::Duration;

use wormhole_device::{
    CuError, EventWords, Found, PARTIES, RawEvent, RawMemory, RawPool, Result, Shared, Sharing,
    WORDS_FILE,
};

use crate::device::CpuDevice;
use crate::file;
use crate::memory::Owner;

/// How often who waits for another process looks.
const LOOK: Duration = Duration::from_micros(50);

/// An event that several processes use.
pub struct SharedEvent {
    file: OwnedFd,
    words: NonNull<u8>,
    party: u32,
}

// SAFETY: a mapping of this object's own, which is reached through atomics alone.
unsafe impl Send for SharedEvent {}
// SAFETY: as above.
unsafe impl Sync for SharedEvent {}

impl fmt::Debug for SharedEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedEvent")
            .field("party", &self.party)
            .finish_non_exhaustive()
    }
}

impl SharedEvent {
    /// Never recorded, and this process's to share.
    pub fn new() -> Result<Self> {
        let file = file::anonymous(WORDS_FILE as u64).map_err(|error| {
            tracing::warn!(%error, "no file can be made for an event that is to be shared");
            CuError::OUT_OF_MEMORY
        })?;
        Self::map(file, 0)
    }

    /// Another process's.
    fn open(found: Found) -> Result<Self> {
        let file = found.descriptor.ok_or(CuError::INVALID_VALUE)?;
        if file::fixed_size(&file) != Some(WORDS_FILE as u64) || found.party >= PARTIES {
            return Err(CuError::INVALID_VALUE);
        }
        Self::map(file, found.party)
    }

    fn map(file: OwnedFd, party: u32) -> Result<Self> {
        // SAFETY: a new mapping where the kernel likes, of a file that has that size for good.
        let words = unsafe {
            libc::mmap(
                ptr::null_mut(),
                WORDS_FILE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if words == libc::MAP_FAILED {
            return Err(CuError::OUT_OF_MEMORY);
        }
        let words = NonNull::new(words.cast()).ok_or(CuError::OUT_OF_MEMORY)?;
        Ok(Self { file, words, party })
    }

    fn words(&self) -> EventWords<'_> {
        // SAFETY: a whole page, mapped until this is dropped.
        unsafe { EventWords::new(self.words.as_ptr()) }
    }

    /// The number of a new record.
    pub fn record(&self) -> u64 {
        self.words().record(self.party)
    }

    pub fn complete(&self, record: u64) {
        self.words().complete(record);
    }

    pub fn is_complete(&self, record: u64) -> bool {
        self.words().is_complete(record)
    }

    /// The number of the last record.
    pub fn last(&self) -> u64 {
        self.words().last()
    }

    /// Waits until a record is complete, or `stopped` says that nobody waits any more.
    pub fn wait(&self, record: u64, stopped: impl Fn() -> bool) {
        while !self.is_complete(record) && !stopped() {
            thread::sleep(LOOK);
        }
    }
}

impl Drop for SharedEvent {
    fn drop(&mut self) {
        // SAFETY: this object's own mapping.
        unsafe { libc::munmap(self.words.as_ptr().cast(), WORDS_FILE) };
    }
}

/// A part of a file.
fn part(file: OwnedFd, offset: u64, bytes: u64) -> Shared {
    Shared {
        descriptor: Some(file),
        ..Shared::described([offset, bytes, 0, 0, 0, 0, 0, 0])
    }
}

/// The part of a file that another process has shared.
fn found_part(found: Found) -> Result<(OwnedFd, u64, u64)> {
    let file = found.descriptor.ok_or(CuError::INVALID_VALUE)?;
    let [offset, bytes, ..] = found.description;
    Ok((file, offset, bytes))
}

impl Sharing for CpuDevice {
    fn share_allocation(&self, address: u64) -> Result<Shared> {
        self.context()?;
        let (file, offset, bytes) = self.memory.home(address, Owner::Program)?;
        Ok(part(file, offset, bytes))
    }

    fn open_allocation(&self, found: Found) -> Result<(u64, u64)> {
        self.context()?;
        let (file, offset, bytes) = found_part(found)?;
        let address = self.memory.open(&file, offset, bytes, Owner::Program)?;
        Ok((address, bytes))
    }

    fn close_allocation(&self, address: u64) -> Result<()> {
        self.memory.opened(address, Owner::Program)?;
        self.idle()?;
        self.memory.close(address, Owner::Program)
    }

    fn share_event(&self, event: RawEvent) -> Result<Shared> {
        let event = self.context()?.events.shared(event)?;
        let file = event.file.try_clone();
        Ok(Shared {
            descriptor: Some(file.map_err(|_| CuError::OUT_OF_MEMORY)?),
            words: true,
            ..Shared::described([0; 8])
        })
    }

    fn open_event(&self, found: Found) -> Result<RawEvent> {
        let context = self.context()?;
        Ok(context.events.add(SharedEvent::open(found)?))
    }

    fn share_memory(&self, memory: RawMemory, _: u64) -> Result<Shared> {
        self.memory.shared().share_memory(memory)
    }

    fn open_memory(&self, found: Found) -> Result<(RawMemory, u64)> {
        self.memory.shared().open_memory(&self.memory, found)
    }

    fn share_pool(&self, pool: RawPool) -> Result<Shared> {
        self.pools().shared(pool)?;
        Ok(part(self.memory.file()?, 0, 0))
    }

    fn open_pool(&self, found: Found) -> Result<RawPool> {
        let (file, ..) = found_part(found)?;
        Ok(self.pools().open(file))
    }

    fn share_pointer(&self, address: u64) -> Result<Shared> {
        let (offset, bytes) = self.pools().home(address)?;
        Ok(Shared::described([offset, bytes, 0, 0, 0, 0, 0, 0]))
    }

    fn open_pointer(&self, pool: RawPool, found: Found) -> Result<(u64, u64)> {
        let [offset, bytes, ..] = found.description;
        let address = self.pools().open_pointer(pool, offset, bytes)?;
        Ok((address, bytes))
    }
}
