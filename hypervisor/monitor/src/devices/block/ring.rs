//! Reads an image by an io_uring, which has many reads under way at the same time.
//!
//! The kernel executes the entries of a ring without a system call, so that no filter of a thread sees them. Before the ring
//! is enabled it is restricted to READV, which the thread may do by a system call as well, and to no registration that has an
//! effect.
//!
//! The image is not a registered file of the ring. The kernel gives these back some time after the ring is closed, and the
//! lock of the image with them: the next guest would find the image in use.

use std::fmt;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::time::Duration;

use io_uring::register::Restriction;
use io_uring::{IoUring, opcode, types};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use vm_memory::VolatileSlice;
use vm_memory::volatile_memory::PtrGuardMut;

use super::image::DiskImage;
use super::request::ReadRequest;
use crate::devices::virtio::guards;
use crate::ram::GuestRam;

/// Most reads under way.
pub(super) const DEPTH: usize = 128;

/// `IORING_REGISTER_ENABLE_RINGS`, which has no effect on a ring that is enabled.
const ENABLE_RINGS: u8 = 12;
/// Pause before the kernel is asked again to start reads for which it lacked resources.
const AGAIN: Duration = Duration::from_millis(1);

/// A range of memory with the layout of `struct iovec`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct Part {
    start: usize,
    len: usize,
}

impl Part {
    /// Returns the parts of guest memory.
    pub fn of(slices: &[VolatileSlice<'_>]) -> Vec<Self> {
        let guards = guards(slices);
        let part = |guard: &PtrGuardMut| Self {
            start: guard.as_ptr().expose_provenance(),
            len: guard.len(),
        };
        guards.iter().map(part).collect()
    }
}

/// Executes reads, in any order.
pub(super) trait Engine: fmt::Debug + Send + AsRawFd {
    /// Queues a read into `parts`, which stay where they are until [`Self::finished`] returns `token`. `false` if the queue is
    /// full.
    fn queue(&mut self, token: u64, parts: &[Part], offset: u64) -> bool;

    /// Starts the queued reads, and waits until a read is finished if `wait` is set.
    fn enter(&mut self, wait: bool) -> io::Result<()>;

    /// Returns the token of a finished read, and the number of bytes read or a negated error number.
    fn finished(&mut self) -> Option<(u64, i32)>;
}

/// The kernel's io_uring.
struct Ring {
    ring: IoUring,
    image: OwnedFd,
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring")
            .field("ring", &self.ring.as_raw_fd())
            .field("image", &self.image)
            .finish()
    }
}

impl AsRawFd for Ring {
    fn as_raw_fd(&self) -> RawFd {
        self.ring.as_raw_fd()
    }
}

impl Ring {
    /// # Errors
    /// The kernel has no io_uring or no restrictions for it (Linux 5.10), refuses it to this process, or cannot tell whether
    /// a read of this file would wait. It gives each read of such a file to a thread, which takes longer than a read of the
    /// page cache.
    fn new(image: &DiskImage) -> io::Result<Self> {
        let mut byte = [0];
        match preadv2(
            image,
            &mut [IoSliceMut::new(&mut byte)],
            0,
            ReadWriteFlags::NOWAIT,
        ) {
            Ok(_) | Err(Errno::AGAIN) => {}
            Err(error) => return Err(error.into()),
        }
        let entries = u32::try_from(DEPTH).map_err(io::Error::other)?;
        let ring = IoUring::builder()
            .dontfork()
            .setup_r_disabled()
            .build(entries)?;
        let submitter = ring.submitter();
        // Without a restriction of registrations, newer kernels leave these unrestricted.
        submitter.register_restrictions(&mut [
            Restriction::sqe_op(opcode::Readv::CODE),
            Restriction::register_op(ENABLE_RINGS),
        ])?;
        submitter.register_enable_rings()?;
        let image = image.as_fd().try_clone_to_owned()?;
        Ok(Self { ring, image })
    }
}

impl Engine for Ring {
    fn queue(&mut self, token: u64, parts: &[Part], offset: u64) -> bool {
        let Ok(count) = u32::try_from(parts.len()) else {
            return false;
        };
        let image = types::Fd(self.image.as_raw_fd());
        let entry = opcode::Readv::new(image, parts.as_ptr().cast::<libc::iovec>(), count)
            .offset(offset)
            .build()
            .user_data(token);
        // SAFETY: the parts have the layout of iovecs. They and the guest memory that they name stay until the read is
        // finished, which the caller promises and `Reads` keeps. Guest memory is never the target of a Rust reference, so
        // that the kernel may write to it.
        unsafe { self.ring.submission().push(&entry) }.is_ok()
    }

