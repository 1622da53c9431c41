//! Notes that the device itself must execute a synchronization, because only then it does something that a fence does
//! not wait for.

use std::sync::atomic::{AtomicU64, Ordering};

use wormhole_api::Handle;
use wormhole_api::handle::Stream;

/// Wire handle of the one stream with such work; 0 for none.
#[derive(Debug)]
pub struct Due(AtomicU64);

/// Value for several streams: only a wait for all work clears it.
const SEVERAL: u64 = u64::MAX;

impl Due {
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Notes work on a stream, or on all streams.
    pub fn note(&self, stream: Option<Handle<Stream>>) {
        let stream = stream.map_or(SEVERAL, Handle::to_wire);
        let several = |due| {
            Some(if due == 0 || due == stream {
                stream
            } else {
                SEVERAL
            })
        };
        let _ = self
            .0
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, several);
    }

    /// Returns whether the device must see the next synchronization.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire) != 0
    }

    /// Returns the same as [`Due::is_set`], and clears it if the caller's synchronization, of one stream or of all, is
    /// sufficient. The synchronization begins after this call.
    pub fn take(&self, stream: Option<Handle<Stream>>) -> bool {
        let due = self.0.load(Ordering::Acquire);
        if due != 0 && stream.is_none_or(|stream| stream.to_wire() == due) {
            // The exchange fails if work came on another stream meanwhile, so that note stays set.
            let _ = self
                .0
                .compare_exchange(due, 0, Ordering::AcqRel, Ordering::Acquire);
        }
        due != 0
    }
}

#[cfg(test)]
mod tests {
    use wormhole_api::handle::Key;

    use super::*;

    #[test]
    fn work_of_one_stream_is_not_settled_by_another() {
        let handle = |index| {
            let generation = 1;
            Handle::new(Key { index, generation }).unwrap()
        };
        let (first, second) = (handle(1), handle(2));
        let due = Due::new();
        due.note(Some(first));
        assert!(due.take(Some(second)));
        assert!(due.take(Some(first)));
        assert!(!due.is_set(), "it is settled");
        due.note(Some(first));
        due.note(Some(second));
        assert!(due.take(Some(first)) && due.take(Some(second)));
        assert!(due.take(None), "only a wait for everything settles both");
        assert!(!due.is_set());
    }
}
