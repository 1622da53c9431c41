//! Interpreter of decoded kernels.
//!
//! The interpreter executes decoded instructions for a warp at a time, and does not compile: one core
//! executes some thousand million simple thread-instructions a second that way (`examples/speed.rs`),
//! and a kernel can run as soon as it is decoded.
//!
//! A warp executes decoded instructions for 32 lanes at a time. Lanes that diverge become groups with
//! program counters of their own; the group that is furthest behind runs first, so that groups
//! reconverge, and one that has waited too long runs regardless, so that every thread makes progress.
//! An instruction that looks like polling counts as many instructions. A block runs on one host thread
//! and switches between its warps when they wait. The blocks of a grid are distributed over the host's
//! threads.
//!
//! # Addresses
//!
//! Global addresses are addresses of the process that runs the kernel, as [`GlobalMemory`] translates
//! them. Shared memory, local memory and kernel parameters have windows below 4 GiB ([`PARAM_WINDOW`],
//! [`SHARED_WINDOW`], [`LOCAL_WINDOW`]); the caller must allocate device memory at or above
//! [`LOWEST_GLOBAL`].

mod atomic;
mod barrier;
mod block;
mod builtin;
mod call;
mod check;
mod collective;
mod copy;
mod frame;
mod global;
mod heap;
mod helpers;
mod launch;
mod matrix;
mod mbarrier;
mod memory;
mod printf;
mod special;
mod step;
mod texture;
mod warp;

use std::sync::atomic::{AtomicBool, AtomicU32};

pub use heap::DeviceHeap;
pub use launch::launch;
pub(crate) use mbarrier::pending_count;
pub use texture::{AddressMode, ChannelType, Image, Level, Objects, Texture};

use crate::decode::insn::AddressSpace;

/// First generic address of the kernel's parameters.
pub const PARAM_WINDOW: u64 = 0x2000_0000;
/// First generic address of shared memory.
pub const SHARED_WINDOW: u64 = 0x4000_0000;
/// First generic address of local memory.
pub const LOCAL_WINDOW: u64 = 0x8000_0000;
/// Lowest address of device memory.
pub const LOWEST_GLOBAL: u64 = 0x1_0000_0000;
/// Ticks of `%clock64` per second.
pub const CLOCK_HZ: u64 = 1_000_000_000;

/// First address of functions. Kernels only compare and call these addresses.
const FUNCTION_BASE: u64 = 0x1000_0000;
/// Distance between the addresses of two functions.
const FUNCTION_STRIDE: u64 = 16;

/// Returns the address of the module's function `index`.
pub(crate) fn function_address(index: u32) -> u64 {
    FUNCTION_BASE + u64::from(index) * FUNCTION_STRIDE
}

/// Returns the index of the function at an address.
fn function_at(address: u64) -> Option<u32> {
    let offset = address.checked_sub(FUNCTION_BASE)?;
    if offset % FUNCTION_STRIDE == 0 {
        u32::try_from(offset / FUNCTION_STRIDE).ok()
    } else {
        None
    }
}

/// Returns the base that turns an offset in `space` into a generic address.
pub(crate) fn window_base(space: AddressSpace) -> u64 {
    match space {
        AddressSpace::Generic | AddressSpace::Global => 0,
        AddressSpace::Shared => SHARED_WINDOW,
        AddressSpace::Local => LOCAL_WINDOW,
        AddressSpace::Param => PARAM_WINDOW,
    }
}

/// Range of addresses that kernels may access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// First address, in the kernel's address space.
    pub start: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Host's pointer to the first byte.
    pub host: *mut u8,
    /// Whether kernels may write to it.
    pub writable: bool,
}

impl Region {
    /// Empty region.
    const NONE: Self = Self {
        start: 0,
        bytes: 0,
        host: std::ptr::null_mut(),
        writable: false,
    };
}

/// Device memory and all other memory that kernels can reach by global addresses.
///
/// # Safety
///
/// A returned region must stay mapped, readable, and (if `writable` is set) writable, until the launch
/// that requested it has returned: the engine caches regions and does not request them again. `host`
/// must have the alignment of `start`, up to 16 bytes. Other parties may access the same bytes at the
/// same time: the engine uses atomic operations only.
pub unsafe trait GlobalMemory: Sync {
    /// Returns the region that holds all `bytes` bytes from `address` on.
    fn region(&self, address: u64, bytes: u64) -> Option<Region>;
}

/// Receiver of the output of kernels.
pub trait Output: Sync {
    /// Receives the formatted text of one `printf`.
    fn printf(&self, text: &[u8]);
    /// Receives the line that a failed assertion prints, with its newline.
    fn assertion(&self, text: &[u8]);
    /// Receives a sentence about a finding of the checker ([`LaunchConfig::check`]).
    fn finding(&self, sentence: &str);
}

/// Receiver of the progress of a launch.
pub trait Milestones: Sync + std::fmt::Debug {
    /// Called when all blocks have begun.
    fn begun(&self);
    /// Called when each block has permitted the launch of dependents
    /// (`griddepcontrol.launch_dependents`) or has ended.
    fn triggered(&self);
}

/// Configuration of a launch.
#[derive(Debug, Clone, Copy)]
pub struct LaunchConfig<'a> {
    /// Number of blocks in each dimension.
    pub grid: [u32; 3],
    /// Number of threads of a block in each dimension.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory of each block.
    pub dynamic_shared: u32,
    /// Whether all blocks must make progress together.
    pub cooperative: bool,
    /// Parameter buffer, laid out as [`crate::Kernel::params`] describes.
    pub params: &'a [u8],
    /// Value of `%gridid`.
    pub grid_id: u64,
    /// Address of the workspace of grid-wide barriers (`%envreg1`, `%envreg2`), zeroed by the caller; 0
    /// if the launch is not cooperative.
    pub grid_workspace: u64,
    /// Heap of `malloc` and `free` in kernels.
    pub heap: Option<&'a DeviceHeap>,
    /// Conditions of the graph that runs the kernel. Kernels number them from 1.
    pub conditions: &'a [AtomicU32],
    /// Texture and surface objects.
    pub objects: Option<&'a dyn Objects>,
    /// Receiver of the launch's progress.
    pub milestones: Option<&'a dyn Milestones>,
    /// Flag that ends the launch when it becomes true.
    pub cancel: Option<&'a AtomicBool>,
    /// Whether to check shared memory for races between the threads of a block and for reads of
    /// unwritten memory.
    pub check: bool,
    /// Maximum number of host threads, and of those that help all launches of the process at a time. An ordinary launch has
    /// those that are free, a cooperative one those that are free at its start.
    pub threads: usize,
}

impl Default for LaunchConfig<'_> {
    fn default() -> Self {
        Self {
            grid: [1; 3],
            block: [1; 3],
            dynamic_shared: 0,
            cooperative: false,
            params: &[],
            grid_id: 0,
            grid_workspace: 0,
            heap: None,
            conditions: &[],
            objects: None,
            milestones: None,
            cancel: None,
            check: false,
            threads: 1,
        }
    }
}
