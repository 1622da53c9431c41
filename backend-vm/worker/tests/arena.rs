//! Arena granted and returned while the device is slow. A whole worker runs in this process, on the
//! test's device; the test plays its supervisor and its guest.

mod support;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use support::recorder::Recorder;
use support::whole;
use wormhole_api::{ContextReset, DevicePtr, MemGetInfo, ModuleUnload, Synchronize};
use wormhole_backend_tests::backend::wait_until;
use wormhole_backend_tests::guest::{Guest, Reply};
use wormhole_backend_tests::messages::module_load;
use wormhole_device::Device;
use wormhole_ring::control::{ArenaRun, Message};
use wormhole_ring::layout::{SEGMENT_BYTES, WINDOW_BASE};

const SEGMENT: u64 = SEGMENT_BYTES as u64;
/// Segments of one test: the session's, one of initial arena, and room for more.
const SHARE: u32 = 16;
const WINDOW: u64 = 6 * SHARE as u64 * SEGMENT;

struct Served {
    device: Arc<Recorder>,
    guest: Guest,
    first: u32,
}

/// Starts a worker with a session in the segments from `first` on.
fn serve(first: u32) -> Served {
    let device = Arc::new(Recorder::new());
    let served = Arc::clone(&device) as Arc<dyn Device>;
    Served {
        device,
        guest: whole::serve(vec![served], first, 1, WINDOW),
        first,
    }
}

impl Served {
    /// Returns a run of arena by its place in this test's share.
    fn run(&self, place: u32, count: u32) -> ArenaRun {
        assert!(place + count <= SHARE);
        ArenaRun {
            id: place,
            first: self.first + place,
            count,
        }
    }

    fn address(&self, place: u32) -> u64 {
        WINDOW_BASE + u64::from(self.first + place) * SEGMENT
    }

    /// Returns the registered ranges, by place in this test's share and segments.
    fn registered(&self) -> Vec<(u64, u64)> {
        let start = self.address(0);
        let registered = self.device.registered().into_iter();
        registered
            .map(|(address, bytes)| ((address - start) / SEGMENT, bytes / SEGMENT))
            .collect()
    }

    fn send(&mut self, message: &Message<'_>) {
        self.guest.control.send(message).unwrap();
    }

    fn hear(&mut self, wanted: &'static str) {
        assert_eq!(self.guest.control.receive(), Reply::Other(wanted));
    }
}

#[test]
fn arena_that_is_granted_during_a_reset_is_registered_after_it() {
    let mut served = serve(0);
    served.device.hold("reset");
    let asked = served.guest.start(0, &ContextReset {});
    served.device.wait_for("reset", 1);
    let run = served.run(4, 2);
    served.send(&Message::ArenaAdd(run));
    served.device.let_go("reset");
    served.hear("ArenaAdded");
    assert_eq!(served.guest.wait(0, asked).unwrap().status, 0);
    assert_eq!(served.registered(), [(0, 1), (1, 1), (4, 2)]);
    // A run added before a reset is registered again.
    assert_eq!(served.guest.call(&ContextReset {}).status, 0);
    assert_eq!(served.registered(), [(0, 1), (1, 1), (4, 2)]);
}

#[test]
fn a_device_that_does_not_let_go_of_arena_holds_up_neither_doorbell_nor_ring() {
    let mut served = serve(SHARE);
    let run = served.run(4, 2);
    served.send(&Message::ArenaAdd(run));
    served.hear("ArenaAdded");
    served.device.hold("unregister");
    served.send(&Message::ArenaRemove(run));
    served.device.wait_for("unregister", 1);
    for _ in 0..10 {
        // A parked executor is woken by a doorbell message alone, which the worker's main thread
        // must read.
        let guest = &mut served.guest;
        wait_until(
            || guest.producer.consumer_parked(),
            || "the executor to park".to_owned(),
        );
        assert_eq!(guest.call(&MemGetInfo {}).status, 0);
        assert_eq!(guest.call(&Synchronize { stream: None }).status, 0);
    }
    assert_eq!(served.registered(), [(0, 1), (1, 1), (4, 2)]);
    served.device.let_go("unregister");
    served.hear("ArenaRemoved");
    assert_eq!(served.registered(), [(0, 1), (1, 1)]);
    // The same run again.
    served.send(&Message::ArenaAdd(run));
    served.hear("ArenaAdded");
    assert_eq!(served.registered(), [(0, 1), (1, 1), (4, 2)]);
}

