//! Backpressure: callers wait before the driver's own launch call would block on the worker's side.
//!
//! Each batch of operations ends with a fence. A thread that finds three incomplete batches waits for the oldest.

use super::Target;
use super::progress::Progress;
use crate::error::Result;
use crate::object::context::{self, Scope};
use crate::session::Manner;

/// Operations between two automatic fences of a stream.
const BATCH: u64 = 256;
/// Maximum number of incomplete batches of a stream. Their operations, and one more of each thread, stay below the
/// number of launches (about 1021) at which the driver's own call blocks.
pub(super) const BATCHES: usize = 3;
const LIMIT: u64 = BATCH * BATCHES as u64;

impl Target {
    /// Counts an operation that was written to the ring, and makes the caller wait if the stream has too many
    /// incomplete ones.
    #[inline]
    pub fn worked(self, scope: Scope) -> Result {
        self.count(scope, Progress::OPERATION)
    }

    /// Counts a kernel in the same way.
    #[inline]
    pub fn launched(self, scope: Scope) -> Result {
        self.count(scope, Progress::KERNEL)
    }

    #[inline]
    fn count(self, scope: Scope, operation: Progress) -> Result {
        let work = self.stream.work.add(operation).operations();
        if work.is_multiple_of(BATCH) {
            self.end_batch(scope)?;
        }
        let complete = self.stream.complete.load().operations();
        if work.saturating_sub(complete) >= LIMIT {
            self.throttle(scope, work - LIMIT)
        } else {
            Ok(())
        }
    }

    #[cold]
    fn end_batch(self, scope: Scope) -> Result {
        let mut timeline = self.stream.timeline();
        let cover = self.issue(scope, &mut timeline)?;
        timeline.batches.rotate_left(1);
        timeline.batches[BATCHES - 1] = Some(cover);
        Ok(())
    }

    /// Waits until more than `work` operations are complete. Every thread that finds the stream full waits here.
    #[cold]
    fn throttle(self, scope: Scope, work: u64) -> Result {
        let ended = {
            let timeline = self.stream.timeline();
            let covers = timeline.batches.iter().flatten();
            covers.copied().find(|cover| cover.work.operations() > work)
        };
        // The thread that ends the batch may not have issued its fence yet.
        let cover = match ended {
            Some(cover) => cover,
            None => self.fence_now(scope)?,
        };
        // The batches behind the oldest one keep the device busy meanwhile. A thread that spins takes from the executor what
        // their processors share.
        let manner = match context::manner() {
            Manner::Auto => Manner::Nap,
            chosen => chosen,
        };
        self.wait_in(manner, scope, cover)
    }
}
