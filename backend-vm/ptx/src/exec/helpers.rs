//! Permits for the host threads that help the one on which a launch was called.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Helpers of all launches of this process.
pub(super) static HELPERS: Helpers = Helpers(AtomicUsize::new(0));

/// Number of helpers that are there.
#[derive(Debug)]
pub(super) struct Helpers(AtomicUsize);

impl Helpers {
    /// Permits one more helper, unless there are `most`. Does not wait.
    pub(super) fn permit(&self, most: usize) -> Option<Permit<'_>> {
        let one_more = |there| (there < most).then_some(there + 1);
        let permitted = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
        permitted.ok().map(|_| Permit(&self.0))
    }
}

/// Permit for one helper, which holds it until it ends.
#[derive(Debug)]
pub(super) struct Permit<'a>(&'a AtomicUsize);

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_helpers_are_permitted_than_there_may_be_at_a_time() {
        let helpers = Helpers(AtomicUsize::new(0));
        let permits: Vec<Permit<'_>> = (0..5).map_while(|_| helpers.permit(3)).collect();
        assert_eq!(permits.len(), 3);
        assert!(helpers.permit(2).is_none(), "a launch of fewer threads");
        drop(permits);
        assert!(helpers.permit(1).is_some());
    }
}
