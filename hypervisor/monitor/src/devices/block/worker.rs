//! Serves a disk's queue on the disk's thread.

use event_manager::{EventOps, EventSet, Events};
use virtio_bindings::virtio_blk::VIRTIO_BLK_F_FLUSH;

use super::image::DiskImage;
use super::request::Disk;
use super::ring::Reads;
use crate::devices::virtio::{ActiveQueue, Fate, VirtioWorker};
use crate::ram::GuestRam;
use crate::sync::Ending;

/// Worker that reads by an io_uring, where there is one, and executes other requests one after the other.
#[derive(Debug)]
pub struct BlockWorker {
    memory: GuestRam,
    pub(super) disk: Disk,
    /// Reads under way; `None` if reads are executed one after the other as well.
    pub(super) reads: Option<Reads>,
    queue: Option<ActiveQueue>,
}

impl BlockWorker {
    /// Creates a worker for a guest with this RAM. The guest reads the first 20 bytes of `serial`. Requests fail once
    /// `ending` has begun.
    ///
    /// The thread of this call may set up an io_uring. The worker's thread need not.
    pub fn new(memory: GuestRam, image: DiskImage, serial: String, ending: Ending) -> Self {
        Self {
            reads: Reads::of(&image, &memory),
            memory,
            disk: Disk {
                image,
                serial,
                write_through: true,
                ending,
            },
            queue: None,
        }
    }

    /// Returns finished reads, and serves requests, at most as many as the queue's size.
    pub(super) fn serve(&mut self) {
        let Self {
            memory,
            disk,
            reads,
            queue: Some(queue),
        } = self
        else {
            return;
        };
        let mut used = return_reads(reads, disk, memory, queue);
        let mut left_one = false;
        used |= queue.take_while(memory, |chain| {
            let Some(reads) = reads else {
                return Fate::Used(disk.serve(memory, &chain));
            };
            let (head, read) = (chain.head_index(), disk.read_of(memory, &chain));
            if read.is_some() && reads.is_full() {
                left_one = true;
                return Fate::Available;
            }
            if read.is_some_and(|read| reads.queue(head, read)) {
                return Fate::Held;
            }
            // Reads do not wait for a flush that follows them.
            reads.start();
            Fate::Used(disk.serve(memory, &chain))
        });
        if let Some(reads) = reads
            && !reads.start()
        {
            queue.again();
        }
        // Reads from the host's page cache are finished already.
        used |= return_reads(reads, disk, memory, queue);
        if left_one && reads.as_ref().is_some_and(|reads| !reads.is_full()) {
            queue.again();
        }
        if used {
            queue.interrupt(memory);
        }
    }
}

/// Returns the buffers of finished reads to the driver. Returns whether there are any.
fn return_reads(
    reads: &mut Option<Reads>,
    disk: &Disk,
    memory: &GuestRam,
    queue: &mut ActiveQueue,
) -> bool {
    let mut used = false;
    let finished = std::iter::from_fn(|| reads.as_mut()?.finished());
    for (head, read, done) in finished {
        // Bytes that the ring has not read are read anew, so that errors are found and named in one place.
        used |= queue.add_used(memory, head, disk.finish(memory, &read, done));
    }
    used
}

impl VirtioWorker for BlockWorker {
    fn start(&mut self, queues: Vec<ActiveQueue>, features: u64) {
        self.queue = queues.into_iter().next();
        self.disk.write_through = features & 1 << VIRTIO_BLK_F_FLUSH == 0;
    }

    /// Watches the ring, which is readable while a finished read waits. An eventfd would also be signalled for the reads that
    /// are finished as they are started.
    fn watch(&mut self, ops: &mut EventOps<'_>) {
        if let Some(reads) = &self.reads
            && let Err(error) = ops.add(Events::new_raw(reads.descriptor(), EventSet::IN))
        {
            tracing::error!(%error, "a disk cannot wait for its reads, which take turns");
            self.reads = None;
        }
    }

