//! Launches that lie in the ring together go to the device as chains, and nothing else changes.

mod support;

use std::sync::atomic::Ordering;

use support::lanes::{Ready, STREAMS, event, fence, launch, ready_with, record, stream, wait};
use support::recorder::Recorder;
use support::served::{handle, launch_with};
use wormhole_api::constants::launch_attribute::{COOPERATIVE, LAUNCH_COMPLETION_EVENT};
use wormhole_api::{
    ContextReset, CuResult, Items, LaunchAttribute, LaunchKernel, MemGetInfo, ModuleUnload,
    StreamDestroy, StreamQuery, StreamSetAttribute,
};
use wormhole_backend_tests::backend::wait_until;
use wormhole_device::RawFunction;
use wormhole_link::counters::Counter;
use wormhole_worker::Tuning;
use wormhole_worker::chains::Plan;

const FIRST: u32 = 1;
const SECOND: u32 = 2;

fn ready(chains: Plan) -> Ready {
    ready_with(Tuning {
        chains,
        ..Tuning::default()
    })
}

/// Writes records while the executor looks away, so that they lie in the ring together.
fn at_once(ready: &mut Ready, write: impl FnOnce(&mut Ready)) {
    ready.call(&MemGetInfo {});
    let served = &ready.served;
    let looks = served.looks[0].load(Ordering::Relaxed);
    served.rests.store(true, Ordering::Relaxed);
    let rests = || served.looks[0].load(Ordering::Relaxed) > looks;
    wait_until(rests, || "a resting executor".to_owned());
    write(ready);
    ready.served.rests.store(false, Ordering::Relaxed);
}

/// Does the same, and waits until the records are executed.
fn together(ready: &mut Ready, write: impl FnOnce(&mut Ready)) {
    at_once(ready, write);
    ready.call(&MemGetInfo {});
}

/// Returns the numbers of launches and other work, without those of the beginning.
fn log(ready: &Ready, before: usize) -> Vec<u32> {
    ready.device.log().split_off(before)
}

fn calls(device: &Recorder) -> [usize; 3] {
    ["launch", "launch_chain", "create_chain"].map(|call| device.arrivals(call))
}

/// Sends launches with these numbers.
fn launches(ready: &Ready, on: u32, numbers: std::ops::Range<u32>) {
    for number in numbers {
        ready.served.record(&launch(on, number));
    }
}

#[test]
fn launches_that_lie_in_the_ring_go_by_one_call() {
    let mut ready = ready(Plan::Always);
    let before = ready.device.log().len();
    for round in 0..5 {
        together(&mut ready, |ready| {
            launches(ready, FIRST, round * 41..round * 41 + 41);
        });
    }
    let wanted: Vec<u32> = (0..5 * 41).collect();
    assert_eq!(log(&ready, before), wanted);
    // 41 are 16, 16, 8 and 1.
    assert_eq!(calls(&ready.device), [5, 15, 2]);
    let counters = ready.served.counters.read();
    assert_eq!(counters.get(Counter::Chains), 15);
    assert_eq!(counters.get(Counter::ChainedLaunches), 200);
}

#[test]
fn a_launch_that_lies_alone_goes_by_itself() {
    let mut ready = ready(Plan::Always);
    for number in 0..20 {
        ready.served.record(&launch(FIRST, number));
        ready.call(&StreamQuery {
            stream: stream(FIRST),
        });
    }
    assert_eq!(calls(&ready.device), [20, 0, 0]);
}

#[test]
fn a_plan_without_chains_makes_none() {
    let mut ready = ready(Plan::Never);
    together(&mut ready, |ready| launches(ready, FIRST, 0..100));
    assert_eq!(calls(&ready.device), [100, 0, 0]);
}

