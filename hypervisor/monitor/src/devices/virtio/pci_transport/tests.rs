//! Tests the registers of the transport as a driver writes and reads them.

use super::*;
use crate::device_thread::DeviceThread;
use crate::devices::pci::tests::FakeController;
use crate::devices::virtio::VirtioWorker;
use event_manager::EventOps;
use proptest::prelude::*;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use virtio_queue::QueueT;
use vm_memory::{Bytes, GuestAddress};
use wormhole_lock::Mutex;

#[derive(Debug, Default)]
struct Record {
    active: Vec<ActiveQueue>,
    stops: usize,
}

const CONFIG: [u8; 7] = [1, 2, 3, 4, 5, 6, 7];

/// Both halves of a device, which record the calls.
#[derive(Debug, Clone)]
struct Fake {
    record: Arc<Mutex<Record>>,
    notified: Sender<usize>,
}

impl VirtioDevice for Fake {
    fn id(&self) -> u32 {
        19
    }
    fn pci_class(&self) -> [u8; 3] {
        [7, 0x80, 0]
    }
    fn features(&self) -> u64 {
        0b111
    }
    fn accepts(&self, features: u64) -> bool {
        features & 0b110 != 0b100
    }
    fn queue_sizes(&self) -> &[u16] {
        &[64, 32]
    }
    fn config(&self) -> &[u8] {
        &CONFIG
    }
}

impl VirtioWorker for Fake {
    fn start(&mut self, queues: Vec<ActiveQueue>, _: u64) {
        self.record.lock().active = queues;
    }
    fn queue_ready(&mut self, queue: usize, _: &mut EventOps<'_>) {
        // A test that ignores notifications has dropped the receiver.
        let _ = self.notified.send(queue);
    }
    fn stop(&mut self) {
        let mut record = self.record.lock();
        record.active.clear();
        record.stops += 1;
    }
}

/// A transport, the record of its device's calls, and the queues' notifications.
struct Fixture {
    transport: VirtioPci,
    record: Arc<Mutex<Record>>,
    notified: Receiver<usize>,
    memory: GuestRam,
    thread: DeviceThread,
    interrupts: Arc<FakeController>,
}

fn fixture() -> Fixture {
    fixture_on(DeviceThread::start("devices").expect("a thread"))
}

/// Returns the queue of the next notification.
fn next(notified: &Receiver<usize>) -> usize {
    let patience = Duration::from_secs(60);
    notified.recv_timeout(patience).expect("a notification")
}

fn fixture_on(thread: DeviceThread) -> Fixture {
    let memory = crate::ram::test_ram(1 << 20);
    let interrupts = Arc::new(FakeController::default());
    let msix = Msix::new(Arc::clone(&interrupts) as Arc<_>, 3).expect("eventfds");
    let (sender, notified) = channel();
    let device = Fake {
        record: Arc::default(),
        notified: sender,
    };
    let record = Arc::clone(&device.record);
    let worker = Box::new(device.clone());
    let server = ServerHandle::new(thread.handle(), worker, 2).expect("eventfds");
    let device = Box::new(device);
    Fixture {
        transport: VirtioPci::new(device, server, memory.clone(), msix, 0xc000_0000),
        record,
        notified,
        memory,
        thread,
        interrupts,
    }
}

fn write16(transport: &mut VirtioPci, offset: u64, value: u16) {
    transport.write(offset, &value.to_le_bytes());
}

fn write32(transport: &mut VirtioPci, offset: u64, value: u32) {
    transport.write(offset, &value.to_le_bytes());
}

fn read<const N: usize>(transport: &mut VirtioPci, offset: u64) -> [u8; N] {
    let mut data = [0; N];
    transport.read(offset, &mut data);
    data
}

/// Enables MSI-X and unmasks these vectors.
fn unmask(transport: &mut VirtioPci, vectors: &[u64]) {
    transport.write_config(transport.msix_control, &[0x80]);
    for vector in vectors {
        write32(transport, MSIX_TABLE + 16 * vector + 12, 0);
    }
}

