//! Moves frames between the queues and the host's end, on the interface's thread.

use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd};

use event_manager::{EventOps, EventSet, Events};
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4,
    VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_HDR_F_DATA_VALID,
    VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_ECN, VIRTIO_NET_HDR_GSO_NONE,
    VIRTIO_NET_HDR_GSO_TCPV4, VIRTIO_NET_HDR_GSO_TCPV6,
};
use vm_memory::VolatileSlice;

use super::device::{HEADER_LEN, MAX_FRAME};
use super::frame::GuestFrame;
use super::host_end::HostEnd;
use crate::devices::virtio::{ActiveQueue, VirtioWorker, append_slices};
use crate::ram::GuestRam;

/// Index of the transmit queue; the receive queue has index 0.
const TRANSMIT: usize = 1;
/// Offset of `flags` in the header.
const FLAGS: usize = 0;
/// Offset of `gso_type` in the header.
const GSO_TYPE: usize = 1;
/// Offset of `num_buffers` in the header.
const NUM_BUFFERS: usize = 10;

/// Edge-triggered, so that a frame that waits for the guest's buffers does not keep the loop awake.
const ARRIVALS: EventSet = EventSet::IN.union(EventSet::EDGE_TRIGGERED);

#[derive(Debug)]
struct Active {
    receive: ActiveQueue,
    transmit: ActiveQueue,
    features: u64,
    /// Whether the event loop also waits until the host's end can be written.
    waits_to_send: bool,
    /// Whether the driver of the receive queue need not notify of further buffers.
    is_quiet: bool,
}

/// Serves the two queues of an interface.
#[derive(Debug)]
pub struct NetWorker {
    memory: GuestRam,
    end: Box<dyn HostEnd>,
    active: Option<Active>,
    /// Frame from the host.
    received: Box<[u8]>,
    /// Bytes of `received` that wait for the guest's buffers; 0 if no frame waits.
    waiting: usize,
}

/// State of a frame after an attempt to write it to the guest.
#[derive(Debug, PartialEq, Eq)]
enum Delivery {
    /// The guest has it, or no buffer could ever hold it.
    Done,
    /// The guest has to provide more buffers first.
    Waits,
}

impl NetWorker {
    /// Creates a worker without queues.
    pub fn new(memory: GuestRam, end: Box<dyn HostEnd>) -> Self {
        Self {
            memory,
            end,
            active: None,
            received: vec![0; MAX_FRAME].into(),
            waiting: 0,
        }
    }

    /// Moves frames from the host to the guest, at most as many as the queue's size.
    fn receive(&mut self) {
        let Some(active) = &mut self.active else {
            return;
        };
        let queue = &mut active.receive;
        let merges = active.features & 1 << VIRTIO_NET_F_MRG_RXBUF != 0;
        let mut used = false;
        let mut left = queue.size();
        loop {
            if self.waiting == 0 {
                if left == 0 {
                    queue.again();
                    break;
                }
                left -= 1;
                match self.end.receive(&mut self.received) {
                    Ok(len) if len > HEADER_LEN => {
                        if !admit(&mut self.received[..HEADER_LEN], active.features) {
                            continue;
                        }
                        self.waiting = len;
                    }
                    // Too short for a frame.
                    Ok(1..) => continue,
                    // The process behind the interface is gone.
                    Ok(0) => break,
                    Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                    Err(error) => {
                        if error.kind() != ErrorKind::WouldBlock {
                            tracing::debug!(%error, "the network of a guest cannot be read");
                        }
                        break;
                    }
                }
            }
            let frame = &mut self.received[..self.waiting];
            let mut delivered = deliver(&self.memory, queue, merges, frame, &mut used);
            if delivered == Delivery::Waits {
                // The driver may have added buffers before it saw this.
                queue.await_notifications(&self.memory);
                active.is_quiet = false;
                delivered = deliver(&self.memory, queue, merges, frame, &mut used);
            }
            if delivered == Delivery::Waits {
                break;
            }
            self.waiting = 0;
            if !active.is_quiet {
                queue.suppress_notifications(&self.memory);
                active.is_quiet = true;
            }
        }
        if used {
            queue.interrupt(&self.memory);
        }
    }

