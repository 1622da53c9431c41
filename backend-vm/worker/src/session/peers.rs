//! What the devices of a session have to do with each other.

use std::ops::RangeInclusive;

use wormhole_api::{Access as ApiAccess, CuResult, Outcome, PeerAttributeReply, PoolSetAccess};
use wormhole_device::{Access, CuError, Peer};

use super::{Answer, Call, Session, to_result};

/// `CUdevice_P2PAttribute` of CUDA 13.0. No other number reaches the driver.
const PEER_ATTRIBUTES: RangeInclusive<u32> = 1..=5;

/// The same in the device's terms.
pub(super) fn access(access: ApiAccess) -> Access {
    match access {
        ApiAccess::None => Access::None,
        ApiAccess::Read => Access::Read,
        ApiAccess::ReadWrite => Access::ReadWrite,
    }
}

impl Session {
    /// One of the session's devices, by its number.
    fn peer(&self, number: u32) -> Result<Peer, CuResult> {
        let known = usize::try_from(number).is_ok_and(|number| number < self.legacy.len());
        match i32::try_from(number) {
            Ok(_) if known && self.legacy.len() == 1 => Ok(self.device.as_peer()),
            Ok(ordinal) if known => Ok(Peer {
                ordinal,
                context: 0,
            }),
            _ => Err(to_result(CuError::INVALID_DEVICE)),
        }
    }

    /// One that is not the current one.
    fn other(&self, number: u32) -> Result<Peer, CuResult> {
        match self.peer(number) {
            Ok(_) if usize::try_from(number) == Ok(self.on) => {
                Err(to_result(CuError::INVALID_DEVICE))
            }
            found => found,
        }
    }

    pub(super) fn peer_attribute(
        &mut self,
        call: &Call,
        peer: u32,
        attribute: u32,
    ) -> Outcome<PeerAttributeReply> {
        if !PEER_ATTRIBUTES.contains(&attribute) {
            return Outcome::Failed(CuResult::INVALID_VALUE);
        }
        match self.other(peer) {
            Ok(peer) => self.ask(
                call,
                move |device| device.peer_attribute(peer, attribute),
                |_, value| Answer::reply(&PeerAttributeReply { value }),
            ),
            Err(error) => Outcome::Failed(error),
        }
    }

    pub(super) fn enable_peer(&mut self, call: &Call, peer: u32) -> Outcome<()> {
        match self.other(peer) {
            Ok(peer) => self.ask(
                call,
                move |device| device.enable_peer(peer),
                |_, ()| Answer::done(),
            ),
            Err(error) => Outcome::Failed(error),
        }
    }

    pub(super) fn disable_peer(&mut self, call: &Call, peer: u32) -> Outcome<()> {
        match self.other(peer) {
            Ok(peer) => self.ask(
                call,
                move |device| device.disable_peer(peer),
                |_, ()| Answer::done(),
            ),
            Err(error) => Outcome::Failed(error),
        }
    }

    pub(super) fn set_pool_access(&mut self, call: &Call, message: &PoolSetAccess) -> Outcome<()> {
        let access = access(message.access);
        match self.peer(message.peer) {
            Ok(peer) => self.ask_pool(
                call,
                message.pool,
                move |device, pool| device.set_pool_access(pool, peer, access),
                |_, ()| Answer::done(),
            ),
            Err(error) => Outcome::Failed(error),
        }
    }
}
