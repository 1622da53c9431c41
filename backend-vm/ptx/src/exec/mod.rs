//! The interpreter.
//!
//! It is a decoded one, as wide as a warp, and no compiler: one core executes some thousand million
//! simple thread-instructions a second that way (`examples/speed.rs`), and a kernel can run as soon
//! as it is decoded.
//!
//! A warp executes decoded instructions for 32 lanes at a time. Lanes that part
//! ways become groups with program counters of their own; the group that is
//! furthest behind runs first, so that groups meet again, and one that has
//! waited too long runs regardless, so that every thread makes progress. What looks
//! like waiting for others counts as having run for long. A block
//! runs on one thread of the host and switches between its warps when they wait.
//! The blocks of a grid are spread over the host's threads.
//!
//! # Addresses
//!
//! Global addresses are addresses of the process that runs the kernel, as
//! [`GlobalMemory`] translates them. Shared memory, local memory and kernel
//! parameters have windows below 4 GiB ([`PARAM_WINDOW`], [`SHARED_WINDOW`],
//! [`LOCAL_WINDOW`]); whoever allocates device memory keeps it at or above
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

/// Where the parameters of the kernel appear as generic addresses.
pub const PARAM_WINDOW: u64 = 0x2000_0000;
/// Where shared memory appears as generic addresses.
pub const SHARED_WINDOW: u64 = 0x4000_0000;
/// Where local memory appears as generic addresses.
pub const LOCAL_WINDOW: u64 = 0x8000_0000;
/// The lowest address that device memory may have.
pub const LOWEST_GLOBAL: u64 = 0x1_0000_0000;
/// Ticks of `%clock64` in a second.
pub const CLOCK_HZ: u64 = 1_000_000_000;

/// Addresses of functions begin here; they are only compared and called.
const FUNCTION_BASE: u64 = 0x1000_0000;
/// From one function's address to the next one's.
const FUNCTION_STRIDE: u64 = 16;

/// The address of the module's function `index`.
pub(crate) fn function_address(index: u32) -> u64 {
    FUNCTION_BASE + u64::from(index) * FUNCTION_STRIDE
}

/// The function at an address.
fn function_at(address: u64) -> Option<u32> {
    let offset = address.checked_sub(FUNCTION_BASE)?;
    if offset % FUNCTION_STRIDE == 0 {
        u32::try_from(offset / FUNCTION_STRIDE).ok()
    } else {
        None
    }
}

/// What is added to an offset in `space` to make it a generic address.
pub(crate) fn window_base(space: AddressSpace) -> u64 {
    match space {
        AddressSpace::Generic | AddressSpace::Global => 0,
        AddressSpace::Shared => SHARED_WINDOW,
        AddressSpace::Local => LOCAL_WINDOW,
        AddressSpace::Param => PARAM_WINDOW,
    }
}

/// A range of addresses that kernels may access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Its first address, as kernels name it.
    pub start: u64,
    /// Its length in bytes.
    pub bytes: u64,
    /// The host's pointer to its first byte.
    pub host: *mut u8,
    /// Whether kernels may write to it.
    pub writable: bool,
}

impl Region {
    /// A region that holds nothing.
    const NONE: Self = Self {
        start: 0,
        bytes: 0,
        host: std::ptr::null_mut(),
        writable: false,
    };
}

/// Device memory and whatever else kernels can reach by global addresses.
///
/// # Safety
///
/// A region that was returned must stay mapped, readable, and writable if it
/// says so, until the launch during which it was asked for has returned: the
/// engine keeps regions and does not ask again. `host` must be aligned like
/// `start` is, up to 16 bytes. Other parties may access the same bytes at the
/// same time: the engine does so by atomic operations only.
pub unsafe trait GlobalMemory: Sync {
    /// The region that holds all `bytes` bytes from `address` on.
    fn region(&self, address: u64, bytes: u64) -> Option<Region>;
}

/// What kernels print.
pub trait Output: Sync {
    /// The formatted text of one `printf`.
    fn printf(&self, text: &[u8]);
    /// The line that a failed assertion prints, with its newline.
    fn assertion(&self, text: &[u8]);
    /// A sentence about something that the checker found ([`LaunchConfig::check`]).
    fn finding(&self, sentence: &str);
}

/// Who hears how far a launch is.
pub trait Milestones: Sync + std::fmt::Debug {
    /// All blocks have begun.
    fn begun(&self);
    /// Each block has let dependents be launched (`griddepcontrol.launch_dependents`), or has ended.
    fn triggered(&self);
}

/// How a kernel is launched.
#[derive(Debug, Clone, Copy)]
pub struct LaunchConfig<'a> {
    /// Blocks in each dimension.
    pub grid: [u32; 3],
    /// Threads of a block in each dimension.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory of each block.
    pub dynamic_shared: u32,
    /// Whether all blocks must make progress together.
    pub cooperative: bool,
    /// The parameter buffer, laid out as [`crate::Kernel::params`] says.
    pub params: &'a [u8],
    /// What the kernel reads as `%gridid`.
    pub grid_id: u64,
    /// The address of the workspace of grid-wide barriers (`%envreg1`, `%envreg2`), zeroed
    /// by the caller; 0 if the launch is not cooperative.
    pub grid_workspace: u64,
    /// Where `malloc` in kernels takes memory from.
    pub heap: Option<&'a DeviceHeap>,
    /// The conditions of the graph that the kernel is run by; kernels name the first one 1.
    pub conditions: &'a [AtomicU32],
    /// The texture and surface objects that there are.
    pub objects: Option<&'a dyn Objects>,
    /// Who is told how far the launch is.
    pub milestones: Option<&'a dyn Milestones>,
    /// Ends the launch when it becomes true.
    pub cancel: Option<&'a AtomicBool>,
    /// Whether races between the threads of a block and reads of what nobody has written are looked for
    /// in shared memory.
    pub check: bool,
    /// Threads of the host to use at most.
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