/// Initialises the device as Linux does, with the first queue at `first`.
fn initialise(transport: &mut VirtioPci, first: u32) {
    transport.write(0x14, &[0]);
    set_up(transport, first);
    transport.write(0x14, &[3 | STATUS_FEATURES_OK | STATUS_DRIVER_OK]);
}

/// Does all that a driver does after a reset and before DRIVER_OK.
fn set_up(transport: &mut VirtioPci, first: u32) {
    transport.write(0x14, &[3]);
    for select in [0, 1] {
        write32(transport, 0x00, select);
        let features = u32::from_le_bytes(read(transport, 0x04));
        write32(transport, 0x08, select);
        write32(transport, 0x0c, features);
    }
    transport.write(0x14, &[3 | STATUS_FEATURES_OK]);
    for queue in [0u16, 1] {
        write16(transport, 0x16, queue);
        write16(transport, 0x18, 16);
        write16(transport, 0x1a, queue + 1);
        let base = first + 0x1000 * u32::from(queue);
        for (register, offset) in [(0x20, 0), (0x28, 0x400), (0x30, 0x800)] {
            write32(transport, register, base + offset);
            write32(transport, register + 4, 0);
        }
        write16(transport, 0x1c, 1);
    }
}

#[test]
fn a_driver_brings_the_device_up_and_resets_it() {
    let mut fixture = fixture();
    let transport = &mut fixture.transport;
    assert_eq!(u16::from_le_bytes(read(transport, 0x12)), 2);
    initialise(transport, 0x1_0000);
    assert_eq!(read(transport, 0x14), [15]);
    {
        let active = &mut fixture.record.lock().active;
        let shapes = active
            .iter()
            .map(|active| (active.size(), active.vector, active.queue.used_ring()));
        let wanted = [(16, 1, 0x1_0800), (16, 2, 0x1_1800)];
        assert_eq!(shapes.collect::<Vec<_>>(), wanted);
        active[0].interrupt(&fixture.memory);
    }
    assert_eq!(read(transport, ISR), [1]);
    assert_eq!(read(transport, ISR), [0]);
    transport.write(0x14, &[0]);
    assert_eq!(read(transport, 0x14), [0]);
    assert_eq!(fixture.record.lock().stops, 1);
    write16(transport, 0x16, 0);
    assert_eq!(u16::from_le_bytes(read(transport, 0x18)), 64);
    // A second driver finds the device in its initial state.
    initialise(transport, 0x1_0000);
    assert_eq!(fixture.record.lock().active.len(), 2);
}

/// Returns the state of a device that has used three buffers of its second queue, in `memory`.
fn saved_in(memory: &GuestRam) -> VirtioPciState {
    let mut saved = fixture();
    unmask(&mut saved.transport, &[2]);
    initialise(&mut saved.transport, 0x1_0000);
    memory
        .write_obj(3u16.to_le(), GuestAddress(0x1_1802))
        .expect("in RAM");
    saved.transport.save().expect("a state")
}

#[test]
fn a_restored_device_serves_its_queues_from_where_they_were() {
    let mut restored = fixture();
    let state = saved_in(&restored.memory);
    restored.transport.restore(&state).expect("it fits");
    assert!(restored.record.lock().active.is_empty());
    restored.transport.resume().expect("it goes on");
    {
        let active = &restored.record.lock().active;
        let places = active.iter().map(|active| {
            let queue = &active.queue;
            (queue.used_ring(), queue.next_avail(), queue.next_used())
        });
        assert_eq!(
            places.collect::<Vec<_>>(),
            [(0x1_0800, 0, 0), (0x1_1800, 3, 3)]
        );
    }
    // Buffers that the driver has offered before are found without a notification, and an interrupt that was on its way is
    // raised again.
    let mut notified = [next(&restored.notified), next(&restored.notified)];
    notified.sort_unstable();
    assert_eq!(notified, [0, 1]);
    assert_eq!(restored.interrupts.raised(2), 1);
    assert_eq!(read(&mut restored.transport, 0x14), [15]);
    restored.transport.write(0x14, &[0]);
    assert_eq!(restored.record.lock().stops, 1);
}

