//! Implementations of the driver API: one function for each forwarded entry of the API table. The exports of the same
//! names call these.
#![expect(
    non_snake_case,
    clippy::too_many_arguments,
    reason = "names and arguments are those of the CUDA driver API"
)]

mod allocations;
mod arrays;
mod batches;
mod captures;
mod checkpoints;
mod conditional_nodes;
mod context_events;
mod contexts;
mod copies;
mod copy3d;
mod devices;
mod diagnostics;
mod driver;
mod events;
mod functions;
mod graph_executables;
mod graph_nodes;
mod graphs;
mod green_contexts;
mod host_functions;
mod kernels;
mod launch_v3;
mod launches;
mod linker;
mod logs;
mod managed;
mod mem_ops;
mod modules;
mod occupancy;
mod peers;
mod pointers;
mod pools;
mod settings;
mod sharing;
mod streams;
mod tensors;
mod texture_references;
mod textures;
mod v1_32bit;
mod vmm;

pub use allocations::*;
pub use arrays::*;
pub use batches::*;
pub use captures::*;
pub use checkpoints::*;
pub use conditional_nodes::*;
pub use context_events::*;
pub use contexts::*;
pub use copies::*;
pub use copy3d::*;
pub use devices::*;
pub use diagnostics::*;
pub use driver::*;
pub use events::*;
pub use functions::*;
pub use graph_executables::*;
pub use graph_nodes::*;
pub use graphs::*;
pub use green_contexts::*;
pub use host_functions::*;
pub use kernels::*;
pub use launch_v3::*;
pub use launches::*;
pub use linker::*;
pub use logs::*;
pub use managed::*;
pub use mem_ops::*;
pub use modules::*;
pub use occupancy::*;
pub use peers::*;
pub use pointers::*;
pub use pools::*;
pub use settings::*;
pub use sharing::*;
pub use streams::*;
pub use tensors::*;
pub use texture_references::*;
pub use textures::*;
pub use v1_32bit::*;
pub use vmm::*;

use crate::error::Result;
use crate::types::CUresult;

/// Returns the `CUresult` of a result.
#[inline]
pub fn code(result: Result) -> CUresult {
    match result {
        Ok(()) => 0,
        Err(error) => error.0,
    }
}
