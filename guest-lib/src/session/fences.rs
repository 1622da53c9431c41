//! Allocation of fence words, and their state.

use std::collections::VecDeque;

use wormhole_api::Fence;
use wormhole_ring::fence::FenceIndex;
use wormhole_ring::layout::FENCES;
use wormhole_ring::waits::Wait;

use super::wait::Manner;
use super::{Session, gate};
use crate::error::{CuError, Result};

/// Fences without an owner.
#[derive(Debug, Default)]
pub struct Stock {
    /// Lowest fence that was never allocated.
    fresh: u32,
    /// Freed fences, with the last value requested for each: its write may be under way.
    returned: VecDeque<FenceLine>,
}

/// A fence and the last value that the device was asked to write to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FenceLine {
    pub fence: Fence,
    pub issued: u64,
}

impl Session {
    /// Allocates a fence that has no other owner and no write under way.
    pub fn take_fence(&self) -> Result<FenceLine> {
        let mut stock = self.fence_stock.lock();
        if let Some(line) = stock.returned.pop_front() {
            if self.fence_passed(line.fence, line.issued) {
                return Ok(line);
            }
            stock.returned.push_back(line);
        }
        if (stock.fresh as usize) < FENCES {
            let fence = Fence::new(stock.fresh).ok_or(CuError::UNKNOWN)?;
            stock.fresh += 1;
            return Ok(FenceLine { fence, issued: 0 });
        }
        let free = stock
            .returned
            .iter()
            .position(|line| self.fence_passed(line.fence, line.issued));
        free.and_then(|index| stock.returned.remove(index))
            .ok_or(CuError::OUT_OF_MEMORY)
    }

    pub fn return_fence(&self, line: FenceLine) {
        self.fence_stock.lock().returned.push_back(line);
    }

    /// Returns true if the device has written at least `value`. This does not prove that the work before succeeded: a
    /// dead context may still write fences. Answers to programs use [`Session::fence_reached`].
    #[inline]
    pub fn fence_passed(&self, fence: Fence, value: u64) -> bool {
        FenceIndex::new(fence.index()).is_some_and(|index| self.fences.load(index) >= value)
    }

    /// Returns true if all work before the fence is complete and has succeeded.
    ///
    /// # Errors
    /// Returns the session's error, if it has ended. The fence is read first: a failure before it is in the status word
    /// by the time the fence is written.
    #[inline]
    pub fn fence_reached(&self, fence: Fence, value: u64) -> Result<bool> {
        let passed = self.fence_passed(fence, value);
        if passed {
            gate::refresh();
        }
        self.alive()?;
        Ok(passed)
    }

    /// Waits until all work before the fence is complete.
    ///
    /// # Errors
    /// As [`Session::fence_reached`].
    #[inline]
    pub fn wait_fence(&self, fence: Fence, value: u64, manner: Manner) -> Result {
        let index = FenceIndex::new(fence.index()).ok_or(CuError::UNKNOWN)?;
        let wait = match manner {
            // The backend wakes no thread that waits for room.
            Manner::Nap => Wait::Room,
            _ => Wait::Fence(index, value),
        };
        if let Some(streams) = self.way.streams() {
            self.told(streams.with(|client| client.wait_fence(index, value)))?;
        }
        let passed = || (self.fences.load(index) >= value).then_some(());
        self.wait_in(manner, wait, passed)?;
        gate::refresh();
        self.alive()
    }
}