#[test]
fn a_device_that_no_driver_has_started_stays_so() {
    let mut saved = fixture();
    set_up(&mut saved.transport, 0x1_0000);
    let mut restored = fixture();
    restored
        .transport
        .restore(&saved.transport.save().expect("a state"))
        .expect("it fits");
    restored.transport.resume().expect("there is nothing to do");
    assert!(restored.record.lock().active.is_empty());
    restored
        .transport
        .write(0x14, &[3 | STATUS_FEATURES_OK | STATUS_DRIVER_OK]);
    assert_eq!(restored.record.lock().active.len(), 2);
}

#[test]
fn a_state_that_no_driver_can_have_caused_is_refused() {
    let refusal = |change: fn(&mut VirtioPci)| {
        let mut saved = fixture();
        initialise(&mut saved.transport, 0x1_0000);
        change(&mut saved.transport);
        let mut restored = fixture();
        let state = saved.transport.save().expect("a state");
        let refused = restored.transport.restore(&state);
        assert!(restored.record.lock().active.is_empty());
        refused.expect_err("impossible")
    };
    type Change = fn(&mut VirtioPci);
    let changes: [(Change, &str); 8] = [
        (
            |saved| saved.registers.driver_features |= 1 << 40,
            "features",
        ),
        (|saved| saved.queues.truncate(1), "number of queues"),
        (|saved| saved.queues[0].size = 65, "impossible"),
        (|saved| saved.queues[0].size = 128, "impossible"),
        (|saved| saved.queues[1].vector = 3, "impossible"),
        (|saved| saved.registers.config_vector = 3, "impossible"),
        (
            |saved| saved.queues[0].available = 0x7000_0000,
            "cannot have started",
        ),
        (
            |saved| saved.registers.status &= !STATUS_FEATURES_OK,
            "cannot have started",
        ),
    ];
    for (change, why) in changes {
        let refused = refusal(change);
        assert!(refused.contains(why), "{refused}, not {why}");
    }
}

#[test]
fn a_queue_outside_of_memory_is_not_activated() {
    let mut fixture = fixture();
    initialise(&mut fixture.transport, 0x7000_0000);
    assert_eq!(
        read::<1>(&mut fixture.transport, 0x14)[0] & STATUS_NEEDS_RESET,
        STATUS_NEEDS_RESET
    );
    assert!(fixture.record.lock().active.is_empty());
}

#[test]
fn a_queue_whose_available_ring_cannot_be_served_is_not_activated() {
    let mut fixture = fixture();
    let transport = &mut fixture.transport;
    set_up(transport, 0x1_0000);
    // The available ring of the second queue is at address 0, which is RAM.
    transport.queues[1].available = 0;
    transport.write(0x14, &[15]);
    assert_eq!(read(transport, 0x14), [15 | STATUS_NEEDS_RESET]);
    assert!(fixture.record.lock().active.is_empty());
}

#[test]
fn a_device_that_cannot_start_announces_that_it_needs_a_reset() {
    for (vector, raised) in [(0, 1), (NO_VECTOR, 0)] {
        let mut fixture = fixture();
        let transport = &mut fixture.transport;
        unmask(transport, &[0, 1, 2]);
        set_up(transport, 0x7000_0000);
        write16(transport, 0x10, vector);
        assert_eq!(fixture.interrupts.raised(0), 0);
        transport.write(0x14, &[15]);
        assert_eq!(read(transport, 0x14), [15 | STATUS_NEEDS_RESET]);
        assert_eq!(read(transport, ISR), [ISR_CONFIG]);
        let others = fixture.interrupts.raised(1) + fixture.interrupts.raised(2);
        assert_eq!((fixture.interrupts.raised(0), others), (raised, 0));
        transport.write(0x14, &[0]);
        initialise(transport, 0x1_0000);
        assert_eq!(read(transport, 0x14), [15]);
    }
}

