//! Decision whether launches go to lanes.
//!
//! A lane costs a hand-over of some 0.2 µs, and a thread. It pays off while launches of several streams wait in the ring:
//! then the executor is what limits them. So the executor counts, and decides at the end of each window of launches.
//!
//! Several threads that launch on streams of their own fill the ring by turns. A thread that waits until its stream has room
//! writes some hundred launches at once afterwards, so a window must be longer than several of these runs.

use wormhole_device::RawStream;

/// Launches of a window, and those of eight full batches of a stream.
const WINDOW: u32 = 2048;
/// Launches after which lanes may begin already.
const GLANCE: u32 = 128;
/// Least changes of stream and thread from one launch to the next with which lanes begin.
const CHANGES: u32 = 4;
/// Least changes in a window after which launches go on to lanes.
const TURNS: u32 = 2;
/// Windows without lanes after lanes did not pay off.
const PAUSE: u32 = 2;
/// Windows after which streams get lanes anew, so that those that have work spread over all.
const ROUND: u32 = 2;

/// Stream of a launch, with the number of its device.
type Key = (usize, RawStream);

/// Counts of a window.
#[derive(Debug, Default)]
struct Counts {
    launches: u32,
    /// Changes of stream and thread from one launch to the next.
    changes: u32,
    /// Messages that are neither launches nor fences.
    others: u32,
    /// Waits of the executor for a lane.
    waits: u32,
    /// Launches that found executor and lanes without work.
    lonely: u32,
}

impl Counts {
    /// Returns whether at most one in so many launches is among the counted.
    fn is_at_most(&self, counted: u32, one_in: u32) -> bool {
        counted * one_in <= self.launches
    }
}

#[derive(Debug)]
pub(super) struct Pace {
    always: bool,
    engaged: bool,
    counts: Counts,
    /// Windows to come before launches may go to lanes.
    pause: u32,
    /// Windows since streams got lanes anew.
    windows: u32,
    round: u64,
    last: Key,
    /// Thread of the last launch.
    thread: u16,
    /// Whether executor and lanes were seen without work since the last launch.
    rested: bool,
}

impl Pace {
    pub fn new(always: bool) -> Self {
        Self {
            always,
            engaged: always,
            counts: Counts::default(),
            pause: 0,
            windows: 0,
            round: 1,
            last: (0, RawStream::LEGACY),
            thread: 0,
            rested: false,
        }
    }

    /// Counts a launch. Returns whether it goes to a lane.
    #[inline]
    pub fn launched(&mut self, stream: Key, thread: u16) -> bool {
        self.counts.launches += 1;
        if stream != self.last {
            self.counts.changes += u32::from(thread == 0 || thread != self.thread);
            self.last = stream;
        }
        self.thread = thread;
        if self.rested {
            self.rested = false;
            self.counts.lonely += 1;
        }
        if self.counts.launches == WINDOW {
            self.decide();
        } else if !self.engaged && self.counts.launches.is_multiple_of(GLANCE) && self.begins() {
            self.engage();
            self.counts = Counts::default();
        }
        self.engaged
    }

    /// Counts a message that is neither a launch nor a fence.
    #[inline]
    pub fn other(&mut self) {
        self.counts.others += 1;
    }

    /// Counts a wait of the executor for a lane.
    #[inline]
    pub fn waited(&mut self) {
        self.counts.waits += 1;
    }

    /// Notes that the ring is empty, and whether a lane has work.
    #[inline]
    pub fn idle(&mut self, lanes_work: bool) {
        self.rested = !lanes_work;
    }

    /// Returns the number of times that streams got lanes anew, from 1 on.
    #[inline]
    pub fn round(&self) -> u64 {
        self.round
    }

    /// Returns whether lanes would pay off by the launches since the last decision.
    #[cold]
    fn begins(&self) -> bool {
        let counts = &self.counts;
        self.pause == 0
            && counts.changes >= CHANGES
            && counts.is_at_most(counts.others, 4)
            && counts.is_at_most(counts.lonely, 8)
    }

    fn engage(&mut self) {
        self.engaged = true;
        self.windows = 0;
        self.round += 1;
    }

