//! Operations on streams: what each checks, and the records that it becomes. [`crate::graph::submit`] decides whether it
//! becomes records or a node of a graph.

pub mod copy;
pub mod copy3d;
pub mod described;
pub mod host_function;
pub mod launch;
pub mod mem_ops;
pub mod peer;