#[test]
fn features_that_do_not_go_together_are_refused() {
    let mut fixture = fixture();
    let transport = &mut fixture.transport;
    let accept = |transport: &mut VirtioPci, low: u32, high: u32| {
        for (select, bits) in [(0, low), (1, high)] {
            write32(transport, 0x08, select);
            write32(transport, 0x0c, bits);
        }
        transport.write(0x14, &[3 | STATUS_FEATURES_OK]);
        read::<1>(transport, 0x14)[0] & STATUS_FEATURES_OK != 0
    };
    transport.write(0x14, &[3]);
    // The third needs the second, and no device works without VIRTIO_F_VERSION_1.
    assert!(!accept(transport, 0b100, 1));
    assert!(!accept(transport, 0b111, 0));
    transport.write(0x14, &[15]);
    assert_eq!(read(transport, 0x14), [7 | STATUS_NEEDS_RESET]);
    assert!(fixture.record.lock().active.is_empty());
    for accepted in [0b000, 0b001, 0b010, 0b110, 0b111] {
        transport.write(0x14, &[0]);
        assert!(accept(transport, accepted, 1), "{accepted:b}");
    }
}

#[test]
fn only_a_reset_takes_bits_of_the_status_back() {
    let mut fixture = fixture();
    let transport = &mut fixture.transport;
    initialise(transport, 0x1_0000);
    transport.write(0x14, &[3]);
    assert_eq!(read(transport, 0x14), [15]);
    // The features and the queues stay as they were negotiated.
    write32(transport, 0x08, 0);
    write32(transport, 0x0c, 0);
    assert_eq!(read(transport, 0x0c), 7u32.to_le_bytes());
    write32(transport, 0x20, 0);
    assert_eq!(read(transport, 0x20), 0x1_1000u32.to_le_bytes());
    transport.write(0x14, &[15]);
    assert_eq!(fixture.record.lock().stops, 0);
    // Nor does a driver set the device's own bit.
    transport.write(0x14, &[15 | STATUS_NEEDS_RESET]);
    assert_eq!(read(transport, 0x14), [15]);
}

#[test]
fn a_device_serves_nothing_before_driver_ok() {
    let mut first = fixture();
    set_up(&mut first.transport, 0x1_0000);
    write16(&mut first.transport, VirtioPci::notify_address(0, 0), 0);
    assert!(first.record.lock().active.is_empty());
    // The thread takes notifications in turn: one of the first device would be here with those of the second.
    let mut second = fixture_on(first.thread);
    initialise(&mut second.transport, 0x1_0000);
    for _ in 0..2 {
        next(&second.notified);
    }
    assert!(first.notified.try_recv().is_err());
}

#[test]
fn no_interrupt_outlives_a_reset() {
    let mut fixture = fixture();
    let transport = &mut fixture.transport;
    unmask(transport, &[0]);
    initialise(transport, 0x1_0000);
    fixture.record.lock().active[0].interrupt(&fixture.memory);
    assert_ne!(read(transport, MSIX_PENDING), [0]);
    transport.write(0x14, &[0]);
    assert_eq!(read(transport, ISR), [0]);
    initialise(transport, 0x1_0000);
    unmask(transport, &[1]);
    assert_eq!(fixture.interrupts.raised(1), 0);
    fixture.record.lock().active[0].interrupt(&fixture.memory);
    assert_eq!(fixture.interrupts.raised(1), 1);
}

