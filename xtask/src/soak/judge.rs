//! Distinguishes a stalled lane from a slow one and from one whose threads get no processor.
//!
//! A lane *moves* between two looks if
//! - a counter of its workers or supervisor has changed (messages taken, requests, registrar's tasks, fence values),
//! - a thread of its processes has started or ended, or
//! - its threads executed for at least a part of the time that a busy thread got. A polling thread does not count: its
//!   turns on a processor are short and few. Waits in the frontend and the CPU device's watcher poll every millisecond.
//!
//! A lane that does not move is *starved* if one of its threads, or one of the processes that serve it, was ready to
//! execute and waited for a processor: for the whole interval, or for half of it in turns of at least [`LONG_WAIT`]. A
//! polling thread gets its turn, finds nothing and sleeps, so it does not count here either unless the machine
//! schedules it less than about ten times a second.
//!
//! Otherwise the lane *stands*: none of its threads is ready to execute, and nothing has happened. Wormhole is the
//! cause.
//!
//! A livelock executes, so it counts as movement here; the time limit of a run finds it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Divisor of a busy thread's execution time. A lane moves if it executes for at least the quotient.
const PART: u32 = 20;
/// Least execution time that counts as movement.
const LEAST: Duration = Duration::from_millis(20);
/// A thread polls if its turns on a processor are shorter than this on average
const SHORT_TURN: Duration = Duration::from_micros(200);
/// and if it has at most this many turns in a second.
const FEW_TURNS: u32 = 1500;
/// Average wait for a turn from which a thread counts as starved.
const LONG_WAIT: Duration = Duration::from_millis(100);

/// State of a thread, from `/proc/PID/task/TID/stat` and `schedstat` (sched-stats.rst of the kernel's documentation).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thread {
    pub state: char,
    pub executed: Duration,
    /// Time on run queues. The kernel adds a wait when the thread gets its turn.
    pub waited: Duration,
    /// Turns on a processor.
    pub turns: u64,
}

/// Snapshot of a lane.
#[derive(Clone, Debug)]
pub struct Look {
    pub at: Instant,
    /// Threads of the lane's own processes, by thread id.
    pub own: BTreeMap<i32, Thread>,
    /// Threads of processes that serve other lanes as well. They can make the lane starved, but their movement does not
    /// count for it.
    pub serving: BTreeMap<i32, Thread>,
    /// Digest of all counters.
    pub counters: u64,
    /// Execution time of a busy thread.
    pub eager: Duration,
}

/// An interval in which a lane did not move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// This thread got no processor.
    Starved(i32),
    Stands,
}

impl Look {
    /// Returns the execution time since an earlier look, without that of polling threads.
    fn executed_since(&self, before: &Self) -> Duration {
        let interval = self.at.duration_since(before.at);
        let threads = self.own.iter().map(|(number, now)| {
            let then = before.own.get(number);
            let executed = now
                .executed
                .saturating_sub(then.map_or(Duration::ZERO, |then| then.executed));
            let turns = now.turns.saturating_sub(then.map_or(0, |then| then.turns));
            let (short, few) = (
                executed.as_nanos() < SHORT_TURN.as_nanos() * u128::from(turns),
                u128::from(turns) * 1000 <= u128::from(FEW_TURNS) * interval.as_millis(),
            );
            if short && few {
                Duration::ZERO
            } else {
                executed
            }
        });
        threads.sum()
    }

    /// Returns true if the lane has moved since an earlier look.
    fn has_moved_since(&self, before: &Self) -> bool {
        let executed = self.executed_since(before);
        self.counters != before.counters
            || !self.own.keys().eq(before.own.keys())
            || (executed >= LEAST && executed * PART >= self.eager.saturating_sub(before.eager))
    }

