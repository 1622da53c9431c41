//! Attributes of memory pools.

use crate::constants::pool_attribute::{
    RELEASE_THRESHOLD, REUSE_ALLOW_INTERNAL_DEPENDENCIES, REUSE_FOLLOW_EVENT_DEPENDENCIES,
    USED_MEM_HIGH,
};

/// Type of an attribute's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttributeType {
    /// `int`, true unless it is 0.
    Flag,
    /// `cuuint64_t`.
    Bytes,
}

impl AttributeType {
    /// Returns the type of a `CUmemPool_attribute`'s value; none for an unknown attribute.
    #[must_use]
    pub const fn of(attribute: u32) -> Option<Self> {
        match attribute {
            REUSE_FOLLOW_EVENT_DEPENDENCIES..=REUSE_ALLOW_INTERNAL_DEPENDENCIES => Some(Self::Flag),
            RELEASE_THRESHOLD..=USED_MEM_HIGH => Some(Self::Bytes),
            _ => None,
        }
    }
}