#[test]
fn a_queue_without_a_vector_interrupts_nobody() {
    let mut fixture = fixture();
    let transport = &mut fixture.transport;
    unmask(transport, &[0, 1, 2]);
    set_up(transport, 0x1_0000);
    write16(transport, 0x16, 0);
    write16(transport, 0x1a, NO_VECTOR);
    transport.write(0x14, &[15]);
    fixture.record.lock().active[0].interrupt(&fixture.memory);
    let raised = [0, 1, 2].map(|vector| fixture.interrupts.raised(vector));
    assert_eq!(raised, [0; 3]);
    fixture.record.lock().active[1].interrupt(&fixture.memory);
    assert_eq!(fixture.interrupts.raised(2), 1);
}

#[test]
fn every_event_has_the_vector_that_the_driver_gave_it_until_a_reset() {
    let mut transport = fixture().transport;
    let events = [(0x10, 0), (0x1a, 0), (0x1a, 1)];
    for (register, queue) in events {
        write16(&mut transport, 0x16, queue);
        for vector in [0, 1, 2, NO_VECTOR, 1] {
            write16(&mut transport, register, vector);
            assert_eq!(read(&mut transport, register), vector.to_le_bytes());
        }
        write16(&mut transport, register, 3);
        assert_eq!(read(&mut transport, register), NO_VECTOR.to_le_bytes());
        write16(&mut transport, register, 2);
    }
    transport.write(0x14, &[0]);
    for (register, queue) in events {
        write16(&mut transport, 0x16, queue);
        assert_eq!(read(&mut transport, register), NO_VECTOR.to_le_bytes());
    }
}

#[test]
fn registers_of_what_does_not_exist_read_as_zero() {
    let mut transport = fixture().transport;
    for (select, bits) in [(0, 7), (1, 1), (2, 0), (u32::MAX, 0)] {
        write32(&mut transport, 0x00, select);
        write32(&mut transport, 0x08, select);
        write32(&mut transport, 0x0c, u32::MAX);
        for register in [0x04, 0x0c] {
            let read: [u8; 4] = read(&mut transport, register);
            assert_eq!(u32::from_le_bytes(read), bits, "{select}");
        }
    }
    for (queue, size) in [(0, 64), (1, 32), (2, 0), (u16::MAX, 0)] {
        write16(&mut transport, 0x16, queue);
        assert_eq!(u16::from_le_bytes(read(&mut transport, 0x18)), size);
    }
}

#[test]
fn a_reset_disables_the_queues_and_forgets_their_addresses() {
    let mut transport = fixture().transport;
    initialise(&mut transport, 0x1_0000);
    transport.write(0x14, &[0]);
    for queue in [0, 1] {
        write16(&mut transport, 0x16, queue);
        assert_eq!(read(&mut transport, 0x1c), [0; 2]);
        assert_eq!(read(&mut transport, 0x20), [0; 24]);
    }
}

#[test]
fn the_configuration_is_there_before_a_driver_accepts_features() {
    let mut transport = fixture().transport;
    assert_eq!(read(&mut transport, DEVICE), [1, 2, 3, 4]);
    assert_eq!(read(&mut transport, DEVICE + 4), [5, 6, 7, 0]);
    // The generation, since this configuration never changes.
    assert_eq!(read(&mut transport, 0x15), [0]);
}

#[test]
fn a_driver_finds_a_device_that_no_legacy_driver_takes() {
    let transport = fixture().transport;
    let word = |offset| {
        let mut bytes = [0; 2];
        transport.read_config(offset, &mut bytes);
        u16::from_le_bytes(bytes)
    };
    assert_eq!((word(0), word(2)), (0x1af4, 0x1040 + 19));
    assert!(transport.config.byte(8) >= 1);
    assert!(word(0x2e) >= 0x40);
}

#[test]
fn a_device_whose_thread_has_ended_needs_a_reset() {
    let mut fixture = fixture();
    drop(fixture.thread);
    for _ in 0..2 {
        initialise(&mut fixture.transport, 0x1_0000);
        let [status] = read(&mut fixture.transport, 0x14);
        assert_eq!(status & STATUS_NEEDS_RESET, STATUS_NEEDS_RESET);
    }
}

