use alloc::collections::{BTreeMap, BTreeSet};

use super::Run;

/// Set of segments as runs, none beside another. Each operation but iteration takes logarithmic time in their number.
#[derive(Clone, Debug, Default)]
pub(super) struct Runs {
    /// Number of segments of each run by its first one.
    counts: BTreeMap<u32, u32>,
    /// The same runs, the shortest first.
    by_count: BTreeSet<(u32, u32)>,
}

impl Runs {
    pub(super) fn is_empty(&self) -> bool {
        self.counts.is_empty()
    }

    /// Returns the runs in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = Run> {
        let runs = self.counts.iter();
        runs.map(|(&first, &count)| Run { first, count })
    }

    /// Returns the run that contains a segment.
    pub(super) fn at(&self, segment: u32) -> Option<Run> {
        let (&first, &count) = self.counts.range(..=segment).next_back()?;
        (segment - first < count).then_some(Run { first, count })
    }

    /// Returns the first segment of a run that is not in the set.
    pub(super) fn missing(&self, run: Run) -> Option<u32> {
        let end = run.first.saturating_add(run.count);
        let reached = self.at(run.first);
        let reached = reached.map_or(run.first, |own| own.first + own.count);
        (reached < end).then_some(reached)
    }

    /// Returns the shortest run of at least `count` segments, of several the first.
    pub(super) fn shortest(&self, count: u32) -> Option<Run> {
        let (count, first) = *self.by_count.range((count, 0)..).next()?;
        Some(Run { first, count })
    }

    /// Returns the first `count` segments in a row between `first` and `end`. Takes time for each run between them.
    pub(super) fn within(&self, count: u32, first: u32, end: u32) -> Option<Run> {
        let start = self.at(first).map_or(first, |run| run.first);
        let runs = self.counts.range(start..end.max(start));
        let mut parts =
            runs.map(|(&own, &segments)| (own.max(first), own.saturating_add(segments).min(end)));
        let (first, _) = parts.find(|(start, stop)| stop.saturating_sub(*start) >= count)?;
        Some(Run { first, count })
    }

    /// Returns the number of segments of the longest run, 0 without any.
    pub(super) fn longest(&self) -> u32 {
        self.by_count.last().map_or(0, |(count, _)| *count)
    }

    /// Adds a run and joins it with its neighbours. No segment of the run is in the set before.
    pub(super) fn insert(&mut self, run: Run) {
        let mut joined = run;
        if let Some(before) = run.first.checked_sub(1).and_then(|last| self.at(last)) {
            self.drop(before);
            joined.first = before.first;
            joined.count += before.count;
        }
        if let Some(after) = self.at(run.first + run.count) {
            self.drop(after);
            joined.count += after.count;
        }
        self.put(joined);
    }

    /// Removes a run. All its segments are in the set before.
    pub(super) fn remove(&mut self, run: Run) {
        let Some(whole) = self.at(run.first) else {
            return;
        };
        self.drop(whole);
        let before = run.first - whole.first;
        self.put(Run {
            count: before,
            ..whole
        });
        self.put(Run {
            first: run.first + run.count,
            count: whole.count - before - run.count,
        });
    }

    fn put(&mut self, run: Run) {
        if run.count > 0 {
            self.counts.insert(run.first, run.count);
            self.by_count.insert((run.count, run.first));
        }
    }

    fn drop(&mut self, run: Run) {
        self.counts.remove(&run.first);
        self.by_count.remove(&(run.count, run.first));
    }
}
