//! Barriers between lanes: work behind a launch waits until the lane has made the launch's call.
//!
//! A launch is held in the device, so its lane stands. A message whose call must come later is sent then, and a call
//! whose order does not matter passes.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use support::lanes::{ALWAYS, Ready, fence, graph, launch, ready, record, stream, wait};
use support::recorder::Recorder;
use support::served::{handle, launch_with};
use support::whole;
use wormhole_api::constants::launch_attribute::LAUNCH_COMPLETION_EVENT;
use wormhole_api::{
    ContextReset, CuResult, DevicePtr, EventDestroy, EventQuery, GraphLaunch, GraphUpload, Items,
    LaunchAttribute, MemCopy, MemFree, MemGetInfo, MemWrite, MemoryOperation, Message,
    ModuleGetFunction, ModuleUnload, StreamCreate, StreamDestroy, StreamMemory, StreamQuery,
    Synchronize,
};
use wormhole_backend_tests::backend::wait_until;
use wormhole_backend_tests::messages::module_load;
use wormhole_device::Device;
use wormhole_link::counters::Counter;
use wormhole_ring::layout::SEGMENT_BYTES;
use wormhole_worker::lanes::Plan;
use wormhole_worker::registrar::Task;
use wormhole_worker::session::Event;

/// Blocking streams.
const FIRST: u32 = 1;
const SECOND: u32 = 2;
/// A stream that does not wait for the legacy stream.
const APART: u32 = 3;
const LEGACY: u32 = 0;

/// Holds a launch on a stream in its lane while `send` sends a message, and checks that the message's call waits for it.
#[track_caller]
fn waits(ready: &mut Ready, on: u32, call: &'static str, send: impl FnOnce(&mut Ready)) {
    let calls = held(ready, on, call);
    send(ready);
    let early = ready.device.comes_at_once(call, calls + 1);
    ready.device.let_go("launch");
    assert!(!early, "{call} overtakes a launch");
    ready.device.wait_for(call, calls + 1);
    // A launch whose stream or kernel was destroyed too early would have failed.
    ready.call(&MemGetInfo {});
    assert_eq!(ready.served.status.load(), None, "behind {call}");
}

/// Checks that a message's call does not wait for a launch on another stream.
#[track_caller]
fn passes(ready: &mut Ready, on: u32, call: &'static str, send: impl FnOnce(&mut Ready)) {
    let calls = held(ready, on, call);
    send(ready);
    ready.device.wait_for(call, calls + 1);
    ready.device.let_go("launch");
    ready.call(&MemGetInfo {});
    assert_eq!(ready.served.status.load(), None, "beside {call}");
}

/// Holds a launch, and returns the number of calls of this name so far.
fn held(ready: &Ready, on: u32, call: &'static str) -> usize {
    let launches = ready.device.arrivals("launch");
    ready.device.hold("launch");
    ready.served.record(&launch(on, 7));
    ready.device.wait_for("launch", launches + 1);
    ready.device.arrivals(call)
}

/// Sends a record.
fn sent<M: Message>(message: M) -> impl FnOnce(&mut Ready) {
    move |ready| ready.served.record(&message)
}

/// Sends a request.
fn asked<M: Message>(message: M) -> impl FnOnce(&mut Ready) {
    move |ready| _ = ready.ask(&message)
}

#[test]
fn work_of_a_stream_waits_for_its_launches_alone() {
    let mut ready = ready(ALWAYS);
    let memory = ready.memory;
    for (on, wait_for) in [(FIRST, true), (SECOND, false), (APART, false)] {
        let copy = MemCopy {
            destination: memory,
            source: memory,
            bytes: 8,
            stream: stream(on),
        };
        let write = MemWrite {
            destination: memory,
            stream: stream(on),
            data: &[1; 8],
        };
        let fill = ready.fill(on, 1);
        let check = |ready: &mut Ready, call, send: Box<dyn FnOnce(&mut Ready)>| match wait_for {
            true => waits(ready, FIRST, call, send),
            false => passes(ready, FIRST, call, send),
        };
        check(&mut ready, "launch", Box::new(sent(launch(on, 1))));
        check(&mut ready, "write_fence", Box::new(sent(fence(on, 1, 1))));
        check(&mut ready, "record_event", Box::new(sent(record(on, 1))));
        check(&mut ready, "wait_event", Box::new(sent(wait(on, 1))));
        check(&mut ready, "fill", Box::new(sent(fill)));
        check(&mut ready, "mem_copy", Box::new(sent(copy)));
        check(&mut ready, "write", Box::new(sent(write)));
    }
}