#[test]
fn a_serving_device_is_finished_with_its_thread() {
    let mut fixture = fixture();
    initialise(&mut fixture.transport, 0x1_0000);
    drop(fixture.thread);
    // The default `finish` stops the device.
    assert_eq!(fixture.record.lock().stops, 1);
}

#[test]
fn impossible_sizes_vectors_and_features_do_not_stick() {
    let mut transport = fixture().transport;
    for size in [0, 3, 128] {
        write16(&mut transport, 0x18, size);
        assert_eq!(u16::from_le_bytes(read(&mut transport, 0x18)), 64);
    }
    write16(&mut transport, 0x1a, 7);
    assert_eq!(u16::from_le_bytes(read(&mut transport, 0x1a)), NO_VECTOR);
    write32(&mut transport, 0x0c, u32::MAX);
    assert_eq!(u32::from_le_bytes(read(&mut transport, 0x0c)), 7);
}

#[test]
fn notifications_and_configuration_reach_the_device() {
    let mut fixture = fixture();
    let transport = &mut fixture.transport;
    initialise(transport, 0x1_0000);
    // Starting a device notifies each queue once.
    let notified = || next(&fixture.notified);
    let mut first = [notified(), notified()];
    first.sort_unstable();
    assert_eq!(first, [0, 1]);
    let offset = VirtioPci::notify_address(0, 1);
    write16(transport, offset, 1);
    assert_eq!(notified(), 1);
    assert_eq!(read(transport, DEVICE + 4), [5, 6, 7, 0]);
}

#[test]
fn a_device_is_served_after_the_reset_of_another_one_on_its_thread() {
    let mut first = fixture();
    initialise(&mut first.transport, 0x1_0000);
    let mut second = fixture_on(first.thread);
    initialise(&mut second.transport, 0x1_0000);
    first.transport.write(0x14, &[0]);
    assert_eq!(first.record.lock().stops, 1);
    assert_eq!(second.record.lock().stops, 0);
    let mut seen = [next(&second.notified), next(&second.notified)];
    seen.sort_unstable();
    assert_eq!(seen, [0, 1]);
    write16(&mut second.transport, VirtioPci::notify_address(0, 0), 0);
    assert_eq!(next(&second.notified), 0);
    // The thread finishes only the active device, not the one that was reset.
    drop(second.thread);
    assert_eq!(first.record.lock().stops, 1);
    assert_eq!(second.record.lock().stops, 1);
}

#[test]
fn every_region_is_announced_within_the_bar() {
    let transport = fixture().transport;
    let mut at = transport.config.byte(0x34);
    let mut kinds = Vec::new();
    while at != 0 {
        let place = usize::from(at);
        if transport.config.byte(place) == CAPABILITY_VENDOR {
            kinds.push(transport.config.byte(place + 3));
            let word = |offset| {
                let mut bytes = [0; 4];
                transport.read_config(place + offset, &mut bytes);
                u32::from_le_bytes(bytes)
            };
            assert!(word(8) + word(12) <= BAR_SIZE);
        }
        at = transport.config.byte(place + 1);
    }
    kinds.sort_unstable();
    assert_eq!(kinds, [1, 2, 3, 4, 5]);
}

/// Returns the place of the vendor's capability of this kind, and its words.
fn capability(transport: &VirtioPci, kind: u8) -> (usize, [u32; 5]) {
    let mut at = usize::from(transport.config.byte(0x34));
    while transport.config.byte(at) != CAPABILITY_VENDOR || transport.config.byte(at + 3) != kind {
        at = usize::from(transport.config.byte(at + 1));
        assert_ne!(at, 0, "no capability of kind {kind}");
    }
    let words = [0, 4, 8, 12, 16].map(|offset| {
        let mut bytes = [0; 4];
        transport.read_config(at + offset, &mut bytes);
        u32::from_le_bytes(bytes)
    });
    (at, words)
}