/// Checks that a record's call comes between the launches before and behind it.
#[track_caller]
fn stays_between(call: &'static str, send: impl FnOnce(&Ready)) {
    let mut ready = ready(Plan::Always);
    let before = ready.device.log().len();
    ready.device.hold(call);
    let calls = ready.device.arrivals(call);
    at_once(&mut ready, |ready| {
        launches(ready, FIRST, 1000..1006);
        send(ready);
        launches(ready, FIRST, 1006..1012);
    });
    ready.device.wait_for(call, calls + 1);
    let made: Vec<u32> = (1000..1006).collect();
    assert_eq!(log(&ready, before), made, "{call}");
    ready.device.let_go(call);
    ready.call(&MemGetInfo {});
    let all = log(&ready, before);
    let launches: Vec<u32> = all.into_iter().filter(|number| *number >= 1000).collect();
    assert_eq!(launches, (1000..1012).collect::<Vec<_>>());
    assert!(ready.device.arrivals("launch_chain") >= 2, "{call}");
}

#[test]
fn other_records_stay_between_launches() {
    stays_between("write_fence", |ready| {
        ready.served.record(&fence(FIRST, 10, 1))
    });
    stays_between("fill", |ready| ready.served.record(&ready.fill(FIRST, 7)));
    stays_between("fill", |ready| ready.served.record(&ready.fill(SECOND, 7)));
    stays_between("record_event", |ready| {
        ready.served.record(&record(SECOND, 7))
    });
    stays_between("wait_event", |ready| ready.served.record(&wait(FIRST, 7)));
}

#[test]
fn launches_that_stay_single_keep_their_place() {
    let mut ready = ready(Plan::Always);
    let before = ready.device.log().len();
    let cooperative = [LaunchAttribute::new(COOPERATIVE, [1; 64])];
    let singles: [LaunchKernel<'_>; 3] = [
        launch(SECOND, 17),
        LaunchKernel {
            attributes: Items::new(&cooperative),
            ..launch(FIRST, 17)
        },
        LaunchKernel {
            parameters: &[0; 1025],
            ..launch(FIRST, 17)
        },
    ];
    for single in &singles {
        together(&mut ready, |ready| {
            launches(ready, FIRST, 0..17);
            ready.served.record(single);
            launches(ready, FIRST, 18..35);
        });
    }
    let wanted: Vec<u32> = (0..35).collect();
    assert_eq!(log(&ready, before), wanted.repeat(3));
    assert_eq!(calls(&ready.device)[1], 6);
}

#[test]
fn streams_by_turns_make_chains_of_their_own() {
    let mut ready = ready(Plan::Always);
    let before = ready.device.log().len();
    together(&mut ready, |ready| {
        launches(ready, FIRST, 0..1);
        for run in 0..7 {
            launches(ready, 1 + run % STREAMS, run * 16 + 1..run * 16 + 17);
        }
    });
    assert_eq!(log(&ready, before), (0..113).collect::<Vec<_>>());
    assert_eq!(calls(&ready.device), [1, 7, STREAMS as usize]);
}

#[test]
fn threads_on_streams_of_their_own_fill_chains_side_by_side() {
    let mut ready = ready(Plan::Always);
    let before = ready.device.log().len();
    const THREADS: u32 = 4;
    together(&mut ready, |ready| {
        for number in 0..THREADS * 64 {
            let thread = u16::try_from(1 + number % THREADS).unwrap();
            let on = launch(thread.into(), number);
            ready.served.record_by(thread, &on);
            if number % 100 == 99 {
                let fence = fence(thread.into(), 20, number.into());
                ready.served.record_by(thread, &fence);
            }
        }
    });
    let log = log(&ready, before);
    assert_eq!(log.len(), 4 * 64);
    for thread in 0..THREADS {
        let own = log.iter().filter(|number| *number % THREADS == thread);
        assert!(own.is_sorted(), "stream of thread {thread}");
    }
    let [single, chained, _] = calls(&ready.device);
    assert!(chained <= 4 * 4 + 12, "{chained} chains, {single} single");
}