#[test]
fn an_unload_that_waits_for_kernels_holds_up_nothing_but_a_reset() {
    let mut served = serve(5 * SHARE);
    let run = served.run(4, 1);
    served.send(&Message::ArenaAdd(run));
    served.hear("ArenaAdded");
    let load = module_load(served.guest.mint(), DevicePtr(served.address(4)), 64);
    assert_eq!(served.guest.call(&load).status, 0);
    served.device.is_busy.store(true, Ordering::Release);
    served.device.hold("unload");
    let module = load.new;
    served.guest.record(&ModuleUnload { module });
    served.device.wait_for("unload", 1);
    served.send(&Message::ArenaRemove(run));
    served.hear("ArenaRemoved");
    served.send(&Message::ArenaAdd(run));
    served.hear("ArenaAdded");
    assert_eq!(served.registered(), [(0, 1), (1, 1), (4, 1)]);
    let reset = served.guest.start(0, &ContextReset {});
    // The grant waits for the reset, and the reset for the unload.
    served.send(&Message::ArenaAdd(served.run(6, 1)));
    assert_eq!(served.device.arrivals("reset"), 0);
    served.device.let_go("unload");
    served.hear("ArenaAdded");
    assert_eq!(served.guest.wait(0, reset).unwrap().status, 0);
    assert_eq!(served.device.arrivals("reset"), 1);
}

#[test]
fn arena_that_a_job_reads_is_let_go_when_it_has_been_read() {
    let mut served = serve(2 * SHARE);
    let run = served.run(4, 1);
    served.send(&Message::ArenaAdd(run));
    served.hear("ArenaAdded");
    let load = module_load(served.guest.mint(), DevicePtr(served.address(4)), 64);
    assert_eq!(served.guest.call(&load).status, 0);
    served.send(&Message::ArenaRemove(run));
    served.hear("ArenaRemoved");
    assert_eq!(served.registered(), [(0, 1), (1, 1)]);
    // The range may not be named any more: an access would crash this process.
    let load = module_load(served.guest.mint(), load.image, load.bytes);
    assert_eq!(served.guest.call(&load).status, 1);
}

#[test]
fn arena_that_cannot_be_registered_is_refused_and_the_session_goes_on() {
    let mut served = serve(3 * SHARE);
    let run = served.run(4, 2);
    served.device.refuses_memory.store(true, Ordering::Relaxed);
    served.send(&Message::ArenaAdd(run));
    served.hear("ArenaRefused");
    assert_eq!(served.registered(), [(0, 1), (1, 1)]);
    assert_eq!(served.guest.call(&MemGetInfo {}).status, 0);
    // The same run, when registration succeeds again.
    served.device.refuses_memory.store(false, Ordering::Relaxed);
    served.send(&Message::ArenaAdd(run));
    served.hear("ArenaAdded");
    assert_eq!(served.registered(), [(0, 1), (1, 1), (4, 2)]);
}

#[test]
fn arena_that_the_device_keeps_stays_mapped() {
    let mut served = serve(4 * SHARE);
    let [kept, run] = [4, 6].map(|place| served.run(place, 1));
    for run in [kept, run] {
        served.send(&Message::ArenaAdd(run));
        served.hear("ArenaAdded");
    }
    served.device.keeps_memory.store(true, Ordering::Relaxed);
    served.device.hold("unregister");
    served.send(&Message::ArenaRemove(kept));
    served.device.wait_for("unregister", 1);
    served.device.let_go("unregister");
    // The registrar runs its tasks in order.
    served.send(&Message::ArenaAdd(served.run(8, 1)));
    served.hear("ArenaAdded");
    let start = usize::try_from(served.address(4)).unwrap();
    let start = std::ptr::with_exposed_provenance::<u8>(start);
    // SAFETY: the worker runs in this process and keeps the run mapped; reading an unmapped page
    // would crash the test.
    let byte = unsafe { start.read_volatile() };
    assert_eq!(byte, 0);
    served.device.keeps_memory.store(false, Ordering::Relaxed);
    served.send(&Message::ArenaRemove(run));
    served.hear("ArenaRemoved");
}
