//! Calls of lanes and of the executor keep the order that a program relies on, in any schedule.
//!
//! One thread sends random work to streams of both kinds, so that the ring has one order. The device logs the order in
//! which calls are made, under random delays. A call that must come behind another of the ring comes behind it in the log.

mod support;

use std::sync::atomic::Ordering;

use support::lanes::{
    ALWAYS, Ready, STREAMS, fence, is_blocking, launch, ready, ready_with, record, wait,
};
use support::served::handle;
use wormhole_api::{MemGetInfo, StreamCreate, StreamDestroy};
use wormhole_backend_tests::random::Random;
use wormhole_worker::lanes::Plan;
use wormhole_worker::{Tuning, chains};

const CALLS: u32 = 60_000;
const LEGACY: u32 = 0;
/// Word of a fence, by stream.
const FENCES: u32 = 10;

/// A call in the ring's order.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Call {
    /// Goes to a lane if the stream is not the legacy stream.
    Launch(u32),
    Fence(u32),
    /// Other work of a stream, which the executor does.
    Work(u32),
    /// Waits for all lanes.
    Other,
}

impl Call {
    fn stream(self) -> Option<u32> {
        match self {
            Self::Launch(on) | Self::Fence(on) | Self::Work(on) => Some(on),
            Self::Other => None,
        }
    }

    /// Returns whether only the executor makes such a call.
    fn is_executors(self) -> bool {
        match self {
            Self::Launch(on) | Self::Fence(on) => on == LEGACY,
            Self::Work(_) | Self::Other => true,
        }
    }

    /// Returns whether this call must be made before a later one.
    fn comes_before(self, later: Self) -> bool {
        if self.is_executors() && later.is_executors() {
            return true;
        }
        match (self.stream(), later.stream()) {
            (Some(LEGACY), Some(on)) | (Some(on), Some(LEGACY)) => is_blocking(on),
            (Some(one), Some(other)) => one == other,
            (None, _) | (_, None) => true,
        }
    }
}

/// Sends random work that is numbered from 0 on, and returns it in order.
fn work(ready: &mut Ready, seed: u64) -> Vec<Call> {
    let random = Random::new(seed);
    let mut sent = Vec::new();
    for number in 0..CALLS {
        let on = u32::try_from(random.below(STREAMS as usize)).unwrap() + 1;
        let on = if random.one_in(40) { LEGACY } else { on };
        let served = &ready.served;
        sent.push(match random.below(400) {
            0..300 => {
                served.record(&launch(on, number));
                Call::Launch(on)
            }
            300..340 => {
                served.record(&fence(on, FENCES + on, number.into()));
                Call::Fence(on)
            }
            340..360 => {
                served.record(&ready.fill(on, number));
                Call::Work(on)
            }
            360..375 => {
                served.record(&record(on, number));
                Call::Work(on)
            }
            375..390 => {
                served.record(&wait(on, number));
                Call::Work(on)
            }
            _ => {
                let new = handle(STREAMS + 1);
                served.record(&StreamCreate {
                    new,
                    flags: number,
                    priority: 0,
                });
                served.record(&StreamDestroy { stream: new });
                Call::Other
            }
        });
    }
    ready.call(&MemGetInfo {});
    sent
}

/// Returns the place of each call in the log.
fn places(log: &[u32], calls: usize) -> Vec<usize> {
    assert_eq!(log.len(), calls, "each call is made once");
    let mut places = vec![usize::MAX; calls];
    for (place, number) in log.iter().enumerate() {
        places[*number as usize] = place;
    }
    assert!(!places.contains(&usize::MAX));
    places
}

/// Calls that are alike: each of them must come before the same later ones.
fn kinds() -> Vec<Call> {
    let streams = LEGACY..=STREAMS;
    let kinds = streams.flat_map(|on| [Call::Launch(on), Call::Fence(on), Call::Work(on)]);
    kinds.chain([Call::Other]).collect()
}