#[test]
fn a_lone_launch_does_not_wait_for_other_threads_for_long() {
    let mut ready = ready(Plan::Always);
    let before = ready.device.log().len();
    together(&mut ready, |ready| {
        ready.served.record_by(1, &launch(FIRST, 1000));
        ready.served.record_by(2, &launch(SECOND, 0));
        ready.served.record_by(1, &launch(FIRST, 1001));
        for number in 1..1000 {
            ready.served.record_by(2, &launch(SECOND, number));
        }
    });
    let log = log(&ready, before);
    let place = log.iter().position(|number| *number == 1001).unwrap();
    assert!(place < 140, "{place}");
    let seconds = log.iter().filter(|number| **number < 1000);
    assert!(seconds.is_sorted());
}

#[test]
fn one_threads_launches_and_those_of_the_legacy_stream_keep_their_order() {
    const LEGACY: u32 = 0;
    const APART: u32 = 3;
    // Threads and streams of two runs, and whether the second may not overtake the first.
    let cases = [
        ((1, FIRST), (1, SECOND), true),
        ((0, FIRST), (2, SECOND), true),
        ((1, FIRST), (2, LEGACY), true),
        ((1, LEGACY), (2, FIRST), true),
        ((1, FIRST), (2, SECOND), false),
        ((1, APART), (2, LEGACY), false),
        ((1, LEGACY), (2, APART), false),
    ];
    for ((thread, on), (other, elsewhere), ordered) in cases {
        let mut ready = ready(Plan::Always);
        // Both streams are known afterwards.
        let before = ready.device.log().len();
        together(&mut ready, |ready| {
            for number in 0..3 {
                ready.served.record_by(thread, &launch(on, number));
            }
            for number in 3..20 {
                ready.served.record_by(other, &launch(elsewhere, number));
            }
        });
        let log = log(&ready, before);
        assert_eq!(log.len(), 20);
        let case = format!("{thread} on {on}, {other} on {elsewhere}");
        assert_eq!(log.is_sorted(), ordered, "{case}: {log:?}");
    }
}

#[test]
fn launches_with_attributes_events_or_many_parameters_stay_single() {
    let mut ready = ready(Plan::Always);
    let mut value = [0; 64];
    value[..8].copy_from_slice(&event().to_wire().to_le_bytes());
    let events = [LaunchAttribute::new(LAUNCH_COMPLETION_EVENT, value)];
    let long = [0; 1025];
    together(&mut ready, |ready| {
        for _ in 0..20 {
            ready.served.record(&launch_with(&events));
            ready.served.record(&LaunchKernel {
                parameters: &long,
                ..launch(FIRST, 1)
            });
            ready.served.record(&LaunchKernel {
                attributes: Items::new(&[LaunchAttribute::new(COOPERATIVE, [1; 64])]),
                ..launch(FIRST, 2)
            });
        }
    });
    assert_eq!(calls(&ready.device), [60, 0, 0]);
}

#[test]
fn a_stream_with_attributes_has_no_chains() {
    let mut ready = ready(Plan::Always);
    ready.call(&StreamSetAttribute {
        stream: stream(FIRST),
        id: 3,
        value: [1; 64],
    });
    together(&mut ready, |ready| launches(ready, FIRST, 0..50));
    assert_eq!(calls(&ready.device), [50, 0, 0]);
    together(&mut ready, |ready| launches(ready, SECOND, 0..17));
    assert_eq!(calls(&ready.device), [51, 1, 1]);
}

#[test]
fn kernels_by_turns_have_a_chain_for_each_order() {
    let mut ready = ready(Plan::Always);
    let other = ready.other_kernel();
    let before = ready.device.log().len();
    for round in 0..10 {
        together(&mut ready, |ready| {
            for number in round * 33..round * 33 + 33 {
                let mut launch = launch(FIRST, number);
                if number % 2 == 1 {
                    launch.function = other;
                }
                ready.served.record(&launch);
            }
        });
    }
    assert_eq!(log(&ready, before), (0..330).collect::<Vec<_>>());
    assert_eq!(calls(&ready.device), [10, 20, 2]);
}