    /// Moves frames from the guest to the host, at most as many as the queue's size, as long as the host takes them.
    fn transmit(&mut self) {
        let Some(active) = &mut self.active else {
            return;
        };
        active.transmit.serve_while(&self.memory, |chain| {
            if self.end.is_blocked() {
                return None;
            }
            if let Some(frame) = GuestFrame::of(&self.memory, chain)
                && let Err(error) = self.end.send(&frame)
            {
                // Networks may drop frames; the host's stack drops those that it cannot parse.
                tracing::debug!(%error, "a frame of a guest is dropped");
            }
            Some(0)
        });
    }

    /// Waits until the host's end can be written while it is blocked, and only then.
    fn watch_sending(&mut self, ops: &mut EventOps<'_>) {
        let Some(active) = &mut self.active else {
            return;
        };
        let is_blocked = self.end.is_blocked();
        if active.waits_to_send == is_blocked {
            return;
        }
        active.waits_to_send = is_blocked;
        let events = match is_blocked {
            true => ARRIVALS | EventSet::OUT,
            false => ARRIVALS,
        };
        if let Err(error) = ops.modify(Events::new(&self.end.as_fd(), events)) {
            tracing::error!(%error, "a network device cannot wait until it can send");
        }
    }
}

impl VirtioWorker for NetWorker {
    fn start(&mut self, queues: Vec<ActiveQueue>, features: u64) {
        let mut queues = queues.into_iter();
        self.waiting = 0;
        self.active = queues
            .next()
            .zip(queues.next())
            .map(|(receive, transmit)| Active {
                receive,
                transmit,
                features,
                waits_to_send: false,
                is_quiet: false,
            });
    }

    /// Starts the host's end and watches it.
    fn watch(&mut self, ops: &mut EventOps<'_>) {
        let Some(active) = &self.active else {
            return;
        };
        if let Err(error) = self.end.start(active.features) {
            tracing::warn!(%error, "a tap interface refuses the driver's offloads");
        }
        if let Err(error) = ops.add(Events::new(&self.end.as_fd(), ARRIVALS)) {
            tracing::error!(%error, "a network device cannot wait for frames");
        }
    }

    fn queue_ready(&mut self, queue: usize, ops: &mut EventOps<'_>) {
        match queue {
            TRANSMIT => self.transmit(),
            _ => self.receive(),
        }
        self.watch_sending(ops);
    }

    fn descriptor_ready(&mut self, events: Events, ops: &mut EventOps<'_>) {
        if events.fd() != self.end.as_fd().as_raw_fd() {
            return;
        }
        self.receive();
        if events.event_set().contains(EventSet::OUT) {
            self.transmit();
            self.watch_sending(ops);
        }
    }

    fn stop(&mut self) {
        self.active = None;
        self.waiting = 0;
    }

    fn finish(&mut self) {
        self.transmit();
        self.stop();
    }
}

/// Removes from a frame's header what the driver did not negotiate. Returns whether the driver can take the frame then:
/// the tap can still have frames from before its offloads were set.
fn admit(header: &mut [u8], features: u64) -> bool {
    let has = |feature: u32| features & 1 << feature != 0;
    let (flags, kind) = (u32::from(header[FLAGS]), u32::from(header[GSO_TYPE]));
    let known = match has(VIRTIO_NET_F_GUEST_CSUM) {
        true => VIRTIO_NET_HDR_F_NEEDS_CSUM | VIRTIO_NET_HDR_F_DATA_VALID,
        false => 0,
    };
    let is_whole = match kind & !VIRTIO_NET_HDR_GSO_ECN {
        VIRTIO_NET_HDR_GSO_NONE => true,
        VIRTIO_NET_HDR_GSO_TCPV4 => has(VIRTIO_NET_F_GUEST_TSO4),
        VIRTIO_NET_HDR_GSO_TCPV6 => has(VIRTIO_NET_F_GUEST_TSO6),
        _ => false,
    };
    let has_ecn = kind & VIRTIO_NET_HDR_GSO_ECN != 0;
    let lacks_checksum = flags & VIRTIO_NET_HDR_F_NEEDS_CSUM & !known != 0;
    if lacks_checksum || !is_whole || has_ecn && !has(VIRTIO_NET_F_GUEST_ECN) {
        tracing::debug!(
            flags,
            kind,
            "a frame needs work that a guest's driver does not do, and is dropped"
        );
        return false;
    }
    header[FLAGS] &= known.to_le_bytes()[0];
    true
}

