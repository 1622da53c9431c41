//! The functions of the driver API, one for each that the table forwards. The exports of the same names
//! call them.
#![expect(
    non_snake_case,
    clippy::too_many_arguments,
    reason = "names and arguments are those of the CUDA driver API"
)]

mod arrays;
mod batches;
mod boxes;
mod captures;
mod checkpoints;
mod conditional_nodes;
mod context_events;
mod contexts;
mod copies;
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
mod launches;
mod legacy;
mod linker;
mod logs;
mod managed;
mod memories;
mod modules;
mod narrow;
mod occupancy;
mod peers;
mod pointers;
mod pools;
mod references;
mod settings;
mod sharing;
mod stream_memory;
mod streams;
mod tensors;
mod textures;
mod virtual_memories;

pub use arrays::*;
pub use batches::*;
pub use boxes::*;
pub use captures::*;
pub use checkpoints::*;
pub use conditional_nodes::*;
pub use context_events::*;
pub use contexts::*;
pub use copies::*;
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
pub use launches::*;
pub use legacy::*;
pub use linker::*;
pub use logs::*;
pub use managed::*;
pub use memories::*;
pub use modules::*;
pub use narrow::*;
pub use occupancy::*;
pub use peers::*;
pub use pointers::*;
pub use pools::*;
pub use references::*;
pub use settings::*;
pub use sharing::*;
pub use stream_memory::*;
pub use streams::*;
pub use tensors::*;
pub use textures::*;
pub use virtual_memories::*;

use crate::error::Result;
use crate::types::CUresult;

/// What a C function returns.
#[inline]
pub fn code(result: Result) -> CUresult {
    match result {
        Ok(()) => 0,
        Err(error) => error.0,
    }
}
