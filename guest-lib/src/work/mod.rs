//! Work of streams: checked here, then written to the ring, or a node of a graph where the stream is captured.

pub mod boxes;
pub mod copy;
pub mod described;
pub mod host_function;
pub mod launch;
pub mod peer;
pub mod stream_memory;
