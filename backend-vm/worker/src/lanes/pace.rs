//! Decision whether launches go to lanes.
//!
//! A lane costs a hand-over of some 0.2 µs, and a thread. It pays off while launches of several streams wait in the ring:
//! then the executor is what limits them. So the executor counts, and decides at the end of each window of launches.

use wormhole_device::RawStream;

/// Launches of a window.
const WINDOW: u32 = 128;
/// Least changes of the stream from one launch to the next in a window that goes to lanes.
const CHANGES: u32 = 4;
/// Part of a window's launches that may have another message beside them, or make the executor wait for a lane.
const OTHERS: u32 = WINDOW / 4;
/// Launches of a window that found all lanes without work, after which launches do not go to lanes any more.
const LONELY: u32 = WINDOW / 2;
/// Windows without lanes after lanes did not pay off.
const PAUSE: u32 = 8;
/// Windows after which streams get lanes anew, so that those that have work spread over all.
const ROUND: u32 = 8;

/// Stream of a launch, with the number of its device.
type Key = (usize, RawStream);

#[derive(Debug)]
pub(super) struct Pace {
    always: bool,
    engaged: bool,
    /// Counts of this window.
    launches: u32,
    changes: u32,
    others: u32,
    waits: u32,
    lonely: u32,
    /// Windows to come before launches may go to lanes.
    pause: u32,
    /// Windows since streams got lanes anew.
    windows: u32,
    round: u64,
    last: Key,
    /// Whether the lanes were seen without work since the last launch.
    rested: bool,
}

impl Pace {
    pub fn new(always: bool) -> Self {
        Self {
            always,
            engaged: always,
            launches: 0,
            changes: 0,
            others: 0,
            waits: 0,
            lonely: 0,
            pause: 0,
            windows: 0,
            round: 1,
            last: (0, RawStream::LEGACY),
            rested: false,
        }
    }

    /// Counts a launch. Returns whether it goes to a lane.
    #[inline]
    pub fn launched(&mut self, stream: Key) -> bool {
        self.launches += 1;
        if stream != self.last {
            self.changes += 1;
            self.last = stream;
        }
        if self.rested {
            self.rested = false;
            self.lonely += 1;
        }
        if self.launches == WINDOW {
            self.decide();
        }
        self.engaged
    }

    /// Counts a message that is neither a launch nor a fence.
    #[inline]
    pub fn other(&mut self) {
        self.others += 1;
    }

    /// Counts a wait of the executor for a lane.
    #[inline]
    pub fn waited(&mut self) {
        self.waits += 1;
    }

    /// Notes that the ring is empty, and whether a lane has work. Without lanes the executor keeps up, so none is needed.
    #[inline]
    pub fn idle(&mut self, lanes_work: bool) {
        if self.engaged {
            self.rested = !lanes_work;
        } else {
            self.clear();
        }
    }

    /// Returns the number of times that streams got lanes anew, from 1 on.
    #[inline]
    pub fn round(&self) -> u64 {
        self.round
    }

    fn clear(&mut self) {
        self.launches = 0;
        self.changes = 0;
        self.others = 0;
        self.waits = 0;
        self.lonely = 0;
    }

    #[cold]
    fn decide(&mut self) {
        let interleave = self.changes >= CHANGES && self.others <= OTHERS;
        let pays_off = interleave && self.waits <= OTHERS && self.lonely <= LONELY;
        let engaged = self.always || (pays_off && self.pause == 0);
        if self.engaged && !engaged {
            self.pause = PAUSE;
        } else {
            self.pause = self.pause.saturating_sub(1);
        }
        self.windows += 1;
        if self.windows == ROUND || (engaged && !self.engaged) {
            self.windows = 0;
            self.round += 1;
        }
        self.engaged = engaged;
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launches(pace: &mut Pace, streams: u64, count: u32) -> bool {
        let mut engaged = pace.engaged;
        for _ in 0..count {
            let stream = u64::from(pace.launches) % streams;
            engaged = pace.launched((0, RawStream(16 * (1 + stream))));
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
        assert!(!launches(&mut pace, 2, WINDOW - 1));
        assert!(launches(&mut pace, 2, 1));
        let round = pace.round();
        assert!(launches(&mut pace, 8, 20 * WINDOW));
        assert!(pace.round() > round, "streams get lanes anew");
        assert!(!launches(&mut pace, 1, WINDOW));
        assert!(!launches(&mut pace, 8, PAUSE * WINDOW), "too early");
        assert!(launches(&mut pace, 8, WINDOW));
    }

    #[test]
    fn an_executor_that_keeps_up_needs_no_lanes() {
        let mut pace = Pace::new(false);
        for _ in 0..100 {
            assert!(!launches(&mut pace, 8, WINDOW - 1));
            pace.idle(false);
        }
    }

    #[test]
    fn lanes_that_are_mostly_without_work_are_given_up() {
        let mut pace = Pace::new(false);
        assert!(launches(&mut pace, 8, WINDOW));
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
            assert!(launches(&mut pace, 8, WINDOW));
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
