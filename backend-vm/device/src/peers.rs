//! Peer access and copies between the devices of one process.

use crate::{Access, MemCopy3d, RawPool, RawStream, Result};

/// Identity of a device for other devices of the same kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Ordinal of the device among those of its kind.
    pub ordinal: i32,
    /// Driver's context, for devices of the driver.
    pub context: u64,
}

/// Operations of a device that involve another device of the same kind.
///
/// Addresses that a device gets with a stream may be memory of its peers: copies need no peer access. A stream may
/// wait for an event of a peer. Memory that the first device registers is accessible to all devices.
pub trait Peers {
    /// Returns whether an address may be this device's own memory, or memory that it may free like its own.
    fn holds(&self, _address: u64) -> bool {
        true
    }

    /// Returns the identity of this device, an argument of other devices' [`Peers::enable_peer`] and the like.
    fn as_peer(&self) -> Peer;

    /// Returns an attribute of the link from this device to another (`cuDeviceGetP2PAttribute`).
    fn peer_attribute(&self, peer: Peer, attribute: u32) -> Result<i32>;
    /// Allows kernels of this device to access the peer's allocations, except those of pools
    /// (`cuCtxEnablePeerAccess`).
    fn enable_peer(&self, peer: Peer) -> Result<()>;
    /// Ends peer access (`cuCtxDisablePeerAccess`). Does not wait.
    fn disable_peer(&self, peer: Peer) -> Result<()>;
    /// Copies a 3-D region whose ends may be arrays of other devices. `to` and `from` are the ends' devices.
    /// Asynchronous.
    fn copy_between(&self, copy: &MemCopy3d, to: Peer, from: Peer, stream: RawStream)
    -> Result<()>;
    /// Sets the access of the peer's kernels to memory of a pool of this device (`cuMemPoolSetAccess`).
    fn set_pool_access(&self, pool: RawPool, peer: Peer, access: Access) -> Result<()>;
}
