//! Number of sessions that begin together, as the recent past has it: so many spare workers are useful.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Time after its beginning in which a session that has not ended counts as begun together with the next one.
pub(super) const TOGETHER: Duration = Duration::from_secs(1);
/// Time for which a beginning counts.
const MEMORY: Duration = Duration::from_secs(120);
/// Beginnings that are remembered.
const MOST: usize = 64;

/// Beginnings of the last sessions.
#[derive(Debug, Default)]
pub(super) struct Demand {
    /// Time of each, and the number of sessions that had begun together by then.
    begun: VecDeque<(Instant, usize)>,
}

impl Demand {
    /// Notes that a session begins, as one of `together`.
    pub fn note(&mut self, now: Instant, together: usize) {
        if self.begun.len() == MOST {
            self.begun.pop_front();
        }
        self.begun.push_back((now, together));
    }

    /// Returns the greatest number of sessions that have begun together.
    pub fn peak(&self, now: Instant) -> usize {
        let remembered = self.begun.iter().filter(|(at, _)| *at + MEMORY > now);
        remembered.map(|(_, together)| *together).max().unwrap_or(0)
    }

    /// Returns the next time at which a beginning is forgotten.
    pub fn fades(&self, now: Instant) -> Option<Instant> {
        let mut ends = self.begun.iter().map(|(at, _)| *at + MEMORY);
        ends.find(|end| *end > now)
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
        for (seconds, together) in [(0, 1), (1, 3), (60, 2)] {
            demand.note(at(seconds), together);
        }
        assert_eq!(demand.peak(at(60)), 3);
        assert_eq!(demand.fades(at(60)), Some(at(120)));
        assert_eq!(demand.peak(at(121)), 2);
        assert_eq!(demand.fades(at(121)), Some(at(180)));
        assert_eq!(demand.peak(at(180)), 0);
        assert_eq!(demand.fades(at(180)), None);
    }

    #[test]
    fn a_flood_of_sessions_takes_no_more_memory() {
        let mut demand = Demand::default();
        let now = Instant::now();
        (0..10_000).for_each(|together| demand.note(now, together));
        assert_eq!(demand.begun.len(), MOST);
    }
}
