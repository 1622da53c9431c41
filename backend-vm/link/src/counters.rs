//! Counters of a worker, in a shared page that outlives it; the page of its progress follows.
//!
//! The supervisor creates the pages and sends their file to the worker at assignment. The worker writes them with
//! relaxed stores. The supervisor copies them out; a hostile worker may have written any numbers. The supervisor maps
//! no page, because its page fault would wait while the worker punches the file, and writes none, because a `write` of
//! the worker to the same file holds the inode's lock for as long as a page fault on its source buffer makes it wait. A
//! `pread` of a memfd waits for neither (`shmem_file_read_iter` and `shmem_fault` in mm/shmem.c of Linux). It takes the
//! page's lock, which no call on a worker's list holds for long.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::neighbours::Neighbours;
use crate::progress::{self, Progress, Snapshot};
use crate::{device, memory};

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;
/// Bytes of the file: the page of counts, and behind it the page of progress.
const FILE_BYTES: usize = 2 * PAGE_BYTES;
const _: () = assert!(progress::WORDS * 8 == PAGE_BYTES);
/// First word of the counts of measured requests, by their time.
const FIRST_TIME: usize = 32;
/// First word of the counts by message.
const FIRST_MESSAGE: usize = 64;
/// First of the words with the bytes of each device's memory that the process has allocated.
const DEVICE_MEMORY: usize = PAGE_BYTES / 8 - device::MOST;
/// Number of message ids that are counted individually.
pub const MESSAGES: usize = DEVICE_MEMORY - FIRST_MESSAGE;

/// Number of classes of times. The first one is below 256 ns, and each of the others twice as long as the one before.
pub const TIMES: usize = FIRST_MESSAGE - FIRST_TIME;

/// Returns the time in nanoseconds below which all times of a class are. The last class has longer ones as well.
#[must_use]
pub const fn time_of(class: usize) -> u64 {
    256 << class
}

/// Counters of a worker. The discriminant is the word in the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Counter {
    /// Records without an answer.
    Records = 0,
    /// Records that were answered.
    Requests = 1,
    /// Fences submitted to the device.
    Fences = 2,
    BytesToDevice = 3,
    BytesToHost = 4,
    BytesOnDevice = 5,
    /// Calls that the device or a check refused.
    Failures = 7,
    /// Handles that name no object of the session.
    InvalidHandles = 8,
    /// Addresses outside the session's memory.
    InvalidAddresses = 9,
    /// Number of times that the executor went to sleep.
    Parks = 10,
    /// Chains of launches that the device got by one call, and the launches in them.
    Chains = 11,
    ChainedLaunches = 12,
    /// Ring entries that no correct producer writes, by violation (until `RingTail`).
    RingCommit = 16,
    RingLap = 17,
    RingOverrun = 18,
    RingBody = 19,
    RingSlot = 20,
    RingTail = 21,
    /// Records that do not decode, by error (until `ExcludedValue`).
    UnknownMessage = 22,
    ShortBody = 23,
    LongBody = 24,
    CountAboveLimit = 25,
    CountAboveBody = 26,
    HandleType = 27,
    ExcludedValue = 28,
    /// Requests whose slot still had an unanswered request.
    SlotBusy = 29,
    /// Requests without a slot for the answer.
    NoSlot = 30,
    /// Messages for a device that does not exist.
    NoDevice = 31,
}

impl Counter {
    /// Reasons for which a guest's record is refused, with their names in a report.
    pub const REFUSALS: &[(Self, &str)] = &[
        (Self::InvalidHandles, "handle names nothing"),
        (Self::InvalidAddresses, "range outside the session"),
        (Self::RingCommit, "ring: commit word"),
        (Self::RingLap, "ring: lap"),
        (Self::RingOverrun, "ring: entry over the end"),
        (Self::RingBody, "ring: body length"),
        (Self::RingSlot, "ring: answer slot"),
        (Self::RingTail, "ring: tail cursor"),
        (Self::UnknownMessage, "record: unknown message"),
        (Self::ShortBody, "record: too short"),
        (Self::LongBody, "record: too long"),
        (Self::CountAboveLimit, "record: count above its limit"),
        (Self::CountAboveBody, "record: count above its body"),
        (Self::HandleType, "record: no handle of the type"),
        (Self::ExcludedValue, "record: excluded value"),
        (Self::SlotBusy, "slot busy"),
        (Self::NoSlot, "request without a slot"),
        (Self::NoDevice, "device that is not there"),
    ];
}

/// A copy of the page.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    words: Vec<u64>,
}

impl Counts {
    pub fn get(&self, counter: Counter) -> u64 {
        self.words.get(counter as usize).copied().unwrap_or(0)
    }

    /// Returns the numbers of measured requests, by class of their time.
    pub fn times(&self) -> [u64; TIMES] {
        std::array::from_fn(|class| self.words.get(FIRST_TIME + class).copied().unwrap_or(0))
    }

