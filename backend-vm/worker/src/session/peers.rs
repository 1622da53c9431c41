//! Peer access between the devices of a session.

use std::ops::RangeInclusive;

use wormhole_api::constants::peer_attribute::{
    ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED, PERFORMANCE_RANK,
};
use wormhole_api::{
    CuResult, Outcome, PeerAttribute, PeerAttributeReply, PeerDisable, PeerEnable, PoolSetAccess,
    Serve,
};
use wormhole_device::Peer;

use super::{Answer, Call, Session};

/// Values of `CUdevice_P2PAttribute` in CUDA 13.0. No other number reaches the driver.
const PEER_ATTRIBUTES: RangeInclusive<u32> =
    PERFORMANCE_RANK..=ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED;

impl Session {
    /// Returns a peer of the device that the message names.
    fn peer(&self, call: &Call, number: u32) -> Result<Peer, CuResult> {
        let peer = self.devices.get(number)?;
        if peer.number() == call.device {
            return Err(CuResult::INVALID_DEVICE);
        }
        Ok(peer.as_peer())
    }
}

impl Serve<PeerAttribute> for Session {
    fn serve(&mut self, call: &Call, message: &PeerAttribute) -> Outcome<PeerAttributeReply> {
        let (peer, attribute) = (message.peer, message.attribute);
        if !PEER_ATTRIBUTES.contains(&attribute) {
            return Err(CuResult::INVALID_VALUE);
        }
        let peer = self.peer(call, peer)?;
        self.ask(
            call,
            self.here(call),
            move |device| device.peer_attribute(peer, attribute),
            |_, value| Answer::reply(&PeerAttributeReply { value }),
        )
    }
}

impl Serve<PeerEnable> for Session {
    fn serve(&mut self, call: &Call, message: &PeerEnable) -> Outcome<()> {
        let peer = message.peer;
        let peer = self.peer(call, peer)?;
        self.order(call, self.here(call), move |device| {
            device.enable_peer(peer)
        })
    }
}

impl Serve<PeerDisable> for Session {
    fn serve(&mut self, call: &Call, message: &PeerDisable) -> Outcome<()> {
        let peer = message.peer;
        let peer = self.peer(call, peer)?;
        self.order(call, self.here(call), move |device| {
            device.disable_peer(peer)
        })
    }
}

impl Serve<PoolSetAccess> for Session {
    fn serve(&mut self, call: &Call, message: &PoolSetAccess) -> Outcome<()> {
        let access = message.access;
        let peer = self.devices.get(message.peer)?.as_peer();
        self.ask_pool(
            call,
            message.pool,
            move |device, pool| device.set_pool_access(pool, peer, access),
            |_, ()| Answer::done(),
        )
    }
}