#[test]
fn capabilities_tell_their_length_and_aligned_structures() {
    let transport = fixture().transport;
    for (kind, len) in [(1, 16), (2, 20), (3, 16), (4, 16), (5, 20)] {
        let (at, [_, _, offset, length, multiplier]) = capability(&transport, kind);
        assert_eq!(transport.config.byte(at + 2), len);
        assert_eq!(offset % 4, 0);
        if kind == 2 {
            // An even power of 2, and room for the notification of the last queue.
            assert_eq!(multiplier, 4);
            let last = u32::try_from(transport.queues.len()).expect("few") - 1;
            assert!(length >= last * multiplier + 2);
        }
    }
}

#[test]
fn a_driver_that_cannot_reach_the_bar_accesses_it_by_configuration_space() {
    let mut fixture = fixture();
    let transport = &mut fixture.transport;
    let (window, _) = capability(transport, 5);
    let access = |transport: &mut VirtioPci, bar: u8, offset: u32, length: u32| {
        transport.write_config(window + 4, &[bar]);
        transport.write_config(window + 8, &offset.to_le_bytes());
        transport.write_config(window + 12, &length.to_le_bytes());
    };
    let data = |transport: &VirtioPci| {
        let mut data = [0; 4];
        transport.read_config(window + 16, &mut data);
        data
    };
    access(transport, 0, 0x2000, 4);
    assert_eq!(data(transport), [1, 2, 3, 4]);
    access(transport, 0, 0x2004, 2);
    assert_eq!(data(transport)[..2], [5, 6]);
    // A write of one byte, to the status.
    access(transport, 0, 0x14, 1);
    transport.write_config(window + 16, &[3, 0xff, 0xff, 0xff]);
    assert_eq!(read(transport, 0x14), [3]);
    assert_eq!(data(transport)[0], 3);
    // Other windows do nothing.
    for (bar, offset, length) in [
        (1, 0x14, 1),
        (0, 0x14, 0),
        (0, 0x14, 3),
        (0, 0x14, 8),
        (0, 0x12, 4),
        (0, BAR_SIZE, 1),
        (0, u32::MAX, 1),
    ] {
        access(transport, bar, offset, length);
        transport.write_config(window + 16, &[0; 4]);
        assert_eq!((read(transport, 0x14), data(transport)), ([3], [0; 4]));
    }
}

#[test]
fn the_status_of_the_function_shows_interrupts_that_are_none_of_msix() {
    let mut fixture = fixture();
    let transport = &mut fixture.transport;
    initialise(transport, 0x1_0000);
    let shown = |transport: &VirtioPci| {
        let mut registers = [0; 4];
        transport.read_config(4, &mut registers);
        registers[2] & STATUS_INTERRUPT != 0
    };
    assert!(!shown(transport));
    fixture.record.lock().active[0].interrupt(&fixture.memory);
    assert!(shown(transport));
    unmask(transport, &[]);
    assert!(!shown(transport));
    transport.write_config(transport.msix_control, &[0]);
    assert!(shown(transport));
    assert_eq!(read(transport, ISR), [ISR_QUEUE]);
    assert!(!shown(transport));
}

proptest! {
    #[test]
    fn no_access_panics(
        accesses in proptest::collection::vec(
            (0u64..0x8100, prop_oneof![Just(1usize), Just(2), Just(4), Just(8), 0usize..9], any::<u64>(), any::<bool>()),
            0..200,
        )
    ) {
        let mut transport = fixture().transport;
        for (offset, len, value, write) in accesses {
            let offset = if value % 2 == 0 { offset % 0x40 } else { offset };
            let mut data = value.to_le_bytes()[..len].to_vec();
            if value % 3 == 0 {
                let offset = usize::try_from(offset % 0x100).expect("small");
                if write {
                    transport.write_config(offset, &data);
                } else {
                    transport.read_config(offset, &mut data);
                }
            } else if write {
                transport.write(offset, &data);
            } else {
                transport.read(offset, &mut data);
            }
        }
    }
}
