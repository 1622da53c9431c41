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
        1
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
    let msix = Msix::new(Arc::new(FakeController::default()), 3).expect("eventfds");
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

/// Initialises the device as Linux does, with the first queue at `first`.
fn initialise(transport: &mut VirtioPci, first: u32) {
    transport.write(0x14, &[0]);
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
    transport.write(0x14, &[3 | STATUS_FEATURES_OK | STATUS_DRIVER_OK]);
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
    assert_eq!(u32::from_le_bytes(read(&mut transport, 0x0c)), 1);
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
    assert_eq!(kinds, [1, 2, 3, 4]);
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
            if write {
                transport.write(offset, &data);
            } else {
                transport.read(offset, &mut data);
            }
        }
    }
}
