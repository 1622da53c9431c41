//! The sixteen barriers of a block, and the one of its cluster (PTX ISA 9.7.13.1).

use crate::error::FaultKind;

/// Number of barriers that kernels can name.
const NAMED: usize = 16;
/// Index of the cluster's barrier. A cluster is one block.
pub(super) const CLUSTER: usize = NAMED;
/// Number of all barriers.
pub(super) const COUNT: usize = NAMED + 1;

/// Result of a reduction at a barrier.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Reduction {
    pub count: u32,
    pub all: bool,
    pub any: bool,
}

#[derive(Debug, Clone, Copy, Default)]
struct State {
    arrived: u32,
    /// Number of threads that must arrive; all of the block if absent.
    expected: Option<u32>,
    /// Number of threads that arrived. `arrived` is higher if a partial warp counted as a full one.
    threads: u32,
    holds: u32,
    generation: u32,
    result: Reduction,
}

/// Barriers of a block, and the number of threads that may still arrive.
#[derive(Debug)]
pub(super) struct Barriers {
    states: [State; COUNT],
    live: u32,
}

impl Barriers {
    pub(super) fn new(live: u32) -> Self {
        Self {
            states: [State::default(); COUNT],
            live,
        }
    }

    /// Returns the number of threads of the block that have not ended.
    pub(super) fn live(&self) -> u32 {
        self.live
    }

    pub(super) fn generation(&self, id: usize) -> u32 {
        self.states[id].generation
    }

    pub(super) fn result(&self, id: usize) -> Reduction {
        self.states[id].result
    }

    /// Counts the arrival of `threads` threads, `holds` of them with a true predicate. If `whole`, they
    /// are all living threads of their warp, and count as a full warp. Returns the barrier's index and
    /// its generation, which changes when the barrier completes.
    pub(super) fn arrive(
        &mut self,
        id: u64,
        expected: Option<u32>,
        threads: u32,
        holds: u32,
        whole: bool,
    ) -> Result<(usize, u32), FaultKind> {
        let index = usize::try_from(id).ok().filter(|&id| id < NAMED);
        let index = index.ok_or(FaultKind::IllegalInstruction(
            "a barrier's number is above 15",
        ))?;
        if expected.is_some_and(|count| count == 0 || count % 32 != 0) {
            return Err(FaultKind::IllegalInstruction(
                "a barrier's thread count is not a multiple of 32",
            ));
        }
        let generation = self.count(index, expected, threads, holds, whole);
        Ok((index, generation))
    }

    /// Counts the arrival of threads at the cluster's barrier. Returns its generation, which changes when
    /// it completes.
    pub(super) fn arrive_at_cluster(&mut self, threads: u32) -> u32 {
        self.count(CLUSTER, None, threads, 0, false)
    }

    fn count(
        &mut self,
        index: usize,
        expected: Option<u32>,
        threads: u32,
        holds: u32,
        whole: bool,
    ) -> u32 {
        let state = &mut self.states[index];
        let generation = state.generation;
        state.arrived += if expected.is_some() && whole {
            32
        } else {
            threads
        };
        state.expected = expected;
        state.threads += threads;
        state.holds += holds;
        self.complete(index);
        generation
    }

    /// Counts threads that end, which may complete the barriers at which others wait.
    pub(super) fn leave(&mut self, threads: u32) {
        self.live = self.live.saturating_sub(threads);
        for index in 0..COUNT {
            if self.states[index].arrived > 0 {
                self.complete(index);
            }
        }
    }

    fn complete(&mut self, index: usize) {
        let state = &mut self.states[index];
        if state.arrived >= state.expected.unwrap_or(self.live) {
            let result = Reduction {
                count: state.holds,
                all: state.holds == state.threads,
                any: state.holds > 0,
            };
            let generation = state.generation.wrapping_add(1);
            *state = State {
                generation,
                result,
                ..State::default()
            };
        }
    }
}