    #[cold]
    fn decide(&mut self) {
        if self.engaged {
            let counts = &self.counts;
            let pays_off = counts.changes >= TURNS
                && counts.is_at_most(counts.others, 4)
                && counts.is_at_most(counts.waits, 4)
                && counts.is_at_most(counts.lonely, 2);
            self.engaged = self.always || pays_off;
            self.pause = if self.engaged { 0 } else { PAUSE };
            self.windows += 1;
            if self.windows == ROUND {
                self.windows = 0;
                self.round += 1;
            }
        } else if self.begins() {
            self.engage();
        } else {
            self.pause = self.pause.saturating_sub(1);
        }
        self.counts = Counts::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launches(pace: &mut Pace, streams: u64, count: u32) -> bool {
        let mut engaged = pace.engaged;
        for _ in 0..count {
            let stream = u64::from(pace.counts.launches) % streams;
            engaged = pace.launched((0, RawStream(16 * (1 + stream))), 0);
        }
        engaged
    }

    #[test]
    fn one_stream_stays_with_the_executor() {
        let mut pace = Pace::new(false);
        assert!(!launches(&mut pace, 1, 100 * WINDOW));
    }

    #[test]
    fn streams_that_interleave_get_lanes_until_they_do_not_any_more() {
        let mut pace = Pace::new(false);
        assert!(!launches(&mut pace, 2, GLANCE - 1));
        assert!(launches(&mut pace, 2, 1));
        let round = pace.round();
        assert!(launches(&mut pace, 8, 20 * WINDOW));
        assert!(pace.round() > round, "streams get lanes anew");
        assert!(!launches(&mut pace, 1, 2 * WINDOW));
        let engaged = launches(&mut pace, 8, (PAUSE - 1) * WINDOW);
        assert!(!engaged, "too early");
        assert!(launches(&mut pace, 8, WINDOW));
    }

    #[test]
    fn one_thread_stays_with_the_executor_whatever_its_streams() {
        let mut pace = Pace::new(false);
        for number in 0..u64::from(20 * WINDOW) {
            assert!(!pace.launched((0, RawStream(16 * (1 + number % 8))), 7));
        }
    }

    #[test]
    fn an_executor_that_keeps_up_needs_no_lanes() {
        let mut pace = Pace::new(false);
        for _ in 0..WINDOW {
            assert!(!launches(&mut pace, 8, 7));
            pace.idle(false);
        }
    }

    #[test]
    fn threads_that_write_many_launches_at_once_get_lanes() {
        let mut pace = Pace::new(false);
        for run in 0..16_u16 {
            let number = run % 2;
            for _ in 0..WINDOW / 8 {
                pace.launched((0, RawStream(16 * (1 + u64::from(number)))), 1 + number);
            }
            // Now and then all of them wait.
            pace.idle(false);
        }
        assert!(pace.engaged);
    }

    #[test]
    fn lanes_that_are_mostly_without_work_are_given_up() {
        let mut pace = Pace::new(false);
        assert!(launches(&mut pace, 8, GLANCE));
        for _ in 0..WINDOW {
            pace.idle(true);
            launches(&mut pace, 8, 1);
        }
        assert!(pace.engaged, "lanes still worked when the ring was empty");
        for _ in 0..WINDOW {
            pace.idle(false);
            launches(&mut pace, 8, 1);
        }
        assert!(!pace.engaged);
    }

    #[test]
    fn other_messages_and_waits_for_lanes_speak_against_them() {
        for counts in [Pace::other, Pace::waited] {
            let mut pace = Pace::new(false);
            assert!(launches(&mut pace, 8, GLANCE));
            for _ in 0..WINDOW / 2 {
                launches(&mut pace, 8, 2);
                counts(&mut pace);
            }
            assert!(!pace.engaged);
        }
    }

    #[test]
    fn a_test_has_lanes_always() {
        let mut pace = Pace::new(true);
        assert!(launches(&mut pace, 1, 1));
        pace.idle(false);
        assert!(launches(&mut pace, 1, 3 * WINDOW));
    }
}