    fn enter(&mut self, wait: bool) -> io::Result<()> {
        let wanted = usize::from(wait);
        if wanted > 0 || !self.ring.submission().is_empty() {
            self.ring.submit_and_wait(wanted)?;
        }
        match self.ring.submission().is_empty() {
            true => Ok(()),
            false => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    fn finished(&mut self) -> Option<(u64, i32)> {
        let entry = self.ring.completion().next()?;
        Some((entry.user_data(), entry.result()))
    }
}

/// Reads under way. They write to guest memory, and are finished before the value is gone.
#[derive(Debug)]
pub(super) struct Reads {
    engine: Box<dyn Engine>,
    /// Reads and the heads of their buffers, by their tokens.
    under_way: Vec<Option<(u16, ReadRequest)>>,
    /// Indexes of `under_way` that are free.
    free: Vec<usize>,
    /// The guest's memory, which stays mapped as long as this value.
    _memory: GuestRam,
}

impl Reads {
    /// Prepares reads of an image. `None` if the kernel can do nothing better than read one part after the other.
    pub fn of(image: &DiskImage, memory: &GuestRam) -> Option<Self> {
        match Ring::new(image) {
            Ok(ring) => Some(Self::by(Box::new(ring), memory)),
            Err(error) => {
                tracing::info!(%error, "a disk has one request under way at a time, without an io_uring");
                None
            }
        }
    }

    /// Lets `engine` execute reads.
    pub fn by(engine: Box<dyn Engine>, memory: &GuestRam) -> Self {
        Self {
            engine,
            under_way: (0..DEPTH).map(|_| None).collect(),
            free: (0..DEPTH).rev().collect(),
            _memory: memory.clone(),
        }
    }

    /// Returns the descriptor that is readable while a finished read waits.
    pub fn descriptor(&self) -> RawFd {
        self.engine.as_raw_fd()
    }

    /// Returns whether no read is under way.
    pub fn is_empty(&self) -> bool {
        self.free.len() == self.under_way.len()
    }

    /// Returns whether no further read can be taken.
    pub fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// Queues a read, whose buffer has this head. `false` if there is no room for it.
    pub fn queue(&mut self, head: u16, read: ReadRequest) -> bool {
        let Some(index) = self.free.pop() else {
            return false;
        };
        if !self.engine.queue(index as u64, &read.parts, read.offset) {
            self.free.push(index);
            return false;
        }
        self.under_way[index] = Some((head, read));
        true
    }

    /// Starts the queued reads. `false` if the kernel lacks resources for some of them now.
    pub fn start(&mut self) -> bool {
        self.enter(false)
    }

    /// Returns a finished read with its buffer's head and the number of bytes read. These are fewer than wanted if the file
    /// has no more, or if the read has failed.
    pub fn finished(&mut self) -> Option<(u16, ReadRequest, u32)> {
        while let Some((token, result)) = self.engine.finished() {
            let Ok(index) = usize::try_from(token) else {
                continue;
            };
            let Some((head, read)) = self.under_way.get_mut(index).and_then(Option::take) else {
                continue;
            };
            self.free.push(index);
            if result < 0 {
                tracing::debug!(error = -result, "a disk's io_uring has failed to read");
            }
            let bytes = u32::try_from(result).unwrap_or(0).min(read.len);
            return Some((head, read, bytes));
        }
        None
    }

    /// Waits until a read is finished, if one is under way.
    pub fn wait(&mut self) {
        if !self.is_empty() && !self.enter(true) {
            std::thread::sleep(AGAIN);
        }
    }

    /// Waits until no read is under way, and forgets them.
    pub fn abandon(&mut self) {
        while !self.is_empty() {
            self.wait();
            while self.finished().is_some() {}
        }
    }

    fn enter(&mut self, wait: bool) -> bool {
        loop {
            match self.engine.enter(wait) {
                Ok(()) => return true,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    tracing::debug!(%error, "a disk's io_uring takes no reads now");
                    return false;
                }
            }
        }
    }
}

impl Drop for Reads {
    fn drop(&mut self) {
        self.abandon();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::sync::Arc;

    use rustix::fs::{Advice, fadvise};
    use virtio_bindings::virtio_blk::{
        VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    };
    use vmm_sys_util::eventfd::EventFd;
    use wormhole_lock::Mutex;
    use zerocopy::IntoBytes;

    use super::super::device::QUEUE_SIZE;
    use super::super::image::{DiskAccess, SECTOR};
    use super::super::request::{Header, MOST_BYTES};
    use super::super::worker::BlockWorker;
    use super::*;
    use crate::confinement::Confinement;
    use crate::device_thread::DeviceThread;
    use crate::devices::virtio::test_queue::{BUFFERS, Entry, NEXT, TestQueue, WRITE};
    use crate::devices::virtio::{ServerHandle, VirtioWorker};
    use crate::sync::Ending;

    const SECTORS: u64 = 64;
    /// Bytes between the requests of a test, which have a header, a status and a sector of data.
    const STEP: u64 = 0x1000;
    const STATUS: u64 = 16;
    const DATA: u64 = 512;
    const OK: u8 = 0;
    const IOERR: u8 = 1;
    const UNTOUCHED: u8 = 0xee;
    const FLUSHES: u64 = 1 << VIRTIO_BLK_F_FLUSH;

    /// State of [`Held`], which its test shares.
    #[derive(Debug, Default)]
    struct Hold {
        queued: Vec<u64>,
        started: Vec<u64>,
        finished: VecDeque<(u64, i32)>,
        /// Whether the kernel lacks resources.
        is_short: bool,
    }

    impl Hold {
        /// Finishes the started read with this index.
        fn finish(&mut self, index: usize, result: i32) {
            let token = self.started.remove(index);
            self.finished.push_back((token, result));
        }
    }

    /// An engine that finishes reads when its test says so, or when the device waits for one.
    #[derive(Debug)]
    struct Held(Arc<Mutex<Hold>>, EventFd);

    impl AsRawFd for Held {
        fn as_raw_fd(&self) -> RawFd {
            self.1.as_raw_fd()
        }
    }

    impl Engine for Held {
        fn queue(&mut self, token: u64, _: &[Part], _: u64) -> bool {
            self.0.lock().queued.push(token);
            true
        }

        fn enter(&mut self, wait: bool) -> io::Result<()> {
            let hold = &mut *self.0.lock();
            if hold.is_short {
                return Err(Errno::AGAIN.into());
            }
            hold.started.append(&mut hold.queued);
            if wait && hold.finished.is_empty() {
                hold.finish(0, -Errno::AGAIN.raw_os_error());
            }
            Ok(())
        }

        fn finished(&mut self) -> Option<(u64, i32)> {
            self.0.lock().finished.pop_front()
        }
    }

    /// The driver of a disk.
    struct Driver {
        queue: TestQueue,
        table: Vec<Entry>,
        heads: Vec<u16>,
    }

    /// Creates an image whose bytes are the numbers of their sectors.
    fn disk() -> (File, DiskImage) {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        for sector in 0..SECTORS {
            let bytes = [sector.to_le_bytes()[0]; 512];
            let written = file.as_file().write_all_at(&bytes, sector * SECTOR);
            written.expect("room");
        }
        file.as_file()
            .set_len(2 * u64::from(MOST_BYTES))
            .expect("a size");
        let image = DiskImage::open(file.path(), DiskAccess::ReadWrite).expect("an image");
        (file.into_file(), image)
    }

    /// Creates a guest with such an image.
    fn guest() -> (Driver, BlockWorker, File) {
        let (file, image) = disk();
        let queue = TestQueue::new(QUEUE_SIZE);
        let (memory, serial) = (queue.memory.clone(), "disk-0".to_owned());
        let mut worker = BlockWorker::new(memory, image, serial, Ending::default());
        worker.start(vec![queue.active()], FLUSHES);
        let driver = Driver {
            queue,
            table: Vec::new(),
            heads: Vec::new(),
        };
        (driver, worker, file)
    }

    /// Creates a guest whose reads the test holds.
    fn held() -> (Driver, BlockWorker, File, Arc<Mutex<Hold>>) {
        let (driver, mut worker, file) = guest();
        let hold: Arc<Mutex<Hold>> = Arc::default();
        let event = EventFd::new(libc::EFD_NONBLOCK).expect("an eventfd");
        let engine = Box::new(Held(Arc::clone(&hold), event));
        worker.reads = Some(Reads::by(engine, &driver.queue.memory));
        (driver, worker, file, hold)
    }

    impl Driver {
        /// Offers one more request, for one sector or a flush. Requests are numbered from 0.
        fn offer(&mut self, kind: u32, sector: u64) {
            let len = if kind == VIRTIO_BLK_T_FLUSH { 0 } else { 512 };
            self.offer_bytes(kind, sector, len);
        }

        /// Offers one more request with this number of bytes.
        fn offer_bytes(&mut self, kind: u32, sector: u64, len: u32) {
            let number = u16::try_from(self.heads.len()).expect("few");
            let at = BUFFERS + STEP * u64::from(number);
            let header = Header {
                kind: kind.into(),
                reserved: 0.into(),
                sector: sector.into(),
            };
            self.queue.write_bytes(at, header.as_bytes());
            self.queue.write(at + STATUS, UNTOUCHED);
            let first = 3 * number;
            let flags = if kind == VIRTIO_BLK_T_IN { WRITE } else { 0 };
            self.table.extend([
                (at, 16, NEXT, first + 1),
                (at + DATA, len, flags | NEXT, first + 2),
                (at + STATUS, 1, WRITE, 0),
            ]);
            self.heads.push(first);
            self.queue.offer(&self.table, &self.heads, number + 1);
        }

        /// Returns the numbers of the requests that have come back, in their order.
        fn back(&self) -> Vec<u32> {
            self.queue.heads().iter().map(|head| head / 3).collect()
        }

        fn status(&self, number: u64) -> u8 {
            self.queue.bytes(BUFFERS + STEP * number + STATUS, 1)[0]
        }

        fn data(&self, number: u64) -> Vec<u8> {
            self.queue.bytes(BUFFERS + STEP * number + DATA, 512)
        }

        /// Waits until this many requests have come back from a device's thread.
        fn until(&self, count: u16) {
            while self.queue.used() < count {
                std::thread::sleep(AGAIN);
            }
        }
    }

    #[test]
    fn reads_come_back_in_the_order_in_which_they_are_finished() {
        let (mut driver, mut worker, _, hold) = held();
        for sector in [3, 7, 5] {
            driver.offer(VIRTIO_BLK_T_IN, sector);
        }
        worker.serve();
        assert_eq!((driver.queue.used(), driver.queue.interrupts()), (0, 0));
        // The last one wholly, the first one not at all, and the second one in part.
        hold.lock().finish(2, 512);
        hold.lock().finish(0, -Errno::IO.raw_os_error());
        hold.lock().finish(0, 100);
        worker.serve();
        assert_eq!(driver.back(), [2, 0, 1]);
        assert_eq!(driver.queue.lengths(), [513; 3]);
        assert_eq!([0, 1, 2].map(|number| driver.status(number)), [OK; 3]);
        assert_eq!(driver.queue.interrupts(), 1);
        assert_eq!(driver.data(0), [3; 512]);
        // The engine of this test writes nothing, and the device reads what is missing.
        assert_eq!(driver.data(1), [&[0; 100][..], &[7; 412]].concat());
        assert_eq!(driver.data(2), [0; 512]);
    }

    #[test]
    fn writes_and_flushes_wait_for_no_read() {
        let (mut driver, mut worker, file, hold) = held();
        driver.offer(VIRTIO_BLK_T_IN, 1);
        driver.queue.write_bytes(BUFFERS + STEP + DATA, &[9; 512]);
        driver.offer(VIRTIO_BLK_T_OUT, 2);
        driver.offer(VIRTIO_BLK_T_FLUSH, 0);
        worker.serve();
        assert_eq!(driver.back(), [1, 2]);
        let mut bytes = [0; 512];
        let read = file.read_exact_at(&mut bytes, 2 * SECTOR);
        read.expect("the file");
        assert_eq!(bytes, [9; 512]);
        hold.lock().finish(0, 0);
        worker.serve();
        assert_eq!(driver.back(), [1, 2, 0]);
        assert_eq!(driver.data(0), [1; 512]);
    }

    #[test]
    fn a_large_read_takes_its_turn() {
        let (mut driver, mut worker, _, hold) = held();
        driver.offer_bytes(VIRTIO_BLK_T_IN, 0, MOST_BYTES + 512);
        worker.serve();
        assert!(hold.lock().started.is_empty());
        assert_eq!(driver.back(), [0]);
        let (mut driver, mut worker, _, hold) = held();
        driver.offer_bytes(VIRTIO_BLK_T_IN, 0, MOST_BYTES);
        worker.serve();
        assert_eq!(hold.lock().started.len(), 1);
        hold.lock().finish(0, 0);
        worker.serve();
        assert_eq!(driver.back(), [0]);
    }

    #[test]
    fn a_read_that_fails_while_the_vm_ends_is_not_read_anew() {
        let (mut driver, mut worker, _, hold) = held();
        driver.offer(VIRTIO_BLK_T_IN, 5);
        worker.serve();
        worker.disk.ending.begin();
        hold.lock().finish(0, -Errno::IO.raw_os_error());
        worker.serve();
        assert_eq!(driver.status(0), IOERR);
        assert_eq!(driver.data(0), [0; 512]);
    }

    #[test]
    fn a_reset_waits_for_reads_and_returns_none_of_them() {
        let (mut driver, mut worker, _, hold) = held();
        for sector in 0..4 {
            driver.offer(VIRTIO_BLK_T_IN, sector);
        }
        worker.serve();
        hold.lock().finish(1, 512);
        worker.stop();
        assert!(hold.lock().started.is_empty() && hold.lock().finished.is_empty());
        worker.serve();
        assert_eq!((driver.queue.used(), driver.queue.interrupts()), (0, 0));
        assert_eq!(driver.status(1), UNTOUCHED);
        // For the next driver the device executes only reads that this driver has offered.
        worker.start(vec![driver.queue.active()], FLUSHES);
        worker.serve();
        assert_eq!(hold.lock().started.len(), 4);
        worker.settle();
        assert_eq!(driver.back(), [0, 1, 2, 3]);
    }

    #[test]
    fn a_thread_that_stands_has_no_read_under_way() {
        let (mut driver, worker, _, hold) = held();
        for sector in 0..4 {
            driver.offer(VIRTIO_BLK_T_IN, sector);
        }
        let thread = DeviceThread::start("disk-0").expect("a thread");
        let worker = Box::new(worker);
        let mut server = ServerHandle::new(thread.handle(), worker, 1).expect("eventfds");
        let queues = vec![driver.queue.active()];
        server.start(queues, FLUSHES).expect("the thread is there");
        while hold.lock().started.len() < 4 {
            std::thread::sleep(AGAIN);
        }
        assert_eq!(driver.queue.used(), 0);
        let parked = thread.park().expect("the thread is there");
        assert_eq!(driver.back(), [0, 1, 2, 3]);
        drop(parked);
        driver.offer(VIRTIO_BLK_T_FLUSH, 0);
        server.notify(0);
        driver.until(5);
    }

    #[test]
    fn reads_beyond_those_that_the_ring_holds_stay_available_until_there_is_room() {
        let (mut driver, mut worker, _, hold) = held();
        driver.offer(VIRTIO_BLK_T_IN, 6);
        // The driver offers one request again and again.
        let heads = [0; QUEUE_SIZE as usize];
        let all = QUEUE_SIZE;
        driver.queue.offer(&driver.table, &heads, all);
        worker.serve();
        assert_eq!((hold.lock().started.len(), driver.queue.used()), (DEPTH, 0));
        hold.lock().finish(0, 512);
        worker.serve();
        assert_eq!((hold.lock().started.len(), driver.queue.used()), (DEPTH, 1));
        while driver.queue.used() < all {
            worker.settle();
            worker.serve();
        }
        assert_eq!(driver.queue.lengths(), [513; QUEUE_SIZE as usize]);
        assert!(hold.lock().started.is_empty());
    }

    #[test]
    fn a_ring_that_lacks_resources_is_entered_again() {
        let (mut driver, mut worker, _, hold) = held();
        driver.offer(VIRTIO_BLK_T_IN, 6);
        hold.lock().is_short = true;
        worker.serve();
        assert!(driver.queue.rung());
        hold.lock().is_short = false;
        worker.serve();
        assert!(!driver.queue.rung());
        hold.lock().finish(0, 0);
        worker.serve();
        assert_eq!(driver.data(0), [6; 512]);
    }

    #[test]
    fn a_read_beyond_the_end_of_a_file_that_was_cut_is_an_error() {
        let (mut driver, mut worker, file) = guest();
        file.set_len(8 * SECTOR).expect("a size");
        for sector in [7, 8] {
            driver.offer(VIRTIO_BLK_T_IN, sector);
        }
        worker.serve();
        worker.settle();
        assert_eq!([driver.status(0), driver.status(1)], [OK, IOERR]);
        assert_eq!(driver.data(0), [7; 512]);
    }

    #[test]
    fn an_image_is_free_once_its_worker_is_gone() {
        for _ in 0..8 {
            let (mut driver, mut worker, file) = guest();
            driver.offer(VIRTIO_BLK_T_IN, 1);
            worker.serve();
            drop(worker);
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            let again = DiskImage::open(path.as_ref(), DiskAccess::ReadWrite);
            again.expect("no guest has it");
        }
    }

    #[test]
    fn a_confined_thread_reads_what_the_hosts_cache_does_not_have() {
        let (mut driver, worker, file) = guest();
        if worker.reads.is_none() {
            return println!("skipped: this kernel refuses an io_uring");
        }
        file.sync_all().expect("it is stored");
        fadvise(&file, 0, None, Advice::DontNeed).expect("a file");
        for sector in 0..SECTORS {
            driver.offer(VIRTIO_BLK_T_IN, sector);
        }
        let thread = DeviceThread::start("disk-0").expect("a thread");
        let confinement = Confinement::of_disk().expect("a list");
        thread.confine(confinement).expect("confined");
        let worker = Box::new(worker);
        let mut server = ServerHandle::new(thread.handle(), worker, 1).expect("eventfds");
        let queues = vec![driver.queue.active()];
        server.start(queues, FLUSHES).expect("the thread is there");
        driver.until(u16::try_from(SECTORS).expect("few"));
        for sector in 0..SECTORS {
            assert_eq!(driver.status(sector), OK);
            assert_eq!(driver.data(sector), [sector.to_le_bytes()[0]; 512]);
        }
    }

    /// The disk reads anew what the ring has failed to read, so that the other tests pass with a ring that fails.
    #[test]
    fn a_ring_reads_what_the_hosts_cache_does_not_have() {
        let (file, image) = disk();
        let Ok(mut ring) = Ring::new(&image) else {
            return println!("skipped: this kernel refuses an io_uring");
        };
        file.sync_all().expect("it is stored");
        fadvise(&file, 0, None, Advice::DontNeed).expect("a file");
        let mut sectors = vec![[0xffu8; 512]; usize::try_from(SECTORS).expect("few")];
        let parts: Vec<Part> = sectors
            .iter_mut()
            .map(|sector| Part {
                start: sector.as_mut_ptr().expose_provenance(),
                len: sector.len(),
            })
            .collect();
        for (sector, part) in (0..SECTORS).zip(&parts) {
            let part = std::slice::from_ref(part);
            assert!(ring.queue(sector, part, sector * SECTOR));
        }
        let mut finished = 0;
        while finished < SECTORS {
            ring.enter(true).expect("resources");
            while let Some((_, result)) = ring.finished() {
                assert_eq!(result, 512);
                finished += 1;
            }
        }
        for (sector, bytes) in (0..SECTORS).zip(&sectors) {
            assert_eq!(*bytes, [sector.to_le_bytes()[0]; 512]);
        }
    }

    #[test]
    fn a_ring_reads_and_does_nothing_else() {
        let (file, image) = disk();
        let Ok(mut ring) = Ring::new(&image) else {
            return println!("skipped: this kernel refuses an io_uring");
        };
        let mut bytes = [1u8; 16];
        let part = libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        };
        let file = types::Fd(file.as_raw_fd());
        let entries = [
            opcode::Writev::new(file, &raw const part, 1).build(),
            opcode::Fsync::new(file).build(),
            opcode::Nop::new().build(),
            opcode::Readv::new(file, &raw const part, 1).build(),
        ];
        let results = entries.map(|entry| {
            // SAFETY: the part names bytes of this test, which waits until the entry is finished.
            unsafe { ring.ring.submission().push(&entry) }.expect("room");
            ring.enter(true).expect("resources");
            ring.finished().expect("a finished entry").1
        });
        let denied = -Errno::ACCESS.raw_os_error();
        assert_eq!(results, [denied, denied, denied, 16]);
        assert_eq!(bytes, [0; 16]);
        let refused = ring.ring.submitter().register_files(&[0]);
        let refused = refused.expect_err("no further registration");
        assert_eq!(refused.raw_os_error(), Some(libc::EACCES));
    }
}
