//! Peer access and copies between the devices of one process.

use wormhole_api::constants::memory_location;
use wormhole_api::ctypes::{CUcontext, CUmemAccessDesc, CUmemLocation};
use wormhole_device::{Access, MemCopy3d, Peer, Peers, RawPool, RawStream, Result};

use crate::arrays::described;
use crate::device::{CudaDevice, handle, pointer, stream};
use crate::pools::pool;

fn context(peer: Peer) -> CUcontext {
    pointer(peer.context)
}

/// Converts an access right of a device to the driver's description.
pub fn access_of(ordinal: i32, access: Access) -> CUmemAccessDesc {
    CUmemAccessDesc {
        location: CUmemLocation {
            r#type: memory_location::DEVICE,
            id: ordinal,
        },
        flags: access.to_wire(),
    }
}

impl Peers for CudaDevice {
    fn as_peer(&self) -> Peer {
        Peer {
            ordinal: self.ordinal(),
            context: handle(self.handle()),
        }
    }

    fn peer_attribute(&self, peer: Peer, attribute: u32) -> Result<i32> {
        let mut value = 0;
        // SAFETY: the pointer is good; the driver checks the numbers.
        unsafe {
            self.driver().cuDeviceGetP2PAttribute(
                &raw mut value,
                attribute,
                self.ordinal(),
                peer.ordinal,
            )
        }?;
        Ok(value)
    }

    fn enable_peer(&self, peer: Peer) -> Result<()> {
        // SAFETY: the peer's context is retained as long as its device's object lives.
        unsafe { self.driver().cuCtxEnablePeerAccess(context(peer), 0) }
    }

    fn disable_peer(&self, peer: Peer) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.driver().cuCtxDisablePeerAccess(context(peer)) }
    }

    fn copy_between(&self, copy: &MemCopy3d, to: Peer, from: Peer, on: RawStream) -> Result<()> {
        let mut description = described(copy);
        // `CUDA_MEMCPY3D_PEER` has the contexts in the reserved fields of `CUDA_MEMCPY3D`.
        description.reserved0 = context(from);
        description.reserved1 = context(to);
        // SAFETY: both ends live in these contexts and hold the region, which the caller checked.
        unsafe {
            self.driver()
                .cuMemcpy3DPeerAsync(&raw const description, stream(on))
        }
    }

    fn set_pool_access(&self, raw: RawPool, peer: Peer, access: Access) -> Result<()> {
        let description = access_of(peer.ordinal, access);
        // SAFETY: the pool exists, and there is one description.
        unsafe {
            self.driver()
                .cuMemPoolSetAccess(pool(raw), &raw const description, 1)
        }
    }
}