    /// Returns id and count of each message that was executed.
    pub fn messages(&self) -> impl Iterator<Item = (u16, u64)> {
        (0u16..)
            .zip(
                self.words
                    .iter()
                    .skip(FIRST_MESSAGE)
                    .take(MESSAGES)
                    .copied(),
            )
            .filter(|(_, count)| *count > 0)
    }
}

/// The supervisor's side: the file of the pages.
#[derive(Debug)]
pub struct CountersFile(File);

impl CountersFile {
    /// Creates a memfd with zeroed pages and seals its size.
    ///
    /// # Errors
    /// The kernel has no memory or no descriptor for it.
    pub fn create() -> io::Result<Self> {
        let file = File::from(memory::anonymous_file(c"wormhole-counters")?);
        file.set_len(FILE_BYTES as u64)?;
        memory::seal_size(&file)?;
        Ok(Self(file))
    }

    pub fn file(&self) -> &File {
        &self.0
    }

    /// Returns the bytes of a device's memory that the worker claims its process has allocated. `device` is the number
    /// among the tenant's devices.
    pub fn device_memory(&self, device: usize) -> u64 {
        let word = DEVICE_MEMORY + device.min(device::MOST - 1);
        let mut bytes = [0; 8];
        let read = self.0.read_exact_at(&mut bytes, 8 * word as u64);
        read.map_or(0, |()| u64::from_le_bytes(bytes))
    }

    /// Reads the current counts.
    pub fn read(&self) -> Counts {
        Counts {
            words: self.page(0),
        }
    }

    /// Reads the worker's current progress and counts.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            words: self.page(PAGE_BYTES as u64),
            counts: self.read(),
        }
    }

    fn page(&self, at: u64) -> Vec<u64> {
        let mut bytes = [0u8; PAGE_BYTES];
        if self.0.read_exact_at(&mut bytes, at).is_err() {
            return Vec::new();
        }
        let (words, _) = bytes.as_chunks::<8>();
        words.iter().map(|word| u64::from_le_bytes(*word)).collect()
    }
}

/// The worker's side: the page, mapped. One thread writes it.
#[derive(Debug)]
pub struct Counters {
    page: NonNull<AtomicU64>,
    progress: Progress,
    neighbours: Neighbours,
}

// SAFETY: the page is accessed through atomics only.
unsafe impl Send for Counters {}
// SAFETY: as above.
unsafe impl Sync for Counters {}

impl Counters {
    /// Maps the page that the supervisor sent. It stays mapped until the process ends.
    ///
    /// # Errors
    /// The descriptor cannot be mapped.
    pub fn map(fd: &OwnedFd, neighbours: Neighbours) -> io::Result<Self> {
        let page = memory::map_shared(fd, 0, FILE_BYTES)?.cast();
        // SAFETY: the second of the two pages, which stay mapped.
        let progress = unsafe { Progress::new(page.add(PAGE_BYTES / 8)) };
        Ok(Self {
            page,
            progress,
            neighbours,
        })
    }

    /// Returns the page in which the worker's threads note their progress.
    #[inline]
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Adds `amount`, with a plain load and store, because there is only one writer.
    #[inline]
    pub fn add(&self, counter: Counter, amount: u64) {
        self.add_word(counter as usize, amount);
    }

    /// Counts one execution of message `id`.
    #[inline]
    pub fn message(&self, id: u16) {
        let id = usize::from(id);
        if id < MESSAGES {
            self.add_word(FIRST_MESSAGE + id, 1);
        }
    }

    /// Counts a measured request by its time.
    pub fn time(&self, time: Duration) {
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let class = (nanoseconds / time_of(0)).checked_ilog2();
        let class = class.map_or(0, |log| log as usize + 1).min(TIMES - 1);
        self.add_word(FIRST_TIME + class, 1);
    }

    /// Sets the bytes of a device's memory that the process has allocated.
    pub fn set_device_memory(&self, device: usize, bytes: u64) {
        if device < device::MOST {
            self.word(DEVICE_MEMORY + device)
                .store(bytes, Ordering::Relaxed);
        }
    }

    /// Returns true if other tenants use the devices as well, as last set by the supervisor.
    pub fn has_neighbours(&self) -> bool {
        self.neighbours.has_some()
    }

    #[inline]
    fn add_word(&self, index: usize, amount: u64) {
        let word = self.word(index);
        word.store(
            word.load(Ordering::Relaxed).wrapping_add(amount),
            Ordering::Relaxed,
        );
    }

