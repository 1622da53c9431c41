//! Threads of a guest that sleep on their notes are woken when what they wait for has come.

mod support;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use support::recorder::Recorder;
use support::served::{Served, handle};
use wormhole_api::handle::Stream as StreamKind;
use wormhole_api::{Fence, FenceWrite, Handle, MemGetInfo, StreamCreate, StreamQuery};
use wormhole_backend_tests::backend::PATIENCE;
use wormhole_device::Device;
use wormhole_ring::fence::{FenceIndex, Fences};
use wormhole_ring::slot::SlotIndex;
use wormhole_ring::status::EndCause;
use wormhole_ring::waits::{Wait, Waits};

fn served() -> Served {
    let device: Arc<dyn Device> = Arc::new(Recorder::new());
    Served::start(&device, 5)
}

/// Starts a session with a stream whose fences the test writes itself, as hardware does.
fn with_fences_withheld() -> (Served, Handle<StreamKind>) {
    let device = Arc::new(Recorder::new());
    device.withholds_fences.store(true, Ordering::Relaxed);
    let served = Served::start(&(device as Arc<dyn Device>), 5);
    let stream = handle(1);
    served.record(&StreamCreate {
        new: stream,
        flags: 0,
        priority: 0,
    });
    (served, stream)
}

/// Sleeps until `done`, and lets `begin` cause that once the sleep is announced. Fails unless another thread wakes this one.
fn sleep(served: &Served, wait: Wait, begin: impl FnOnce(), done: impl Fn() -> bool) {
    let waits = Waits::new(served.memory());
    let note = waits.note(1, wait).unwrap();
    note.announce();
    begin();
    loop {
        assert!(note.sleep(PATIENCE), "nobody wakes the sleeper");
        note.announce();
        if done() {
            break;
        }
    }
    drop(note);
    assert!(!waits.anyone_sleeps());
}

#[test]
fn a_thread_that_sleeps_is_woken_by_its_answer() {
    let served = served();
    let slot = SlotIndex::new(1).unwrap();
    for sequence in 1..100 {
        sleep(
            &served,
            Wait::Answer(slot, sequence),
            || served.ask(1, sequence, &MemGetInfo {}),
            || served.slots.poll(slot, sequence).unwrap().is_some(),
        );
    }
}

#[test]
fn a_thread_that_sleeps_is_woken_by_a_fence_that_the_device_writes() {
    let served = served();
    let stream: Handle<StreamKind> = handle(1);
    served.record(&StreamCreate {
        new: stream,
        flags: 0,
        priority: 0,
    });
    let (fences, index) = (Fences::new(served.memory()), FenceIndex::new(7).unwrap());
    for value in 1..100 {
        let fence = FenceWrite {
            stream,
            fence: Fence::new(7).unwrap(),
            value,
        };
        sleep(
            &served,
            Wait::Fence(index, value),
            || served.record(&fence),
            || fences.load(index) >= value,
        );
    }
}

#[test]
fn a_thread_that_sleeps_is_woken_by_a_fence_that_hardware_writes_while_the_executor_sleeps() {
    let (served, stream) = with_fences_withheld();
    let (fences, index) = (Fences::new(served.memory()), FenceIndex::new(7).unwrap());
    for value in 1..200 {
        served.record(&FenceWrite {
            stream,
            fence: Fence::new(7).unwrap(),
            value,
        });
        served.call(0, value, &StreamQuery { stream });
        served.rests.store(true, Ordering::Relaxed);
        std::thread::scope(|scope| {
            sleep(
                &served,
                Wait::Fence(index, value),
                || {
                    // At any time between two looks of the watcher.
                    scope.spawn(|| {
                        std::thread::sleep(Duration::from_micros(17 * value));
                        fences.store(index, value);
                    });
                },
                || fences.load(index) >= value,
            );
        });
        served.rests.store(false, Ordering::Relaxed);
    }
}

#[test]
fn a_fence_that_is_not_written_is_outstanding_at_every_look() {
    let (served, stream) = with_fences_withheld();
    served.record(&FenceWrite {
        stream,
        fence: Fence::new(7).unwrap(),
        value: 1,
    });
    served.call(0, 1, &StreamQuery { stream });
    served.rests.store(true, Ordering::Relaxed);
    let [looks, idle] = &*served.looks;
    // Some hundred checks of the watcher.
    while looks.load(Ordering::Relaxed) < 300_000 {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(idle.load(Ordering::Relaxed), 0);
}

#[test]
fn a_thread_that_sleeps_is_woken_by_the_end_of_its_session() {
    let served = served();
    let status = served.status.clone();
    sleep(
        &served,
        Wait::Fence(FenceIndex::new(7).unwrap(), 1),
        || assert!(status.set_once(719, EndCause::ContextDead)),
        || status.load().is_some(),
    );
}