#[test]
fn one_thread_of_the_guest_keeps_its_order_on_all_streams() {
    const LAUNCHES: u16 = 5;
    const OTHER: u16 = 6;
    let mut ready = ready(ALWAYS);
    let fill = ready.fill(SECOND, 1);
    for (thread, waits) in [(LAUNCHES, true), (OTHER, false)] {
        for call in ["launch", "fill"] {
            let (device, served) = (&ready.device, &ready.served);
            let launches = device.arrivals("launch");
            device.hold("launch");
            served.record_by(LAUNCHES, &launch(FIRST, 7));
            device.wait_for("launch", launches + 1);
            let before = device.arrivals(call);
            match call {
                "launch" => served.record_by(thread, &launch(SECOND, 1)),
                _ => served.record_by(thread, &fill),
            }
            let comes = device.comes_at_once(call, before + 1);
            assert_eq!(comes, !waits, "{call} of thread {thread}");
            device.let_go("launch");
            device.wait_for(call, before + 1);
            ready.call(&MemGetInfo {});
        }
    }
}

#[test]
fn the_legacy_stream_and_blocking_streams_wait_for_each_other() {
    let mut ready = ready(ALWAYS);
    for (on, wait_for) in [(FIRST, true), (APART, false)] {
        let check = |ready: &mut Ready, call, send: Box<dyn FnOnce(&mut Ready)>| match wait_for {
            true => waits(ready, on, call, send),
            false => passes(ready, on, call, send),
        };
        let fill = ready.fill(LEGACY, 1);
        check(&mut ready, "launch", Box::new(sent(launch(LEGACY, 1))));
        check(
            &mut ready,
            "write_fence",
            Box::new(sent(fence(LEGACY, 1, 1))),
        );
        check(
            &mut ready,
            "record_event",
            Box::new(sent(record(LEGACY, 1))),
        );
        check(&mut ready, "wait_event", Box::new(sent(wait(LEGACY, 1))));
        check(&mut ready, "fill", Box::new(sent(fill)));
    }
    // Blocking streams come behind the legacy stream, since the executor makes its calls itself.
    waits(&mut ready, LEGACY, "launch", sent(launch(FIRST, 1)));
}

#[test]
fn the_legacy_stream_waits_for_the_fence_of_a_blocking_stream() {
    let ready = ready(ALWAYS);
    let fences = held(&ready, FIRST, "write_fence");
    ready.device.hold("write_fence");
    ready.served.record(&fence(FIRST, 1, 2));
    ready.device.let_go("launch");
    ready.device.wait_for("write_fence", fences + 1);
    let fills = ready.device.arrivals("fill");
    ready.served.record(&ready.fill(LEGACY, 1));
    let early = ready.device.comes_at_once("fill", fills + 1);
    ready.device.let_go("write_fence");
    assert!(!early, "a fence is overtaken");
    ready.device.wait_for("fill", fills + 1);
}

#[test]
fn a_launch_that_records_an_event_waits_for_its_stream() {
    let mut ready = ready(ALWAYS);
    let mut value = [0; 64];
    value[..8].copy_from_slice(&support::lanes::event().to_wire().to_le_bytes());
    let attributes = [LaunchAttribute::new(LAUNCH_COMPLETION_EVENT, value)];
    waits(&mut ready, FIRST, "launch", |ready| {
        ready.served.record(&launch_with(&attributes));
    });
    let events = ready.device.arrivals("an event of blocks that have begun");
    assert_eq!(events, 1);
    passes(&mut ready, SECOND, "wait_event", sent(wait(APART, 1)));
}

