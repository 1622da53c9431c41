//! Synchronizations that the device must execute itself, because memory pools then release their unused memory.

use std::sync::atomic::{AtomicU64, Ordering};

use wormhole_api::Handle;
use wormhole_api::handle::Stream;

/// Wire handle of the stream on which memory was freed that a pool may release when the stream is synchronized; 0 for
/// none.
static DUE: AtomicU64 = AtomicU64::new(0);
/// Value of [`DUE`] for several streams: only a wait for all work clears it.
const SEVERAL: u64 = u64::MAX;

/// Notes that memory of a pool was freed on a stream, or on all streams.
pub fn note(stream: Option<Handle<Stream>>) {
    let stream = stream.map_or(SEVERAL, Handle::to_wire);
    let several = |due| {
        Some(if due == 0 || due == stream {
            stream
        } else {
            SEVERAL
        })
    };
    let _ = DUE.fetch_update(Ordering::Relaxed, Ordering::Relaxed, several);
}

/// Returns whether the device must see the next synchronization.
pub fn is_due() -> bool {
    DUE.load(Ordering::Relaxed) != 0
}

/// Returns the same as [`is_due`], and clears it if the caller's synchronization, of one stream or of all, is
/// sufficient.
pub fn take_due(stream: Option<Handle<Stream>>) -> bool {
    let due = DUE.load(Ordering::Relaxed);
    if due != 0 && stream.is_none_or(|stream| stream.to_wire() == due) {
        // The exchange fails if memory was freed on another stream meanwhile, so that note stays set.
        let _ = DUE.compare_exchange(due, 0, Ordering::Relaxed, Ordering::Relaxed);
    }
    due != 0
}

#[cfg(test)]
mod tests {
    use wormhole_api::handle::Key;

    use super::*;

    #[test]
    fn what_one_stream_freed_another_does_not_settle() {
        let handle = |index| {
            let generation = 1;
            Handle::new(Key { index, generation }).unwrap()
        };
        let (first, second) = (handle(1), handle(2));
        note(Some(first));
        assert!(take_due(Some(second)));
        assert!(take_due(Some(first)));
        assert!(!is_due(), "it is settled");
        note(Some(first));
        note(Some(second));
        assert!(take_due(Some(first)) && take_due(Some(second)));
        assert!(take_due(None), "only a wait for everything settles both");
        assert!(!is_due());
    }
}
