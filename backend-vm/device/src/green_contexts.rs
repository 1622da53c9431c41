//! Green contexts: parts of a device's multiprocessors, to which streams are bound.

use crate::{RawStream, Result};

raw_handle! {
    /// Handle of a green context.
    RawGreenContext
}

/// All or some multiprocessors of a device (`CUdevResource`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Multiprocessors {
    pub count: u32,
    /// Fewest multiprocessors that can be split off; `alignment` is the number that parts are multiples of. Both are 0
    /// for a part of a split, which cannot be split again.
    pub least: u32,
    pub alignment: u32,
    /// Device's own description.
    pub described: [u64; 18],
}

/// Result of a split.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// Number of groups that are possible.
    pub possible: u32,
    pub groups: Vec<Multiprocessors>,
    pub rest: Option<Multiprocessors>,
}

/// Operations on green contexts. Callers pass descriptions and live green contexts of this device only. All operations
/// may wait.
pub trait GreenContexts {
    /// Returns the multiprocessors of a green context, or of the device.
    fn multiprocessors(&self, green: Option<RawGreenContext>) -> Result<Multiprocessors>;
    /// Splits off at most `groups` groups of at least `least` multiprocessors; with 0 groups, counts the possible
    /// groups.
    fn split(&self, from: &Multiprocessors, flags: u32, least: u32, groups: u32) -> Result<Split>;
    /// Creates a green context of the parts' multiprocessors, or of the device's if there is no part.
    fn create_green(&self, parts: &[Multiprocessors]) -> Result<RawGreenContext>;
    /// Destroys a green context. The caller has destroyed its streams: any use of one fails as on a lost device.
    fn destroy_green(&self, green: RawGreenContext) -> Result<()>;
    fn green_stream(&self, green: RawGreenContext, flags: u32, priority: i32) -> Result<RawStream>;
}