#[test]
fn all_other_messages_wait_for_all_launches() {
    let mut ready = ready(ALWAYS);
    let address = ready.memory.0;
    let operations = [MemoryOperation {
        kind: 2,
        flags: 0,
        address,
        value: 1,
    }];
    let memory = StreamMemory {
        stream: stream(FIRST),
        operations: Items::new(&operations),
    };
    let on = APART;
    waits(&mut ready, on, "memory_operations", |ready| {
        ready.served.record(&memory)
    });
    let launches = GraphLaunch {
        graph: graph(),
        stream: stream(FIRST),
    };
    waits(&mut ready, on, "launch_graph", sent(launches));
    waits(
        &mut ready,
        on,
        "query_stream",
        asked(StreamQuery {
            stream: stream(FIRST),
        }),
    );
    waits(
        &mut ready,
        on,
        "query_event",
        asked(EventQuery { event: handle(1) }),
    );
    waits(
        &mut ready,
        on,
        "take_output",
        asked(Synchronize { stream: None }),
    );
    waits(&mut ready, on, "launch", asked(launch(FIRST, 1)));
    waits(
        &mut ready,
        on,
        "destroy_event",
        sent(EventDestroy { event: handle(1) }),
    );
    waits(
        &mut ready,
        on,
        "mem_free",
        asked(MemFree {
            address: DevicePtr(address),
        }),
    );
    waits(
        &mut ready,
        on,
        "destroy_stream",
        sent(StreamDestroy { stream: stream(on) }),
    );
    waits(
        &mut ready,
        FIRST,
        "unload",
        asked(ModuleUnload { module: handle(1) }),
    );
}

#[test]
fn events_of_other_threads_wait_for_all_launches() {
    let mut ready = ready(ALWAYS);
    let released = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&released);
    let (start, bytes) = (1 << 40, SEGMENT_BYTES as u64);
    ready.served.notifier.send(Event::ExtentAdded {
        address: start,
        bytes,
    });
    ready.call(&MemGetInfo {});
    held(&ready, APART, "launch");
    let release = Task::new(move |_| seen.store(true, Ordering::Release));
    ready.served.notifier.send(Event::ExtentRemoved {
        address: start,
        release,
    });
    assert!(!ready.device.comes_at_once("a call that never comes", 1));
    let early = released.load(Ordering::Acquire);
    ready.device.let_go("launch");
    assert!(!early, "arena goes before a launch that may name it");
    wait_until(
        || released.load(Ordering::Acquire),
        || "the arena is not given back".to_owned(),
    );
}

#[test]
fn a_failure_in_a_lane_ends_the_session_before_its_fence() {
    let mut ready = ready(ALWAYS);
    ready.device.fails.store(99, Ordering::Relaxed);
    ready.device.hold("launch");
    ready.device.hold("write_fence");
    let fences = ready.device.arrivals("write_fence");
    ready.served.record(&launch(FIRST, 99));
    ready.served.record(&fence(FIRST, 3, 5));
    assert_eq!(ready.served.status.load(), None);
    ready.device.let_go("launch");
    ready.device.wait_for("write_fence", fences + 1);
    let cause = ready.served.status.load().expect("set before the fence");
    assert_eq!(cause.result, CuResult::LAUNCH_FAILED.0);
    ready.device.let_go("write_fence");
    wait_until(|| ready.fence(3) == 5, || "no fence".to_owned());
    // The executor goes on as after a failure of its own.
    ready.call(&MemGetInfo {});
    wait_until(
        || ready.served.counters.read().get(Counter::Failures) == 1,
        || "the failure is not counted once".to_owned(),
    );
}

#[test]
fn launches_behind_a_failure_of_their_lane_are_not_reported_again() {
    let mut ready = ready(ALWAYS);
    ready.device.fails.store(99, Ordering::Relaxed);
    let launches = ready.device.arrivals("launch");
    for _ in 0..100 {
        ready.served.record(&launch(FIRST, 99));
    }
    ready.device.wait_for("launch", launches + 100);
    ready.call(&MemGetInfo {});
    ready.call(&MemGetInfo {});
    assert_eq!(ready.served.counters.read().get(Counter::Failures), 1);
}