/// Writes a frame to buffers of the receive queue: to one, or to as many as it needs if the driver merges buffers. Sets
/// `used` if a buffer was used.
fn deliver(
    memory: &GuestRam,
    queue: &mut ActiveQueue,
    merges: bool,
    frame: &mut [u8],
    used: &mut bool,
) -> Delivery {
    let most = if merges { queue.size() } else { 1 };
    // Head and bytes of each buffer. A buffer without writable memory has no bytes.
    let mut buffers: Vec<(u16, usize)> = Vec::new();
    let mut parts: Vec<VolatileSlice<'_>> = Vec::new();
    let mut bytes = 0;
    while bytes < frame.len() && buffers.len() < usize::from(most) {
        let Some(chain) = queue.pop(memory) else {
            for _ in &buffers {
                queue.undo_pop();
            }
            return Delivery::Waits;
        };
        let (head, before) = (chain.head_index(), parts.len());
        let room = append_slices(memory, chain.writable(), &mut parts).unwrap_or_else(|| {
            parts.truncate(before);
            0
        });
        bytes += room;
        buffers.push((head, room));
    }
    let mut left = frame.len();
    if bytes >= left {
        // At most the queue's size.
        let count = u16::try_from(buffers.len()).unwrap_or(u16::MAX);
        frame[NUM_BUFFERS..HEADER_LEN].copy_from_slice(&count.to_le_bytes());
        let mut rest = &*frame;
        for part in parts {
            let (now, later) = rest.split_at(part.len().min(rest.len()));
            part.copy_from(now);
            rest = later;
        }
    } else {
        tracing::debug!("a guest's buffers are too small for a frame, which is dropped");
        left = 0;
    }
    let fill = |(head, room): (u16, usize)| {
        let written = room.min(left);
        left -= written;
        (head, u32::try_from(written).unwrap_or(0))
    };
    let filled: Vec<_> = buffers.into_iter().map(fill).collect();
    // A driver that sees the frame's first buffer looks for the others at once.
    *used |= queue.add_used_together(memory, &filled);
    Delivery::Done
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicBool, Ordering};

    use proptest::prelude::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use vm_memory::Bytes;

    use super::super::device::QUEUE_SIZE;
    use super::super::{FrameStream, Tap};
    use std::io::{Read, Write};

    use super::*;
    use crate::device_thread::DeviceThread;
    use crate::devices::virtio::ServerHandle;
    use crate::devices::virtio::test_queue::{BUFFERS, Entry, NEXT, TestQueue, WRITE, hostile};

    const MERGES: u64 = 1 << VIRTIO_NET_F_MRG_RXBUF;

    /// A guest, and the socket that stands for its tap.
    struct Guest {
        queue: TestQueue,
        worker: NetWorker,
        host: std::fs::File,
    }

    /// Creates a guest. The test queue is the receive queue or the transmit queue, as the test uses it.
    fn guest(features: u64) -> Guest {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (tap, host): (OwnedFd, OwnedFd) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("sockets");
        let queue = TestQueue::new(QUEUE_SIZE);
        let tap = Tap::from_socket(tap).expect("a socket");
        let mut worker = NetWorker::new(queue.memory.clone(), Box::new(tap));
        worker.start(vec![queue.active(), queue.active()], features);
        Guest {
            queue,
            worker,
            host: host.into(),
        }
    }

    /// Returns a frame of this many bytes, its header included.
    fn frame(len: usize, seed: u8) -> Vec<u8> {
        let bytes = (0..len).map(|at| at.to_le_bytes()[0].wrapping_mul(37).wrapping_add(seed));
        let mut frame: Vec<u8> = bytes.collect();
        frame[..=GSO_TYPE].fill(0);
        frame[NUM_BUFFERS..HEADER_LEN].fill(0);
        frame
    }

    /// Returns the frame as the guest gets it in this many buffers.
    fn in_buffers(mut frame: Vec<u8>, count: u8) -> Vec<u8> {
        frame[NUM_BUFFERS] = count;
        frame
    }

    impl Guest {
        fn arrives(&mut self, frame: &[u8]) {
            self.host.write_all(frame).expect("room in the socket");
            self.worker.receive();
        }

        /// Returns the frames that the host has got.
        fn sent(&mut self) -> Vec<Vec<u8>> {
            let mut frames = Vec::new();
            let mut bytes = vec![0; MAX_FRAME];
            while let Ok(len) = self.host.read(&mut bytes) {
                frames.push(bytes[..len].to_vec());
            }
            frames
        }
    }

    #[test]
    fn a_frame_arrives_in_one_buffer_and_is_announced() {
        let mut guest = guest(0);
        let table = [
            (BUFFERS, 12, WRITE | NEXT, 1),
            (BUFFERS + 12, 1600, WRITE, 0),
        ];
        guest.queue.offer(&table, &[0], 1);
        let frame = frame(1526, 1);
        guest.arrives(&frame);
        assert_eq!(guest.queue.lengths(), [1526]);
        assert_eq!(guest.queue.bytes(BUFFERS, 1526), in_buffers(frame, 1));
        assert_eq!(guest.queue.interrupts(), 1);
    }

    #[test]
    fn frames_have_the_headers_that_the_driver_negotiated() {
        const NEEDS: u8 = 1;
        const VALID: u8 = 2;
        const COALESCED: u8 = 4;
        let checksums = 1 << VIRTIO_NET_F_GUEST_CSUM;
        let v4 = checksums | 1 << VIRTIO_NET_F_GUEST_TSO4;
        let v6 = checksums | 1 << VIRTIO_NET_F_GUEST_TSO6;
        let ecn = v4 | 1 << VIRTIO_NET_F_GUEST_ECN;
        // Features, flags and segmentation on the tap; flags in the guest, if the frame arrives.
        let cases = [
            (0, VALID, 0, Some(0)),
            (0, COALESCED, 0, Some(0)),
            (0, NEEDS, 0, None),
            (checksums, VALID, 0, Some(VALID)),
            (checksums, NEEDS | COALESCED, 0, Some(NEEDS)),
            (checksums, NEEDS, 1, None),
            (v4, NEEDS, 1, Some(NEEDS)),
            (v4, NEEDS, 4, None),
            (v4, NEEDS, 0x81, None),
            (ecn, NEEDS, 0x81, Some(NEEDS)),
            (v6, NEEDS, 4, Some(NEEDS)),
            (v6, NEEDS, 1, None),
            (v4 | v6, NEEDS, 3, None),
            (v4 | v6, NEEDS, 5, None),
        ];
        for (features, flags, kind, arrives) in cases {
            let mut guest = guest(features);
            guest.queue.offer(&[(BUFFERS, 1600, WRITE, 0)], &[0], 1);
            let mut frame = frame(100, 1);
            frame[FLAGS] = flags;
            frame[GSO_TYPE] = kind;
            guest.arrives(&frame);
            let case = format!("{features:#x} {flags} {kind}");
            assert_eq!(guest.queue.used(), u16::from(arrives.is_some()), "{case}");
            if let Some(flags) = arrives {
                assert_eq!(guest.queue.bytes(BUFFERS, 2), [flags, kind], "{case}");
            }
        }
    }

    #[test]
    fn a_frame_is_spread_over_buffers_that_the_driver_merges() {
        let mut guest = guest(MERGES);
        let table: Vec<Entry> = (0u16..4)
            .map(|slot| (BUFFERS + 0x1000 * u64::from(slot), 600, WRITE, 0))
            .collect();
        guest.queue.offer(&table, &[0, 1, 2, 3], 4);
        let frame = frame(1526, 2);
        guest.arrives(&frame);
        assert_eq!(guest.queue.lengths(), [600, 600, 326]);
        let parts = [(0, 600), (1, 600), (2, 326)];
        let parts = parts.map(|(slot, len)| guest.queue.bytes(BUFFERS + 0x1000 * slot, len));
        assert_eq!(parts.concat(), in_buffers(frame, 3));
    }

    #[test]
    fn a_driver_sees_all_buffers_of_a_frame_at_once() {
        const BUFFERS_OF_FRAME: u16 = 4;
        let mut guest = guest(MERGES);
        let memory = guest.queue.memory.clone();
        let index = guest.queue.used_index();
        let is_over = AtomicBool::new(false);
        let seen = std::thread::scope(|scope| {
            let driver = scope.spawn(|| {
                let mut seen = [0u32; BUFFERS_OF_FRAME as usize];
                while !is_over.load(Ordering::Relaxed) {
                    let used: u16 = memory.load(index, Ordering::Acquire).expect("ram");
                    seen[usize::from(used % BUFFERS_OF_FRAME)] += 1;
                }
                seen
            });
            // Each entry of the available ring is 0, the number of the only buffer.
            guest.queue.offer(&[(BUFFERS, 100, WRITE, 0)], &[], 0);
            for turn in 1..=300u16 {
                let available = turn * BUFFERS_OF_FRAME;
                guest.queue.offer(&[], &[], available);
                guest.arrives(&frame(400, 1));
                assert_eq!(guest.queue.used(), available);
            }
            is_over.store(true, Ordering::Relaxed);
            driver.join().expect("a thread")
        });
        assert_eq!(seen[1..], [0, 0, 0]);
    }

    #[test]
    fn a_frame_with_a_buffer_that_is_none_is_not_announced_in_part() {
        let mut guest = guest(MERGES);
        let table = [(BUFFERS, 600, WRITE, 0), (BUFFERS + 0x1000, 600, WRITE, 0)];
        guest.queue.offer(&table, &[0, QUEUE_SIZE, 1], 3);
        guest.arrives(&frame(1000, 1));
        assert_eq!((guest.queue.used(), guest.queue.interrupts()), (0, 0));
    }

    #[test]
    fn a_frame_waits_until_the_guest_has_buffers_for_it() {
        let mut guest = guest(MERGES);
        let table: Vec<Entry> = (0u16..3)
            .map(|slot| (BUFFERS + 0x1000 * u64::from(slot), 600, WRITE, 0))
            .collect();
        guest.queue.offer(&table, &[0, 1, 2], 2);
        let (first, second) = (frame(1526, 3), frame(60, 4));
        guest.arrives(&first);
        guest.arrives(&second);
        assert_eq!((guest.queue.used(), guest.queue.interrupts()), (0, 0));
        guest.queue.offer(&table, &[0, 1, 2, 0], 4);
        guest.worker.receive();
        assert_eq!(guest.queue.lengths(), [600, 600, 326, 60]);
        // The second frame lies in the first buffer, which the driver offered again.
        assert_eq!(guest.queue.bytes(BUFFERS, 60), in_buffers(second, 1));
    }

    #[test]
    fn a_driver_notifies_of_buffers_while_a_frame_waits_for_them_and_only_then() {
        const QUIET: u16 = 1;
        let mut guest = guest(0);
        let flags = guest.queue.used_index().0 - 2;
        let table = [(BUFFERS, 1600, WRITE, 0)];
        guest.queue.offer(&table, &[0; 4], 2);
        guest.arrives(&frame(60, 1));
        assert_eq!(guest.queue.used_flags(), QUIET);
        // Further frames leave the flags, which the driver reads for each of its buffers, alone.
        guest.queue.write(flags, 0u16);
        guest.arrives(&frame(60, 2));
        assert_eq!((guest.queue.used(), guest.queue.used_flags()), (2, 0));
        guest.queue.write(flags, QUIET);
        guest.arrives(&frame(60, 3));
        assert_eq!((guest.queue.used(), guest.queue.used_flags()), (2, 0));
        guest.queue.offer(&table, &[0; 4], 3);
        guest.worker.receive();
        assert_eq!((guest.queue.used(), guest.queue.used_flags()), (3, QUIET));
    }

    #[test]
    fn a_frame_that_no_buffer_can_hold_is_dropped_and_the_next_one_arrives() {
        for features in [0, MERGES] {
            let mut guest = guest(features);
            let small = [
                (BUFFERS, 100, WRITE, 0),
                (BUFFERS + 0x1000, 0x100, WRITE, 0),
            ];
            // With merging, all buffers of the queue together are too small.
            let mut heads = vec![0; usize::from(QUEUE_SIZE)];
            let dropped = if features == 0 { 1 } else { QUEUE_SIZE };
            heads[usize::from(dropped % QUEUE_SIZE)] = 1;
            guest.queue.offer(&small, &heads, dropped);
            guest.arrives(&frame(30_000, 5));
            assert_eq!(guest.queue.used(), dropped);
            assert!(guest.queue.lengths().iter().all(|len| *len == 0));
            guest.queue.offer(&small, &heads, dropped + 1);
            guest.arrives(&frame(80, 6));
            assert_eq!(guest.queue.used(), dropped + 1);
        }
    }

    #[test]
    fn the_guests_frames_reach_the_host_whole() {
        let mut guest = guest(0);
        let (first, mut second) = (frame(74, 7), frame(MAX_FRAME, 8));
        // Flags that virtio does not define are the host's to ignore.
        second[FLAGS] = 0xf8;
        guest.queue.write_bytes(BUFFERS, &first);
        guest.queue.write_bytes(BUFFERS + 0x1000, &second);
        let len = u32::try_from(MAX_FRAME).expect("a length");
        let table = [
            (BUFFERS, 12, NEXT, 1),
            (BUFFERS + 12, 62, 0, 0),
            (BUFFERS + 0x1000, len, 0, 0),
            // No frame: too short, too long, nothing to read.
            (BUFFERS, 12, 0, 0),
            (BUFFERS, len + 1, 0, 0),
            (BUFFERS, 74, WRITE, 0),
        ];
        guest.queue.offer(&table, &[0, 2, 3, 4, 5], 5);
        guest.worker.transmit();
        assert_eq!(guest.sent(), [first, second]);
        assert_eq!((guest.queue.used(), guest.queue.interrupts()), (5, 1));
    }

    #[test]
    fn frames_outside_of_ram_are_dropped_and_the_queues_go_on() {
        const ELSEWHERE: u64 = 1 << 40;
        let mut guest = guest(0);
        let sent = frame(74, 3);
        guest.queue.write_bytes(BUFFERS, &sent);
        let table = [
            (BUFFERS, 12, NEXT, 1),
            (ELSEWHERE, 62, 0, 0),
            (BUFFERS, 74, 0, 0),
        ];
        guest.queue.offer(&table, &[0, 2], 2);
        guest.worker.transmit();
        assert_eq!((guest.sent(), guest.queue.used()), (vec![sent], 2));

        let mut guest = self::guest(0);
        let table = [(ELSEWHERE, 1600, WRITE, 0), (BUFFERS, 1600, WRITE, 0)];
        guest.queue.offer(&table, &[0, 1], 2);
        guest.arrives(&frame(74, 4));
        guest.arrives(&frame(74, 5));
        assert_eq!(guest.queue.lengths(), [0, 74]);
        let arrived = in_buffers(frame(74, 5), 1);
        assert_eq!(guest.queue.bytes(BUFFERS, 74), arrived);
    }

    #[test]
    fn a_host_that_reads_nothing_blocks_no_guest() {
        let mut guest = guest(0);
        guest.queue.write_bytes(BUFFERS, &frame(60_000, 9));
        let table = [(BUFFERS, 60_000, 0, 0)];
        for turn in 1..=4 {
            let heads = [0; QUEUE_SIZE as usize];
            guest.queue.offer(&table, &heads, turn * 16);
            guest.worker.transmit();
            assert_eq!(guest.queue.used(), turn * 16);
        }
        assert!(guest.sent().len() < 64);
    }

    #[test]
    fn a_process_that_reads_nothing_keeps_the_guests_frames_waiting() {
        const FRAMES: u16 = 16;
        let queue = TestQueue::new(QUEUE_SIZE);
        let (ours, mut process) = UnixStream::pair().expect("sockets");
        let end = FrameStream::new(ours.into(), |_| ()).expect("a socket");
        let mut worker = NetWorker::new(queue.memory.clone(), Box::new(end));
        worker.start(vec![queue.active(), queue.active()], 0);
        let frame = frame(60_000, 9);
        queue.write_bytes(BUFFERS, &frame);
        queue.offer(&[(BUFFERS, 60_000, 0, 0)], &[0; FRAMES as usize], FRAMES);
        worker.transmit();
        let taken = queue.used();
        assert!((1..FRAMES).contains(&taken), "{taken}");
        let mut arrived = Vec::new();
        let mut room = vec![0; frame.len()];
        process.set_nonblocking(true).expect("a socket");
        while let Ok(count) = process.read(&mut room) {
            arrived.extend_from_slice(&room[..count]);
            worker.transmit();
            worker.end.is_blocked();
        }
        assert_eq!(queue.used(), FRAMES);
        let whole = [&59_988u32.to_be_bytes(), &frame[HEADER_LEN..]].concat();
        assert!(
            arrived == whole.repeat(FRAMES.into()),
            "{} bytes",
            arrived.len()
        );
    }

    #[test]
    fn a_thread_that_stands_amid_frames_has_finished_those_that_it_took_and_loses_none() {
        const STEP: u64 = 0x100;
        let Guest {
            queue,
            worker,
            mut host,
        } = guest(0);
        let numbered = |number: u16| {
            let mut frame = frame(100, number.to_le_bytes()[0]);
            frame[HEADER_LEN..][..2].copy_from_slice(&number.to_le_bytes());
            frame
        };
        let in_guest =
            |number: u16| queue.bytes(BUFFERS + STEP * u64::from(number % QUEUE_SIZE), 100);
        let table: Vec<Entry> = (0..QUEUE_SIZE)
            .map(|slot| (BUFFERS + STEP * u64::from(slot), 0x100, WRITE, 0))
            .collect();
        let heads: Vec<u16> = (0..QUEUE_SIZE).collect();
        queue.offer(&table, &heads, QUEUE_SIZE);
        let thread = DeviceThread::start("net-0").expect("a thread");
        let worker = Box::new(worker);
        let mut server = ServerHandle::new(thread.handle(), worker, 2).expect("eventfds");
        let queues = vec![queue.active(), queue.second().active()];
        server.start(queues, 0).expect("the thread is there");
        let mut sent = 0;
        let mut fill_socket = || {
            while host.write(&numbered(sent)).is_ok() {
                sent += 1;
            }
            sent
        };
        fill_socket();
        while queue.used() == 0 {
            std::thread::yield_now();
        }
        let parked = thread.park().expect("the thread is there");
        let used = queue.used();
        assert!((1..=QUEUE_SIZE).contains(&used));
        for number in 0..QUEUE_SIZE {
            let expected = match number < used {
                true => in_buffers(numbered(number), 1),
                false => vec![0; 100],
            };
            assert_eq!(in_guest(number), expected, "frame {number} of {used}");
        }
        let sent = fill_socket();
        assert_eq!(queue.used(), used);
        drop(parked);
        for number in 0..sent {
            while queue.used() == number {
                std::thread::yield_now();
            }
            assert_eq!(in_guest(number), in_buffers(numbered(number), 1));
            queue.offer(&[], &[], QUEUE_SIZE + number + 1);
            server.notify(0);
        }
    }

    #[test]
    fn a_turn_ends_after_a_queue_full_and_is_asked_for_again() {
        let mut guest = guest(0);
        let table = [(BUFFERS, 1600, WRITE, 0)];
        guest
            .queue
            .offer(&table, &[0; QUEUE_SIZE as usize], QUEUE_SIZE);
        let mut arrived = 0;
        while guest.host.write(&frame(60, 1)).is_ok() {
            arrived += 1;
        }
        assert!(arrived > 0);
        guest.worker.receive();
        let most = arrived.min(usize::from(QUEUE_SIZE));
        assert_eq!(usize::from(guest.queue.used()), most);
        assert_eq!(guest.queue.rung(), arrived >= usize::from(QUEUE_SIZE));
    }

    #[test]
    fn a_reset_ends_the_use_of_the_queues() {
        let mut guest = guest(0);
        let table = [(BUFFERS, 1600, WRITE, 0), (BUFFERS + 0x1000, 74, 0, 0)];
        guest.queue.offer(&table, &[0, 1], 2);
        guest.worker.stop();
        guest.arrives(&frame(100, 1));
        guest.worker.transmit();
        assert_eq!((guest.queue.used(), guest.queue.interrupts()), (0, 0));
        assert_eq!(guest.sent(), Vec::<Vec<u8>>::new());
    }

    proptest! {
        /// Arbitrary queue contents cause no panic, no hang and no write outside the descriptors' buffers.
        #[test]
        fn hostile_queues_are_survived(
            hostile in hostile(),
            features in prop_oneof![Just(0), Just(MERGES)],
        ) {
            let mut guest = guest(features);
            guest.queue.offer_hostile(&hostile);
            guest.worker.transmit();
            for len in [60, 1526, 60_000] {
                guest.arrives(&frame(len, 1));
            }
            prop_assert!(guest.queue.guards(&hostile));
        }
    }
}