    /// Returns a thread that was starved since an earlier look, if any.
    fn starved_since(&self, before: &Self) -> Option<i32> {
        let interval = self.at.duration_since(before.at);
        let starved = |then: &Thread, now: &Thread| {
            let turns = now.turns.saturating_sub(then.turns);
            let waited = now.waited.saturating_sub(then.waited);
            let not_once = turns == 0
                && now.executed == then.executed
                && (then.state, now.state) == ('R', 'R');
            let seldom = waited >= interval / 2
                && waited.as_nanos() >= LONG_WAIT.as_nanos() * u128::from(turns.max(1));
            not_once || seldom
        };
        let threads = [(&self.own, &before.own), (&self.serving, &before.serving)];
        threads.into_iter().find_map(|(now, then)| {
            now.iter().find_map(|(number, now)| {
                let then = then.get(number)?;
                starved(then, now).then_some(*number)
            })
        })
    }
}

/// An interval in which a lane did not move.
#[derive(Clone, Debug)]
pub struct Pause {
    pub begin: Instant,
    pub end: Instant,
    /// Parts of the interval in which the lane stood.
    pub stands: Vec<(Instant, Instant)>,
}

impl Pause {
    pub fn length(&self) -> Duration {
        self.end.duration_since(self.begin)
    }

    /// Returns for how long the lane stood, less the time in which `missing` says that the machine did.
    pub fn stood(&self, missing: impl Fn(Instant, Instant) -> Duration) -> Duration {
        let parts = self.stands.iter().map(|&(begin, end)| {
            end.duration_since(begin)
                .saturating_sub(missing(begin, end))
        });
        parts.sum()
    }
}

/// Judges one lane during one run.
#[derive(Clone, Debug)]
pub struct Judge {
    /// The look at which the lane last moved.
    moved: Look,
    last: Look,
    pause: Pause,
}

impl Judge {
    pub fn new(look: Look) -> Self {
        Self {
            pause: Pause {
                begin: look.at,
                end: look.at,
                stands: Vec::new(),
            },
            last: look.clone(),
            moved: look,
        }
    }

    /// Adds a look. Returns the pause that has ended if the lane has moved.
    pub fn look(&mut self, look: Look) -> Option<Pause> {
        let moved = look.has_moved_since(&self.last) || look.has_moved_since(&self.moved);
        if moved {
            let pause = std::mem::replace(self, Self::new(look)).pause;
            return Some(pause);
        }
        self.pause.end = look.at;
        if self.rest(&look) == Rest::Stands {
            match self.pause.stands.last_mut() {
                Some((_, end)) if *end == self.last.at => *end = look.at,
                _ => self.pause.stands.push((self.last.at, look.at)),
            }
        }
        self.last = look;
        None
    }

    fn rest(&self, look: &Look) -> Rest {
        look.starved_since(&self.last)
            .map_or(Rest::Stands, Rest::Starved)
    }

    /// Returns the current pause.
    pub fn pause(&self) -> &Pause {
        &self.pause
    }

    /// Returns the pause at the end of the run.
    pub fn end(mut self, at: Instant) -> Pause {
        self.pause.end = at;
        self.pause
    }

