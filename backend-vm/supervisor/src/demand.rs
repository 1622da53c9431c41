//! Number of sessions that begin together, as the recent past has it: so many spare workers are useful.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Time after its beginning in which a session that has not ended counts as begun together with the next one.
pub(super) const TOGETHER: Duration = Duration::from_secs(1);
/// Time for which a beginning counts.
const MEMORY: Duration = Duration::from_secs(120);

/// Beginnings of the last sessions.
#[derive(Debug, Default)]
pub(super) struct Demand {
    /// Time of a beginning, and the number of sessions that had begun together by then. Each number is greater than those
    /// behind it: an older one that is not would never count again.
    begun: VecDeque<(Instant, usize)>,
}

impl Demand {
    /// Notes that a session begins, as one of `together`.
    pub fn note(&mut self, now: Instant, together: usize) {
        while self.begun.back().is_some_and(|(_, less)| *less <= together) {
            self.begun.pop_back();
        }
        self.begun.push_back((now, together));
    }

    /// Returns the greatest number of sessions that have begun together.
    pub fn peak(&self, now: Instant) -> usize {
        self.remembered(now).next().map_or(0, |(_, most)| *most)
    }

    /// Returns the next time at which a beginning is forgotten.
    pub fn fades(&self, now: Instant) -> Option<Instant> {
        self.remembered(now).next().map(|(at, _)| *at + MEMORY)
    }

    fn remembered(&self, now: Instant) -> impl Iterator<Item = &(Instant, usize)> {
        self.begun.iter().filter(move |(at, _)| *at + MEMORY > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_sessions_together_count_until_they_are_forgotten() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut demand = Demand::default();
        assert_eq!((demand.peak(start), demand.fades(start)), (0, None));
        for (seconds, together) in [(0, 1), (1, 3), (60, 2), (61, 1)] {
            demand.note(at(seconds), together);
        }
        assert_eq!(demand.peak(at(60)), 3);
        assert_eq!(demand.fades(at(60)), Some(at(121)));
        assert_eq!(demand.peak(at(121)), 2);
        assert_eq!(demand.fades(at(121)), Some(at(180)));
        assert_eq!(demand.peak(at(180)), 1);
        assert_eq!(demand.peak(at(181)), 0);
        assert_eq!(demand.fades(at(181)), None);
    }

    #[test]
    fn a_flood_of_sessions_takes_no_more_memory_and_hides_no_peak() {
        let mut demand = Demand::default();
        let now = Instant::now();
        demand.note(now, 8);
        (0..10_000).for_each(|session| demand.note(now, 1 + session % 7));
        assert_eq!(demand.peak(now), 8);
        assert!(demand.begun.len() <= 8);
    }
}
