//! Synchronizations that the device itself must see: at them memory pools give back what they do not use.

use std::sync::atomic::{AtomicU64, Ordering};

use wormhole_api::Handle;
use wormhole_api::handle::Stream;

/// The stream on which memory was freed that a pool may have to give back when the stream is synchronized, as on
/// the wire; 0 for none.
static DUE: AtomicU64 = AtomicU64::new(0);
/// Stands for several streams: only a wait for everything settles them.
const SEVERAL: u64 = u64::MAX;

/// Notes that memory was freed which a pool may have to give back, on a stream or on all.
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

/// Returns the same as [`is_due`], for a synchronization of one stream or of everything that is about to settle it.
pub fn take_due(stream: Option<Handle<Stream>>) -> bool {
    let due = DUE.load(Ordering::Relaxed);
    if due != 0 && stream.is_none_or(|stream| stream.to_wire() == due) {
        // What is freed meanwhile, and so covered or not, stays noted.
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