#[test]
fn a_kernel_that_goes_into_no_chain_is_launched_in_its_place() {
    let mut ready = ready(Plan::Always);
    let other = ready.other_kernel();
    // A kernel has the number of its module there.
    let raw = RawFunction(ready.device.last_made());
    *ready.device.unchained.lock().unwrap() = Some(raw);
    let before = ready.device.log().len();
    for round in 0..3 {
        together(&mut ready, |ready| {
            for number in round * 33..round * 33 + 33 {
                let mut launch = launch(FIRST, number);
                if number % 33 == 20 {
                    launch.function = other;
                }
                ready.served.record(&launch);
            }
        });
    }
    assert_eq!(log(&ready, before), (0..99).collect::<Vec<_>>());
    assert_eq!(ready.served.status.load(), None);
}

#[test]
fn a_launch_that_fails_in_a_chain_ends_the_session() {
    let mut ready = ready(Plan::Always);
    ready.device.fails.store(20, Ordering::Relaxed);
    at_once(&mut ready, |ready| launches(ready, FIRST, 0..33));
    ready.ask(&MemGetInfo {});
    let stream = stream(FIRST);
    ready.served.ask(1, 1, &StreamQuery { stream });
    ready.served.answer(1, 1);
    let cause = ready.served.status.load();
    assert_eq!(
        cause.map(|cause| cause.result),
        Some(CuResult::LAUNCH_FAILED.0)
    );
}

#[test]
fn chains_go_with_their_stream_their_functions_and_their_context() {
    type End = fn(&mut Ready);
    let ends: [(&str, End); 3] = [
        ("destroy_stream", |ready| {
            ready.served.record(&StreamDestroy {
                stream: stream(FIRST),
            });
        }),
        ("unload", |ready| {
            ready.call(&ModuleUnload { module: handle(1) });
        }),
        ("reset", |ready| {
            ready.call(&ContextReset {});
        }),
    ];
    for (call, end) in ends {
        let mut ready = ready(Plan::Always);
        together(&mut ready, |ready| {
            launches(ready, FIRST, 0..17);
            launches(ready, SECOND, 17..33);
        });
        let [_, _, made] = calls(&ready.device);
        assert_eq!(made, 2);
        ready.device.hold(call);
        let gone = match call {
            "destroy_stream" => 1,
            _ => 2,
        };
        let device = std::sync::Arc::clone(&ready.device);
        let release = std::thread::spawn(move || {
            device.wait_for(call, 1);
            let destroyed = device.arrivals("destroy_chain");
            device.let_go(call);
            destroyed
        });
        end(&mut ready);
        ready.ask(&MemGetInfo {});
        assert_eq!(release.join().unwrap(), gone, "before {call}");
    }
}

#[test]
fn a_device_without_room_for_chains_launches_all_the_same() {
    let mut ready = ready(Plan::Always);
    ready.device.lacks_memory.store(true, Ordering::Relaxed);
    let before = ready.device.log().len();
    for round in 0..4 {
        together(&mut ready, |ready| {
            launches(ready, FIRST, round * 50..round * 50 + 50);
        });
    }
    assert_eq!(log(&ready, before), (0..200).collect::<Vec<_>>());
    let [single, chained, created] = calls(&ready.device);
    assert_eq!((single, chained, created), (200, 0, 1));
}

#[test]
fn measured_chains_begin_after_many_launches() {
    let mut ready = ready(Plan::Measured);
    let before = ready.device.log().len();
    let mut number = 0;
    for _ in 0..200 {
        together(&mut ready, |ready| {
            launches(ready, FIRST, number..number + 33);
        });
        number += 33;
    }
    assert_eq!(log(&ready, before), (0..number).collect::<Vec<_>>());
    let counters = ready.served.counters.read();
    let chained = counters.get(Counter::ChainedLaunches);
    assert!(
        (3000..=6600 - 1024).contains(&chained),
        "{chained} of {number}"
    );
}
