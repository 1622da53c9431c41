//! Operations on streams: the checks of each, and its records. [`crate::graph::submit`] decides whether an operation
//! becomes records or a node of a graph.

pub mod copy;
pub mod copy3d;
pub mod described;
pub mod host_function;
pub mod launch;
pub mod mem_ops;
pub mod peer;
mod pieces;
