//! Several devices in one process, and what they have to do with each other.

use crate::{Access, MemCopy3d, RawPool, RawStream, Result};

/// What a device is to the others of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its number, as those of its kind count.
    pub ordinal: i32,
    /// Its context, where the driver has one.
    pub context: u64,
}

/// Work of a device that names something of another device of its kind.
///
/// Whatever a device is handed with a stream may name memory of its peers: copies need no access. A stream may wait for
/// an event of a peer. Memory that the first device registers is every device's.
pub trait Peers {
    /// Whether an address may be of this device's own memory, or of memory that it may free as if it were.
    fn holds(&self, _address: u64) -> bool {
        true
    }

    /// What [`Peers::enable_peer`] and the like of another device are to be given for this one.
    fn as_peer(&self) -> Peer;

    /// `cuDeviceGetP2PAttribute`, from this device to another.
    fn peer_attribute(&self, peer: Peer, attribute: u32) -> Result<i32>;
    /// Kernels of this device may reach the peer's allocations, those of pools excepted (`cuCtxEnablePeerAccess`).
    fn enable_peer(&self, peer: Peer) -> Result<()>;
    /// Ends that; waits for nothing.
    fn disable_peer(&self, peer: Peer) -> Result<()>;
    /// Asynchronous: a copy of which an end may be an array of another device. Of each end, the device that it is of.
    fn copy_between(&self, copy: &MemCopy3d, to: Peer, from: Peer, stream: RawStream)
    -> Result<()>;
    /// What kernels of the peer may do with memory of a pool of this device (`cuMemPoolSetAccess`).
    fn set_pool_access(&self, pool: RawPool, peer: Peer, access: Access) -> Result<()>;
}
