//! Implements the `Peers` trait: peer access, and waits and copies between devices of one process.

use wormhole_device::constants::peer_attribute::{
    ACCESS_SUPPORTED, NATIVE_ATOMIC_SUPPORTED, ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED,
    PERFORMANCE_RANK,
};
use wormhole_device::{
    Access, CuError, MemCopy3d, Peer, Peers, RawEvent, RawPool, RawStream, Result,
};

use crate::CpuDevice;
use crate::copy3d::Move;
use crate::device::{Context, Sibling};
use crate::event::Last;
use crate::scheduler::Work;

/// Attributes (`CUdevice_P2PAttribute`) with the value 1. The others are 0.
const SUPPORTED: [u32; 2] = [ACCESS_SUPPORTED, NATIVE_ATOMIC_SUPPORTED];
const ATTRIBUTES: std::ops::RangeInclusive<u32> =
    PERFORMANCE_RANK..=ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED;

impl CpuDevice {
    /// Makes a stream wait for an event of another device.
    pub(crate) fn wait_for_sibling(
        &self,
        context: &Context,
        stream: RawStream,
        event: RawEvent,
    ) -> Result<()> {
        let siblings = self.siblings.get().map_or(&[][..], Vec::as_slice);
        let found = siblings
            .iter()
            .filter_map(Sibling::context)
            .find_map(|other| {
                let last = other.events.last(event).ok()?;
                Some((other, last))
            });
        let (other, last) = found.ok_or(CuError::INVALID_HANDLE)?;
        let work = match last {
            Last::Never => Work::nothing(),
            Last::Point(point) => other.scheduler.awaited(vec![point]),
            Last::Shared(event, record) => Work::when(move || event.is_complete(record)),
        };
        context.scheduler.submit(stream, work).map(drop)
    }

    /// Locates both ends of a 3-D copy, in memory and arrays of all devices.
    pub(crate) fn find_move(&self, context: &Context, copy: &MemCopy3d) -> Result<Move> {
        let siblings = || self.siblings.get().map_or(&[][..], Vec::as_slice).iter();
        let find = |array| {
            let own = context.arrays.find(array);
            let mut others = siblings().filter_map(Sibling::context);
            own.or_else(|error| {
                let found = others.find_map(|other| other.arrays.find(array).ok());
                found.ok_or(error)
            })
        };
        Move::new(copy, &self.memory, &find)
    }

    /// Returns the number of another device.
    fn number_of(&self, peer: Peer) -> Result<usize> {
        let number = usize::try_from(peer.ordinal).map_err(|_| CuError::INVALID_DEVICE)?;
        let peer_set = self.memory.peer_set();
        if number == peer_set.number() || peer_set.member(number).is_none() {
            return Err(CuError::INVALID_DEVICE);
        }
        Ok(number)
    }
}

impl Peers for CpuDevice {
    fn holds(&self, address: u64) -> bool {
        let aperture = self.memory.aperture();
        (aperture.start()..aperture.start() + aperture.bytes()).contains(&address)
    }

    fn as_peer(&self) -> Peer {
        Peer {
            ordinal: i32::try_from(self.memory.peer_set().number()).unwrap_or(0),
            context: 0,
        }
    }

    fn peer_attribute(&self, peer: Peer, attribute: u32) -> Result<i32> {
        self.number_of(peer)?;
        if !ATTRIBUTES.contains(&attribute) {
            return Err(CuError::INVALID_VALUE);
        }
        Ok(SUPPORTED.contains(&attribute).into())
    }

    fn enable_peer(&self, peer: Peer) -> Result<()> {
        let number = self.number_of(peer)?;
        let peer_set = self.memory.peer_set();
        if peer_set.reaches(number) {
            return Err(CuError::PEER_ACCESS_ALREADY_ENABLED);
        }
        peer_set.set_reaches(number, true);
        Ok(())
    }

    fn disable_peer(&self, peer: Peer) -> Result<()> {
        let number = self.number_of(peer)?;
        let peer_set = self.memory.peer_set();
        if !peer_set.reaches(number) {
            return Err(CuError::PEER_ACCESS_NOT_ENABLED);
        }
        peer_set.set_reaches(number, false);
        Ok(())
    }

    /// Copies like `copy_3d`, which finds arrays of all devices.
    fn copy_between(&self, copy: &MemCopy3d, _: Peer, _: Peer, stream: RawStream) -> Result<()> {
        wormhole_device::Arrays::copy_3d(self, copy, stream)
    }

    fn set_pool_access(&self, pool: RawPool, peer: Peer, access: Access) -> Result<()> {
        let number = self.number_of(peer)?;
        self.pools().set_access(pool, number, access)
    }
}