    fn queue_ready(&mut self, _: usize, _: &mut EventOps<'_>) {
        self.serve();
    }

    fn descriptor_ready(&mut self, _: Events, _: &mut EventOps<'_>) {
        self.serve();
    }

    fn settle(&mut self) {
        let Self {
            memory,
            disk,
            reads,
            queue: Some(queue),
        } = self
        else {
            return;
        };
        let mut used = false;
        while let Some(under_way) = reads.as_mut().filter(|reads| !reads.is_empty()) {
            under_way.wait();
            used |= return_reads(reads, disk, memory, queue);
            // Buffers may wait for the place of these.
            queue.again();
        }
        if used {
            queue.interrupt(memory);
        }
    }

    fn stop(&mut self) {
        self.queue = None;
        if let Some(reads) = &mut self.reads {
            reads.abandon();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::super::device::{MAX_RANGE_SECTORS, MAX_SEGMENT_BYTES, QUEUE_SIZE};
    use super::super::image::{DiskAccess, SECTOR};
    use super::super::request::{Header, Range};
    use super::*;
    use crate::devices::virtio::test_queue::{BUFFERS, Entry, NEXT, RAM, TestQueue, WRITE};
    use proptest::prelude::*;
    use virtio_bindings::virtio_blk::{
        VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN,
        VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
    };
    use zerocopy::IntoBytes;

    const SECTORS: u64 = 2048;
    const HEADER: u64 = BUFFERS;
    const DATA: u64 = BUFFERS + 0x1000;
    const STATUS: u64 = 0x8000;
    /// Status bytes, and a value that no device writes.
    const OK: u8 = 0;
    const IOERR: u8 = 1;
    const UNSUPP: u8 = 2;
    const UNTOUCHED: u8 = 0xee;

    struct Guest {
        queue: TestQueue,
        worker: BlockWorker,
        file: File,
        offered: u16,
    }

    fn guest(access: DiskAccess) -> Guest {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        guest_of(file, access)
    }

    fn guest_of(file: tempfile::NamedTempFile, access: DiskAccess) -> Guest {
        file.as_file().set_len(SECTORS * SECTOR).expect("room");
        let image = DiskImage::open(file.path(), access).expect("an image");
        let queue = TestQueue::new(QUEUE_SIZE);
        let (memory, serial) = (queue.memory.clone(), "disk-0".to_owned());
        let mut worker = BlockWorker::new(memory, image, serial, Ending::default());
        worker.start(vec![queue.active()], 1 << VIRTIO_BLK_F_FLUSH);
        Guest {
            queue,
            worker,
            file: file.into_file(),
            offered: 0,
        }
    }

    impl Guest {
        /// Offers a request with these data descriptors and returns its status byte and used length.
        fn request(&mut self, kind: u32, sector: u64, data: &[Entry]) -> (u8, u32) {
            let header = Header {
                kind: kind.into(),
                reserved: 0.into(),
                sector: sector.into(),
            };
            self.queue.write_bytes(HEADER, header.as_bytes());
            self.queue.write(STATUS, UNTOUCHED);
            let mut table = vec![(HEADER, 16, NEXT, 1)];
            for (slot, (address, len, flags, _)) in (2u16..).zip(data.iter().copied()) {
                table.push((address, len, flags | NEXT, slot));
            }
            table.push((STATUS, 1, WRITE, 0));
            self.chain(&table);
            let len = *self.queue.lengths().last().expect("a used buffer");
            (self.queue.bytes(STATUS, 1)[0], len)
        }

        fn chain(&mut self, table: &[Entry]) {
            self.offered += 1;
            let heads = vec![0; usize::from(QUEUE_SIZE)];
            self.queue.offer(table, &heads, self.offered);
            self.worker.serve();
            self.worker.settle();
            assert_eq!(self.queue.used(), self.offered);
        }

        fn in_file(&self, sector: u64, len: usize) -> Vec<u8> {
            let mut bytes = vec![0; len];
            self.file
                .read_exact_at(&mut bytes, sector * SECTOR)
                .expect("the file");
            bytes
        }

        fn ranges(&mut self, kind: u32, ranges: &[Range]) -> u8 {
            self.queue.write_bytes(DATA, ranges.as_bytes());
            let len = u32::try_from(size_of_val(ranges)).expect("few");
            self.request(kind, 0, &[(DATA, len, 0, 0)]).0
        }
    }

    fn range(sector: u64, sectors: u32, flags: u32) -> Range {
        Range {
            sector: sector.into(),
            sectors: sectors.into(),
            flags: flags.into(),
        }
    }

    fn pattern(seed: u8, len: usize) -> Vec<u8> {
        (0..len)
            .map(|at| seed.wrapping_mul(31).wrapping_add(at.to_le_bytes()[0]))
            .collect()
    }

    #[test]
    fn written_sectors_lie_in_the_file_and_are_read_back() {
        written_sectors_are_read_back(guest(DiskAccess::ReadWrite));
    }

    #[test]
    fn written_sectors_are_read_back_without_an_io_uring() {
        let mut guest = guest(DiskAccess::ReadWrite);
        guest.worker.reads = None;
        written_sectors_are_read_back(guest);
    }

    fn written_sectors_are_read_back(mut guest: Guest) {
        let bytes = pattern(3, 1536);
        guest.queue.write_bytes(DATA, &bytes);
        // Two descriptors, neither with a whole number of sectors.
        let data = [(DATA, 1000, 0, 0), (DATA + 1000, 536, 0, 0)];
        assert_eq!(guest.request(VIRTIO_BLK_T_OUT, 5, &data), (OK, 1));
        assert_eq!(guest.in_file(5, 1536), bytes);
        let data = [
            (DATA + 0x2000, 24, WRITE, 0),
            (DATA + 0x3000, 1512, WRITE, 0),
        ];
        assert_eq!(guest.request(VIRTIO_BLK_T_IN, 5, &data), (OK, 1537));
        let read = [
            guest.queue.bytes(DATA + 0x2000, 24),
            guest.queue.bytes(DATA + 0x3000, 1512),
        ];
        assert_eq!(read.concat(), bytes);
        assert_eq!(guest.queue.interrupts(), 2);
    }

    #[test]
    fn header_data_and_status_may_share_descriptors() {
        let mut guest = guest(DiskAccess::ReadWrite);
        let header = Header {
            kind: VIRTIO_BLK_T_OUT.into(),
            reserved: 0.into(),
            sector: 9.into(),
        };
        let bytes = pattern(7, 512);
        guest.queue.write_bytes(HEADER, header.as_bytes());
        guest.queue.write_bytes(HEADER + 16, &bytes);
        guest.chain(&[(HEADER, 16 + 512, NEXT, 1), (STATUS, 1, WRITE, 0)]);
        assert_eq!(guest.in_file(9, 512), bytes);
        let header = Header {
            kind: VIRTIO_BLK_T_IN.into(),
            ..header
        };
        guest.queue.write_bytes(HEADER, header.as_bytes());
        guest.queue.write(DATA + 512, UNTOUCHED);
        guest.chain(&[(HEADER, 16, NEXT, 1), (DATA, 513, WRITE, 0)]);
        assert_eq!(guest.queue.bytes(DATA, 512), bytes);
        assert_eq!(guest.queue.bytes(DATA + 512, 1), [OK]);
    }

    #[test]
    fn transfers_beyond_the_disk_or_the_limits_are_errors_and_move_nothing() {
        let mut guest = guest(DiskAccess::ReadWrite);
        guest.queue.write_bytes(DATA, &[0xff; 1024]);
        for (sector, len) in [
            (SECTORS, 512),
            (SECTORS - 1, 1024),
            (u64::MAX, 512),
            (u64::MAX / SECTOR + 1, 512),
            (0, 0),
            (0, 511),
            (0, 513),
            (0, MAX_SEGMENT_BYTES + 512),
        ] {
            let out = guest.request(VIRTIO_BLK_T_OUT, sector, &[(DATA, len, 0, 0)]);
            assert_eq!(out, (IOERR, 1), "sector {sector}, {len} bytes");
            let read = guest.request(VIRTIO_BLK_T_IN, sector, &[(DATA, len, WRITE, 0)]);
            let written = u32::from(len == 0);
            assert_eq!(read, (IOERR, written), "sector {sector}, {len} bytes");
        }
        let all = guest.in_file(0, 2048 * 512);
        assert!(all.iter().all(|byte| *byte == 0));
        assert_eq!(guest.queue.bytes(DATA, 1024), [0xff; 1024]);
    }

    #[test]
    fn a_read_only_disk_takes_nothing() {
        let mut guest = guest(DiskAccess::ReadOnly);
        guest.queue.write_bytes(DATA, &[0xff; 512]);
        let data = [(DATA, 512, 0, 0)];
        assert_eq!(guest.request(VIRTIO_BLK_T_OUT, 0, &data).0, IOERR);
        for kind in [VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES] {
            assert_eq!(guest.ranges(kind, &[range(0, 1, 0)]), IOERR);
        }
        let data = [(DATA, 512, WRITE, 0)];
        assert_eq!(guest.request(VIRTIO_BLK_T_IN, 0, &data), (OK, 513));
        assert_eq!(guest.queue.bytes(DATA, 512), [0; 512]);
    }

    #[test]
    fn discarded_and_zeroed_ranges_read_as_zeros() {
        let mut guest = guest(DiskAccess::ReadWrite);
        let full = vec![0xff; 2048 * 512];
        guest.file.write_all_at(&full, 0).expect("room");
        let blocks = guest.file.metadata().expect("a file").blocks();
        let ranges = [range(8, 8, 0), range(1024, 512, 0)];
        assert_eq!(guest.ranges(VIRTIO_BLK_T_DISCARD, &ranges), OK);
        assert!(guest.file.metadata().expect("a file").blocks() < blocks);
        for (flags, sector) in [(0, 64), (1, 128)] {
            let zeroed = guest.ranges(VIRTIO_BLK_T_WRITE_ZEROES, &[range(sector, 8, flags)]);
            assert_eq!(zeroed, OK);
        }
        for (sector, sectors) in [(8, 8), (1024, 512), (64, 8), (128, 8)] {
            let bytes = guest.in_file(sector, sectors * 512);
            assert!(bytes.iter().all(|byte| *byte == 0), "sector {sector}");
            for beside in [sector - 1, sector + sectors as u64] {
                assert_eq!(guest.in_file(beside, 512), [0xff; 512]);
            }
        }
        let len = guest.file.metadata().expect("a file").len();
        assert_eq!(len, SECTORS * SECTOR);
    }

    #[test]
    fn storage_that_deallocates_nothing_keeps_discarded_ranges_and_zeroes_unmapped_ones() {
        const TEST: &str = "devices::block::worker::tests::storage_that_deallocates_nothing_keeps_discarded_ranges_and_zeroes_unmapped_ones";
        const FOLDER: &str = "WORMHOLE_TEST_RAMFS";
        const NOT_MOUNTED: i32 = 77;
        let Some(folder) = std::env::var_os(FOLDER) else {
            // ramfs has no fallocate operation, unlike tmpfs.
            let folder = tempfile::tempdir().expect("a folder");
            let script =
                format!("mount -t ramfs none \"${FOLDER}\" || exit {NOT_MOUNTED}; exec \"$@\"");
            let ended = std::process::Command::new("unshare")
                .args([
                    "--user",
                    "--map-root-user",
                    "--mount",
                    "sh",
                    "-c",
                    &script,
                    "sh",
                ])
                .arg(std::env::current_exe().expect("this program"))
                .args(["--exact", TEST, "--nocapture"])
                .env(FOLDER, folder.path())
                .output()
                .expect("unshare(1) starts");
            match ended.status.code() {
                Some(0) => {}
                // unshare(1) itself ends with 1, and a test that fails with 101.
                Some(1 | NOT_MOUNTED) => {
                    eprintln!("skipped: this user mounts no ramfs");
                }
                _ => panic!("{}", String::from_utf8_lossy(&ended.stderr)),
            }
            return;
        };
        let file = tempfile::NamedTempFile::new_in(folder).expect("a file");
        let mut guest = guest_of(file, DiskAccess::ReadWrite);
        guest.file.write_all_at(&[0xff; 6 * 512], 0).expect("room");
        let discarded = guest.ranges(VIRTIO_BLK_T_DISCARD, &[range(0, 6, 0)]);
        assert_eq!(discarded, OK);
        assert_eq!(guest.in_file(0, 6 * 512), [0xff; 6 * 512]);
        let ranges = [range(1, 1, 1), range(3, 2, 1)];
        assert_eq!(guest.ranges(VIRTIO_BLK_T_WRITE_ZEROES, &ranges), OK);
        let sectors = guest.in_file(0, 6 * 512);
        let sectors = sectors.chunks(512).map(|sector| {
            assert!(sector.iter().all(|byte| *byte == sector[0]));
            sector[0]
        });
        assert_eq!(Vec::from_iter(sectors), [0xff, 0, 0xff, 0, 0, 0xff]);
    }

    #[test]
    fn a_guest_that_ends_has_nothing_done_any_more() {
        let mut guest = guest(DiskAccess::ReadWrite);
        guest.file.write_all_at(&[0xff; 4096], 0).expect("room");
        guest.worker.disk.ending.begin();
        for kind in [VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES] {
            assert_eq!(guest.ranges(kind, &[range(0, 8, 0)]), IOERR);
        }
        guest.queue.write_bytes(DATA, &[1; 512]);
        let written = guest.request(VIRTIO_BLK_T_OUT, 0, &[(DATA, 512, 0, 0)]);
        assert_eq!(written, (IOERR, 1));
        assert_eq!(guest.in_file(0, 4096), [0xff; 4096]);
    }

    #[test]
    fn impossible_ranges_are_refused() {
        let mut guest = guest(DiskAccess::ReadWrite);
        guest.file.write_all_at(&[0xff; 4096], 0).expect("room");
        for kind in [VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES] {
            for refused in [
                range(SECTORS, 1, 0),
                range(0, MAX_RANGE_SECTORS + 1, 0),
                range(u64::MAX, 2, 0),
            ] {
                assert_eq!(guest.ranges(kind, &[refused]), IOERR);
            }
            assert_eq!(guest.ranges(kind, &[range(0, 1, 2)]), UNSUPP);
            assert_eq!(guest.ranges(kind, &[range(0, 1, 0); 33]), IOERR);
            assert_eq!(guest.ranges(kind, &[]), IOERR);
            assert_eq!(guest.request(kind, 0, &[(DATA, 17, 0, 0)]).0, IOERR);
        }
        // A discard supports no flags.
        assert_eq!(
            guest.ranges(VIRTIO_BLK_T_DISCARD, &[range(0, 1, 1)]),
            UNSUPP
        );
        // Unknown flags are refused wherever they stand, before anything is done.
        for (kind, unknown) in [(VIRTIO_BLK_T_DISCARD, 1), (VIRTIO_BLK_T_WRITE_ZEROES, 4)] {
            for refused in [range(0, 0, unknown), range(SECTORS, 1, unknown)] {
                let ranges = [range(0, 8, 0), refused];
                assert_eq!(guest.ranges(kind, &ranges), UNSUPP);
            }
            let ranges = [range(0, 8, 0), range(SECTORS, 1, 0)];
            assert_eq!(guest.ranges(kind, &ranges), IOERR);
        }
        assert_eq!(guest.in_file(0, 4096), [0xff; 4096]);
    }

    #[test]
    fn flushes_names_and_unknown_requests_are_answered() {
        let mut guest = guest(DiskAccess::ReadWrite);
        assert_eq!(guest.request(VIRTIO_BLK_T_FLUSH, 0, &[]), (OK, 1));
        let id = guest.request(VIRTIO_BLK_T_GET_ID, 0, &[(DATA, 20, WRITE, 0)]);
        assert_eq!(id, (OK, 21));
        assert_eq!(guest.queue.bytes(DATA, 8), *b"disk-0\0\0");
        let id = guest.request(VIRTIO_BLK_T_GET_ID, 0, &[(DATA, 19, WRITE, 0)]);
        assert_eq!(id, (IOERR, 0));
        for kind in [2, 14, 99, u32::MAX] {
            assert_eq!(guest.request(kind, 0, &[]), (UNSUPP, 1));
        }
    }

    #[test]
    fn no_more_bytes_are_reported_than_were_written() {
        let mut guest = guest(DiskAccess::ReadWrite);
        guest.queue.write_bytes(DATA, &[UNTOUCHED; 64]);
        // The status lies behind bytes that the device leaves alone.
        let id = guest.request(VIRTIO_BLK_T_GET_ID, 0, &[(DATA, 64, WRITE, 0)]);
        assert_eq!(id, (OK, 20));
        assert_eq!(guest.queue.bytes(DATA + 20, 44), [UNTOUCHED; 44]);
        for kind in [VIRTIO_BLK_T_FLUSH, 99] {
            let status = if kind == 99 { UNSUPP } else { OK };
            let done = guest.request(kind, 0, &[(DATA, 64, WRITE, 0)]);
            assert_eq!(done, (status, 0));
        }
    }

    #[test]
    fn requests_without_a_header_or_a_status_come_back() {
        let mut guest = guest(DiskAccess::ReadWrite);
        guest.chain(&[(HEADER, 15, NEXT, 1), (STATUS, 1, WRITE, 0)]);
        assert_eq!(guest.queue.bytes(STATUS, 1), [IOERR]);
        guest.chain(&[(HEADER, 16, 0, 0)]);
        guest.chain(&[(HEADER, 16, NEXT, 1), (RAM as u64, 1, WRITE, 0)]);
        assert_eq!(guest.queue.lengths(), [1, 0, 0]);
    }

    #[test]
    fn requests_with_data_outside_of_ram_fail_and_the_queue_goes_on() {
        data_outside_of_ram_fails(guest(DiskAccess::ReadWrite));
    }

    #[test]
    fn requests_with_data_outside_of_ram_fail_without_an_io_uring() {
        let mut guest = guest(DiskAccess::ReadWrite);
        guest.worker.reads = None;
        data_outside_of_ram_fails(guest);
    }

    fn data_outside_of_ram_fails(mut guest: Guest) {
        let full = pattern(5, 4096);
        guest.file.write_all_at(&full, 0).expect("room");
        guest.queue.write_bytes(DATA, &[UNTOUCHED; 512]);
        let kinds = [
            (VIRTIO_BLK_T_IN, WRITE),
            (VIRTIO_BLK_T_OUT, 0),
            (VIRTIO_BLK_T_DISCARD, 0),
            (VIRTIO_BLK_T_WRITE_ZEROES, 0),
            (VIRTIO_BLK_T_FLUSH, 0),
            (VIRTIO_BLK_T_FLUSH, WRITE),
            (VIRTIO_BLK_T_GET_ID, WRITE),
            (99, WRITE),
        ];
        // Far from RAM, at its end, across its end, and where addresses end.
        let ram = RAM as u64;
        for outside in [1 << 40, ram, ram - 256, u64::MAX - 255] {
            for (kind, flags) in kinds {
                let outside = (outside, 512, flags, 0);
                let inside = (DATA, 512, flags, 0);
                let chains = [vec![outside], vec![inside, outside], vec![outside, inside]];
                for data in chains {
                    let done = guest.request(kind, 0, &data);
                    // The status is the first byte that the device writes where it may write no data.
                    let written = u32::from(flags == 0);
                    assert_eq!(done, (IOERR, written), "request {kind}, {data:x?}");
                }
            }
        }
        assert_eq!(guest.in_file(0, 4096), full);
        assert_eq!(guest.queue.bytes(DATA, 512), [UNTOUCHED; 512]);
        let read = guest.request(VIRTIO_BLK_T_IN, 0, &[(DATA, 512, WRITE, 0)]);
        assert_eq!(read, (OK, 513));
        assert_eq!(guest.queue.bytes(DATA, 512), full[..512]);
    }

    #[test]
    fn a_driver_that_sends_no_flushes_gets_durable_writes() {
        let mut guest = guest(DiskAccess::ReadWrite);
        assert!(!guest.worker.disk.write_through);
        guest.worker.start(vec![guest.queue.active()], 0);
        assert!(guest.worker.disk.write_through);
        guest.queue.write_bytes(DATA, &[1; 512]);
        let written = guest.request(VIRTIO_BLK_T_OUT, 0, &[(DATA, 512, 0, 0)]);
        assert_eq!(written, (OK, 1));
        assert_eq!(guest.in_file(0, 512), [1; 512]);
    }

    #[test]
    fn a_reset_ends_the_use_of_the_queue() {
        let mut guest = guest(DiskAccess::ReadWrite);
        guest.worker.stop();
        let table = [(HEADER, 16, NEXT, 1), (STATUS, 1, WRITE, 0)];
        guest.queue.offer(&table, &[0], 1);
        guest.worker.serve();
        assert_eq!((guest.queue.used(), guest.queue.interrupts()), (0, 0));
    }

    proptest! {
        /// Arbitrary queue contents and headers cause no panic, no hang and no write outside the descriptors' buffers.
        #[test]
        fn hostile_requests_are_survived(
            table in proptest::collection::vec((0u64..RAM as u64 + 0x2_0000, 0u32..0x2_0000, 0u16..8, 0u16..20), 1..17),
            heads in proptest::collection::vec(0u16..20, 0..17),
            available in 0u16..40,
            kind in prop_oneof![0u32..16, any::<u32>()],
            sector in prop_oneof![0u64..SECTORS + 8, any::<u64>()],
            has_ring in any::<bool>(),
        ) {
            const GUARD: std::ops::Range<u64> = 0x8000..0x9000;
            let mut guest = guest(DiskAccess::ReadWrite);
            if !has_ring {
                guest.worker.reads = None;
            }
            let header = Header { kind: kind.into(), reserved: 0.into(), sector: sector.into() };
            guest.queue.write_bytes(HEADER, header.as_bytes());
            // The first descriptor is the header. No descriptor covers the table or the rings.
            let mut table: Vec<Entry> = table
                .into_iter()
                .map(|(address, len, flags, next)| {
                    (if address < BUFFERS { address + BUFFERS } else { address }, len, flags, next)
                })
                .collect();
            table[0] = (HEADER, 16, NEXT, 1);
            guest.queue.offer(&table, &heads, available);
            for _ in 0..4 {
                guest.worker.serve();
                guest.worker.settle();
            }
            prop_assert!(guest.queue.used() <= available);
            prop_assert_eq!(guest.queue.bytes(GUARD.start, 0x1000), vec![0; 0x1000]);
            prop_assert_eq!(guest.file.metadata().expect("a file").len(), SECTORS * SECTOR);
        }
    }
}