#[test]
fn the_first_failure_is_the_one_that_counts() {
    for refused in [false, true] {
        let ready = ready(ALWAYS);
        ready.device.fails.store(99, Ordering::Relaxed);
        ready.device.hold("launch");
        let launches = ready.device.arrivals("launch");
        ready.served.record(&launch(FIRST, 99));
        ready.device.wait_for("launch", launches + 1);
        match refused {
            false => ready.served.record(&ready.fill(77, 1)),
            true => ready.served.record_on(9, &ready.fill(SECOND, 1)),
        }
        assert!(!ready.device.comes_at_once("a call that never comes", 1));
        assert_eq!(
            ready.served.status.load(),
            None,
            "a later failure comes first"
        );
        ready.device.let_go("launch");
        wait_until(
            || ready.served.status.load().is_some(),
            || "the session does not end".to_owned(),
        );
        let cause = ready.served.status.load().unwrap();
        assert_eq!(cause.result, CuResult::LAUNCH_FAILED.0);
    }
}

#[test]
fn a_reset_comes_behind_full_lanes() {
    let mut ready = ready(ALWAYS);
    let before = ready.device.arrivals("launch");
    ready.device.hold("launch");
    // More than a lane's queue has room for.
    for number in 0..6000 {
        let on = if number % 8 == 0 { 2 } else { 1 };
        ready.served.record(&launch(on, number));
    }
    let sequence = ready.ask(&ContextReset {});
    assert!(!ready.device.comes_at_once("reset", 1));
    ready.device.let_go("launch");
    ready.served.payload::<ContextReset>(0, sequence);
    assert_eq!(ready.device.arrivals("launch"), before + 6000);
    assert_eq!(ready.served.status.load(), None);
    // The session goes on.
    ready.served.record(&StreamCreate {
        new: stream(1),
        flags: 5,
        priority: 0,
    });
    ready.call(&MemGetInfo {});
    assert_eq!(ready.device.log().last(), Some(&5));
}

#[test]
fn a_lane_that_stands_does_not_keep_a_worker() {
    const WINDOW: u64 = 8 * SEGMENT_BYTES as u64;
    let device = Arc::new(Recorder::new());
    let devices = vec![Arc::clone(&device) as Arc<dyn Device>];
    let (mut guest, worker) = whole::serve_in_lanes(devices, 0, 1, WINDOW, ALWAYS);
    let load = module_load(handle(1), DevicePtr(guest.arena[0].address), 64);
    assert_eq!(guest.call(&load).status, 0);
    let look_up = ModuleGetFunction {
        module: handle(1),
        new: handle(1),
        name: b"kernel",
    };
    assert_eq!(guest.call(&look_up).status, 0);
    guest.record(&StreamCreate {
        new: stream(1),
        flags: 0,
        priority: 0,
    });
    device.hold("launch");
    for number in 0..3000 {
        guest.record(&launch(1, number));
    }
    device.wait_for("launch", 1);
    guest.start(1, &MemGetInfo {});
    drop(guest);
    assert_eq!(
        worker.join().unwrap(),
        0,
        "its main thread ends the process"
    );
    assert_eq!(device.arrivals("launch"), 1, "the lane still stands");
    device.let_go("launch");
}

#[test]
fn launches_go_to_lanes_while_several_streams_have_them_in_the_ring() {
    let plan = Plan {
        always: false,
        ..ALWAYS
    };
    for (streams, threads) in [(1, 1), (3, 4)] {
        let mut ready = ready(plan);
        let before = ready.device.arrivals("launch");
        ready.served.rests.store(true, Ordering::Relaxed);
        for number in 0..6000 {
            ready.served.record(&launch(1 + number % streams, number));
        }
        ready.served.rests.store(false, Ordering::Relaxed);
        ready.call(&MemGetInfo {});
        let made = ready.device.threads("launch").split_off(before);
        assert_eq!(made.len(), 6000);
        let first = made[0];
        assert!(made[..100].iter().all(|thread| *thread == first));
        let different: std::collections::HashSet<_> = made.into_iter().collect();
        assert_eq!(different.len(), threads, "{streams} streams");
    }
}

#[test]
fn a_graph_is_uploaded_behind_launches() {
    let mut ready = ready(ALWAYS);
    let upload = GraphUpload {
        graph: graph(),
        stream: stream(FIRST),
    };
    held(&ready, APART, "launch");
    let sequence = ready.ask(&upload);
    assert!(!ready.device.comes_at_once("a call that never comes", 1));
    assert!(!ready.served.has_answer(0, sequence));
    ready.device.let_go("launch");
    ready.served.payload::<GraphUpload>(0, sequence);
}
