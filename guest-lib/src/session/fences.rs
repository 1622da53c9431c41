//! Fence words, and who has them.

use std::collections::VecDeque;
use std::sync::PoisonError;

use wormhole_api::Fence;
use wormhole_ring::fence::FenceIndex;
use wormhole_ring::layout::FENCES;
use wormhole_ring::waits::Wait;

use super::Session;
use crate::error::{CuError, Result};

/// Fences that nobody has.
#[derive(Debug, Default)]
pub struct Stock {
    /// The lowest fence that was never handed out.
    fresh: u32,
    /// Fences that were given back, with the last value that was asked of each: a write may be under way.
    returned: VecDeque<FenceLine>,
}

/// A fence with its owner, and the last value that the device was asked to write to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FenceLine {
    pub fence: Fence,
    pub issued: u64,
}

impl Session {
    /// A fence that nobody else uses and no write to which is under way.
    pub fn take_fence(&self) -> Result<FenceLine> {
        let mut stock = self
            .fence_stock
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
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
        self.fence_stock
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .returned
            .push_back(line);
    }

    /// Whether the device has written at least `value`. That says nothing of the work before: of a context that is
    /// dead, fences may be written still. Programs are answered by [`Session::fence_reached`].
    #[inline]
    pub fn fence_passed(&self, fence: Fence, value: u64) -> bool {
        FenceIndex::new(fence.index()).is_some_and(|index| self.fences.load(index) >= value)
    }

    /// Whether all work before the fence is complete and has succeeded.
    ///
    /// # Errors
    /// That of the session, if it has ended. The fence is read first: a failure before it is in the status word by
    /// the time that it is written.
    #[inline]
    pub fn fence_reached(&self, fence: Fence, value: u64) -> Result<bool> {
        let passed = self.fence_passed(fence, value);
        self.alive()?;
        Ok(passed)
    }

    /// Waits until all work before the fence is complete.
    ///
    /// # Errors
    /// As [`Session::fence_reached`].
    #[inline]
    pub fn wait_fence(&self, fence: Fence, value: u64) -> Result {
        let wait = Wait::Fence(fence.index(), value);
        self.wait(wait, || self.fence_passed(fence, value).then_some(()))?;
        self.alive()
    }
}
