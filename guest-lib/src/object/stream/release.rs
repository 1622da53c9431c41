//! Synchronizations that the device must execute itself, because memory pools then release their unused memory.

use super::due::Due;

/// Streams on which memory was freed that a pool may release when the stream is synchronized.
pub static RELEASES: Due = Due::new();