    /// Returns the execution times since the lane last moved: its own without polls, and a busy thread's.
    pub fn executed(&self) -> (Duration, Duration) {
        (
            self.last.executed_since(&self.moved),
            self.last.eager.saturating_sub(self.moved.eager),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOK: Duration = Duration::from_millis(500);
    const IDLE: Thread = Thread {
        state: 'S',
        executed: Duration::from_secs(1),
        waited: Duration::from_secs(1),
        turns: 1000,
    };

    /// Judges a lane of one program, one worker and a shared supervisor for ten seconds under load, and returns the
    /// longest stand. `step` changes the lane between two looks.
    fn stood(step: impl Fn(u32, &mut Look)) -> Duration {
        let start = Instant::now();
        let mut look = Look {
            at: start,
            own: BTreeMap::from([(10, IDLE), (20, IDLE)]),
            serving: BTreeMap::from([(30, IDLE)]),
            counters: 0,
            eager: Duration::ZERO,
        };
        let mut judge = Judge::new(look.clone());
        let mut pauses = Vec::new();
        for number in 1..=20 {
            look.at = start + LOOK * number;
            look.eager += LOOK / 5;
            step(number, &mut look);
            pauses.extend(judge.look(look.clone()));
        }
        pauses.push(judge.end(look.at));
        let stood = pauses
            .iter()
            .map(|pause| pause.stood(|_, _| Duration::ZERO));
        stood.max().unwrap()
    }

    fn thread(look: &mut Look, number: i32) -> &mut Thread {
        look.own.get_mut(&number).unwrap()
    }

    /// Adds turns on a processor to a thread.
    fn turns(thread: &mut Thread, turns: u32, executed: Duration, waited: Duration) {
        thread.turns += u64::from(turns);
        thread.executed += executed * turns;
        thread.waited += waited * turns;
    }

    #[test]
    fn a_lane_whose_threads_all_sleep_stands() {
        assert_eq!(stood(|_, _| {}), LOOK * 20);
    }

    #[test]
    fn a_lane_of_which_a_thread_polls_stands() {
        let (executed, waited) = (Duration::from_micros(40), Duration::from_millis(1));
        let polls = |look: &mut Look| turns(thread(look, 10), 240, executed, waited);
        assert_eq!(stood(|_, look| polls(look)), LOOK * 20);
        // On a loaded machine its turns come late.
        let waited = Duration::from_millis(30);
        let polls = |look: &mut Look| turns(thread(look, 10), 16, executed, waited);
        assert_eq!(stood(|_, look| polls(look)), LOOK * 20);
    }

    #[test]
    fn a_lane_with_a_stopped_worker_stands_whatever_other_lanes_do() {
        let stopped = |_, look: &mut Look| {
            thread(look, 20).state = 'T';
            let serving = look.serving.get_mut(&30).unwrap();
            turns(
                serving,
                50,
                Duration::from_millis(1),
                Duration::from_millis(5),
            );
        };
        assert_eq!(stood(stopped), LOOK * 20);
    }

    #[test]
    fn a_lane_that_takes_messages_slowly_moves() {
        // Two threads wake each other in turn: short turns with a long wait before each.
        let hands_over = |number, look: &mut Look| {
            let waited = Duration::from_millis(40);
            turns(thread(look, 10), 5, Duration::from_micros(50), waited);
            turns(thread(look, 20), 5, Duration::from_micros(50), waited);
            look.counters = u64::from(number);
        };
        assert!(stood(hands_over) <= LOOK);
    }

    #[test]
    fn a_lane_that_computes_moves() {
        let computes = |_, look: &mut Look| {
            let (executed, waited) = (Duration::from_millis(3), Duration::from_millis(12));
            turns(thread(look, 20), 10, executed, waited);
        };
        assert!(stood(computes) <= LOOK);
    }

    #[test]
    fn a_lane_that_starts_threads_moves() {
        let starts = |number: u32, look: &mut Look| {
            look.own.insert(100 + number.cast_signed(), IDLE);
        };
        assert!(stood(starts) <= LOOK);
    }

    #[test]
    fn a_lane_with_a_thread_that_gets_no_processor_is_starved() {
        let ready = |_, look: &mut Look| thread(look, 20).state = 'R';
        assert!(stood(ready) <= LOOK);
        // A thread of its supervisor.
        let ready = |_, look: &mut Look| look.serving.get_mut(&30).unwrap().state = 'R';
        assert!(stood(ready) <= LOOK);
        // A thread that gets a short turn three times in a second.
        let seldom = |number: u32, look: &mut Look| {
            let waited = Duration::from_millis(330);
            turns(
                thread(look, 20),
                1 + number % 2,
                Duration::from_millis(1),
                waited,
            );
        };
        assert!(stood(seldom) <= LOOK);
    }

    #[test]
    fn time_in_which_a_lane_was_starved_is_not_counted_as_standing() {
        let half = |number: u32, look: &mut Look| {
            thread(look, 20).state = if number < 12 { 'R' } else { 'S' };
        };
        let stood = stood(half);
        assert!(stood < LOOK * 11, "{stood:?}");
        assert!(stood > LOOK * 7, "{stood:?}");
    }

    #[test]
    fn time_in_which_the_machine_stood_is_not_counted() {
        let begin = Instant::now();
        let pause = Pause {
            begin,
            end: begin + Duration::from_secs(8),
            stands: vec![(begin, begin + Duration::from_secs(8))],
        };
        let missing = |_, _| Duration::from_secs(4);
        assert_eq!(pause.stood(missing), Duration::from_secs(4));
    }
}