    #[inline]
    fn word(&self, index: usize) -> &AtomicU64 {
        debug_assert!(index < PAGE_BYTES / 8);
        // SAFETY: inside the page, which is mapped for the life of the process.
        unsafe { self.page.add(index).as_ref() }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::neighbours::NeighboursFile;

    /// Creates a page with its supervisor's and its worker's side.
    pub(crate) fn page() -> (CountersFile, Counters) {
        let file = CountersFile::create().unwrap();
        let neighbours = NeighboursFile::create().unwrap().descriptor().unwrap();
        let neighbours = Neighbours::map(&neighbours).unwrap();
        let page = OwnedFd::from(file.file().try_clone().unwrap());
        (file, Counters::map(&page, neighbours).unwrap())
    }

    #[test]
    fn what_the_worker_counts_the_supervisor_reads() {
        let (file, counters) = page();
        counters.add(Counter::Requests, 2);
        counters.message(33);
        counters.message(33);
        counters.message(u16::MAX);
        let counts = file.read();
        assert_eq!(counts.get(Counter::Requests), 2);
        assert_eq!(counts.messages().collect::<Vec<_>>(), [(33, 2)]);
        counters.set_device_memory(0, 1 << 40);
        counters.set_device_memory(0, 4096);
        counters.set_device_memory(device::MOST - 1, 7);
        counters.set_device_memory(device::MOST, 9);
        let memory = [0, 1, device::MOST - 1].map(|device| file.device_memory(device));
        assert_eq!(memory, [4096, 0, 7]);
        assert_eq!(file.read().messages().count(), 1);
        assert_eq!(
            counts.get(Counter::Requests),
            file.read().get(Counter::Requests)
        );
    }

    #[test]
    fn times_are_counted_by_class() {
        let (file, counters) = page();
        for nanoseconds in [0, 255, 256, 511, 512, 1_000_000, u64::MAX] {
            counters.time(Duration::from_nanos(nanoseconds));
        }
        let times = file.read().times();
        assert_eq!(times[..4], [2, 2, 1, 0]);
        assert_eq!((times[12], times[TIMES - 1]), (1, 1));
        assert!(time_of(11) <= 1_000_000 && 1_000_000 < time_of(12));
        assert_eq!(times.iter().sum::<u64>(), 7);
    }

    /// Maps a page whose first access blocks until the returned descriptor is closed (userfaultfd(2)). Returns `None`
    /// if the kernel refuses a userfaultfd.
    fn page_that_waits() -> Option<(NonNull<u8>, OwnedFd)> {
        use std::os::fd::{AsRawFd, FromRawFd};
        const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
        const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
        // SAFETY: no fixed address; system calls on integers, and on complete local structures: the API version, and
        // the range registered for missing pages.
        unsafe {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let page = libc::mmap(std::ptr::null_mut(), PAGE_BYTES, protection, flags, -1, 0);
            assert_ne!(page, libc::MAP_FAILED);
            let number = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC);
            let number = i32::try_from(number).ok().filter(|number| *number >= 0)?;
            let fd = OwnedFd::from_raw_fd(number);
            let mut version = [0xaa_u64, 0, 0];
            let mut range = [page as u64, PAGE_BYTES as u64, 1, 0];
            let number = fd.as_raw_fd();
            assert_eq!(libc::ioctl(number, UFFDIO_API, version.as_mut_ptr()), 0);
            assert_eq!(libc::ioctl(number, UFFDIO_REGISTER, range.as_mut_ptr()), 0);
            Some((NonNull::new(page.cast()).unwrap(), fd))
        }
    }

    #[test]
    fn a_worker_that_has_the_file_locked_holds_nobody_up() {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        use std::os::fd::AsRawFd;
        let Some((page, waits)) = page_that_waits() else {
            eprintln!("skipped: this process may not have its page faults wait");
            return;
        };
        let file = CountersFile::create().unwrap();
        let (number, address) = (file.file().as_raw_fd(), page.as_ptr() as usize);
        std::thread::scope(|scope| {
            // SAFETY: an open descriptor, and a page of this length.
            let write =
                move || unsafe { libc::write(number, address as *const libc::c_void, PAGE_BYTES) };
            let writer = scope.spawn(write);
            let minute = Timespec {
                tv_sec: 60,
                tv_nsec: 0,
            };
            let mut entry = [PollFd::new(&waits, PollFlags::IN)];
            assert_eq!(poll(&mut entry, Some(&minute)), Ok(1));
            let (done, is_done) = std::sync::mpsc::channel();
            let file = &file;
            scope.spawn(move || {
                done.send(file.device_memory(0) + file.read().get(Counter::Records))
            });
            let said = is_done.recv_timeout(Duration::from_secs(20));
            drop(waits);
            assert_eq!(said, Ok(0));
            assert_eq!(usize::try_from(writer.join().unwrap()), Ok(PAGE_BYTES));
        });
    }

    #[test]
    fn the_page_cannot_be_cut_off_under_its_readers() {
        let file = CountersFile::create().unwrap();
        assert!(file.file().set_len(0).is_err());
    }
}
