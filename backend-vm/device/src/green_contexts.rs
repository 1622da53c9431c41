//! Green contexts: parts of a device's multiprocessors, to which streams are bound.

use crate::{RawStream, Result};

raw_handle! {
    /// A green context.
    RawGreenContext
}

/// Multiprocessors of a device, all or some of them (`CUdevResource`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Multiprocessors {
    pub count: u32,
    /// The fewest that can be split off, and what parts are multiples of. 0 for what a split has made: it cannot
    /// be split again.
    pub least: u32,
    pub alignment: u32,
    /// As the device described them.
    pub described: [u64; 18],
}

/// What a split gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// How many groups there are, or would be.
    pub possible: u32,
    pub groups: Vec<Multiprocessors>,
    pub rest: Option<Multiprocessors>,
}

/// What a device does with green contexts. Callers pass what that very device has described, and made and not destroyed
/// yet. All may wait.
pub trait GreenContexts {
    /// Those of a green context, or all.
    fn multiprocessors(&self, green: Option<RawGreenContext>) -> Result<Multiprocessors>;
    /// Makes at most `groups` groups of at least `least`; with 0 it only counts those that there would be.
    fn split(&self, from: &Multiprocessors, flags: u32, least: u32, groups: u32) -> Result<Split>;
    /// Of all multiprocessors of the parts; of the device if there is none.
    fn create_green(&self, parts: &[Multiprocessors]) -> Result<RawGreenContext>;
    /// No stream of it is left: whatever is asked of one would be answered as if the device were lost.
    fn destroy_green(&self, green: RawGreenContext) -> Result<()>;
    fn green_stream(&self, green: RawGreenContext, flags: u32, priority: i32) -> Result<RawStream>;
}