#[test]
fn calls_of_lanes_keep_the_order_that_a_program_relies_on() {
    for seed in 1..4 {
        let mut ready = ready(ALWAYS);
        ready.device.logs_fences.store(true, Ordering::Relaxed);
        let before = ready.device.log().len();
        let sent = work(&mut ready, seed);
        let log = ready.device.log().split_off(before);
        assert_eq!(ready.served.status.load(), None);
        let places = places(&log, sent.len());
        // The last place of each kind so far.
        let mut last: Vec<(Call, usize, usize)> =
            kinds().into_iter().map(|kind| (kind, 0, 0)).collect();
        let mut free = 0;
        for (number, call) in sent.iter().enumerate() {
            for (kind, place, earlier) in &last {
                let is_late = *place > places[number];
                free += usize::from(is_late);
                assert!(
                    !is_late || !kind.comes_before(*call),
                    "call {number} is made before call {earlier} (seed {seed})"
                );
            }
            if let Some(known) = last.iter_mut().find(|(kind, ..)| kind == call)
                && known.1 <= places[number]
            {
                (known.1, known.2) = (places[number], number);
            }
        }
        assert!(
            free > 1000,
            "lanes change the order of what is independent: {free}"
        );
        let threads: std::collections::HashSet<_> =
            ready.device.threads("launch").into_iter().collect();
        assert_eq!(
            threads.len(),
            ALWAYS.most + 1,
            "three lanes and the executor"
        );
    }
}

/// Launches that are collected for chains are made in the ring's order, as all else.
#[test]
fn calls_of_chains_keep_the_order_of_the_ring() {
    for (seed, lanes) in [
        (4, Plan::none()),
        (
            5,
            Plan {
                most: 3,
                always: false,
            },
        ),
    ] {
        let chains = chains::Plan::Always;
        let mut ready = ready_with(Tuning {
            lanes,
            chains,
            ..Tuning::default()
        });
        ready.device.logs_fences.store(true, Ordering::Relaxed);
        let before = ready.device.log().len();
        let sent = work(&mut ready, seed);
        let log = ready.device.log().split_off(before);
        assert_eq!(ready.served.status.load(), None);
        let places = places(&log, sent.len());
        if lanes.most == 0 {
            assert!(places.is_sorted());
        }
        for on in LEGACY..=STREAMS {
            let own = sent.iter().zip(&places);
            let own = own.filter(|(call, _)| call.stream() == Some(on));
            assert!(own.is_sorted_by_key(|(_, place)| *place), "stream {on}");
        }
        let chained = ready.device.arrivals("launch_chain");
        assert!(chained > 100, "{chained}");
    }
}

/// Launches of several streams go to lanes; then one stream alone goes on, and comes back to the executor while its
/// lane still has calls.
#[test]
fn a_stream_that_comes_back_to_the_executor_keeps_its_order() {
    const ROUNDS: u32 = 20;
    const TOGETHER: u32 = 400;
    const ALONE: u32 = 1600;
    let plan = Plan {
        always: false,
        ..ALWAYS
    };
    let mut ready = ready(plan);
    let (calls, before) = (ready.device.arrivals("launch"), ready.device.log().len());
    let mut streams = Vec::new();
    for _ in 0..ROUNDS {
        // All of them are in the ring before the executor looks.
        ready.served.rests.store(true, Ordering::Relaxed);
        for number in 0..TOGETHER + ALONE {
            let on = match number {
                ..TOGETHER => 1 + number % 3,
                _ => 1,
            };
            let number = u32::try_from(streams.len()).unwrap();
            ready.served.record(&launch(on, number));
            streams.push(on);
        }
        ready.served.rests.store(false, Ordering::Relaxed);
        ready.call(&MemGetInfo {});
    }
    let log = ready.device.log().split_off(before);
    let places = places(&log, streams.len());
    for on in 1..=3 {
        let own = streams
            .iter()
            .zip(&places)
            .filter(|(is_on, _)| **is_on == on);
        let own: Vec<_> = own.map(|(_, place)| *place).collect();
        assert!(own.is_sorted(), "stream {on}");
    }
    let threads = ready.device.threads("launch").split_off(calls);
    let moves = threads.windows(2).filter(|pair| pair[0] != pair[1]).count();
    assert!(
        moves > ROUNDS as usize,
        "launches went to lanes and came back: {moves}"
    );
}
