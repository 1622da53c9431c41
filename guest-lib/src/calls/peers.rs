//! Access between the memories of devices.

use wormhole_api::PeerAttribute;

use super::contexts::{current, scope_of};
use super::copies::NO_STREAM;
use super::devices::{ordinal, tell_atomics};
use super::{body, put};
use crate::context;
use crate::copy::{Direction, Mode, copy};
use crate::error::{CuError, Result};
use crate::peer;
use crate::session::session;
use crate::stream;
use crate::types::{
    CUatomicOperation, CUcontext, CUdevice, CUdeviceptr, CUresult, CUstream, DefaultStream,
};

/// `CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED`.
const ACCESS_SUPPORTED: u32 = 2;

/// What the host's driver says of two different devices.
fn attribute(from: usize, to: usize, attribute: u32) -> Result<i32> {
    let session = session()?;
    let message = PeerAttribute {
        peer: session.on(to).number(),
        attribute,
    };
    session.on(from).request(&message, |reply| reply.value)
}

pub unsafe fn cuDeviceCanAccessPeer(
    canAccessPeer: *mut i32,
    dev: CUdevice,
    peerDev: CUdevice,
) -> CUresult {
    body! {
        let (from, to) = (ordinal(dev)?, ordinal(peerDev)?);
        if canAccessPeer.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // A device is no peer of its own.
        let can = if from == to { 0 } else { attribute(from, to, ACCESS_SUPPORTED)? };
        // SAFETY: as the caller promises.
        unsafe { put(canAccessPeer, can) }
    }
}

pub unsafe fn cuDeviceGetP2PAttribute(
    value: *mut i32,
    attrib: u32,
    srcDevice: CUdevice,
    dstDevice: CUdevice,
) -> CUresult {
    body! {
        session()?;
        if value.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        let (from, to) = (ordinal(srcDevice)?, ordinal(dstDevice)?);
        if from == to {
            return Err(CuError::INVALID_DEVICE);
        }
        let found = attribute(from, to, attrib)?;
        // SAFETY: as the caller promises.
        unsafe { put(value, found) }
    }
}

/// None: so says driver 580 of two H200s, whatever the attribute says.
pub unsafe fn cuDeviceGetP2PAtomicCapabilities(
    capabilities: *mut u32,
    operations: *const CUatomicOperation,
    count: u32,
    srcDevice: CUdevice,
    dstDevice: CUdevice,
) -> CUresult {
    body! {
        session()?;
        if capabilities.is_null() || operations.is_null() || count == 0 {
            return Err(CuError::INVALID_VALUE);
        }
        let (from, to) = (ordinal(srcDevice)?, ordinal(dstDevice)?);
        if from == to {
            return Err(CuError::INVALID_DEVICE);
        }
        // SAFETY: the program vouches for that many operations and places.
        unsafe { tell_atomics(capabilities, operations, count, false) }
    }
}

/// Sees to it that the contexts of a copy are there. Null stands for whichever is meant: the addresses say it.
fn check(contexts: [CUcontext; 2]) -> Result {
    let mut named = contexts.into_iter().filter(|ctx| !ctx.is_null());
    named.try_for_each(|ctx| context::find_peer(ctx).map(drop))
}

pub unsafe fn cuMemcpyPeer(
    default: DefaultStream,
    dstDevice: CUdeviceptr,
    dstContext: CUcontext,
    srcDevice: CUdeviceptr,
    srcContext: CUcontext,
    ByteCount: usize,
) -> CUresult {
    body! {
        current()?;
        check([dstContext, srcContext])?;
        let scope = context::scope()?;
        let target = stream::resolve(scope, default, NO_STREAM)?;
        let (places, mode) = ((dstDevice, srcDevice), Mode::Synchronous);
        // SAFETY: neither end is memory of the program's own.
        unsafe { copy(scope, target, Direction::DeviceToDevice, places, ByteCount, mode) }
    }
}

pub unsafe fn cuMemcpyPeerAsync(
    default: DefaultStream,
    dstDevice: CUdeviceptr,
    dstContext: CUcontext,
    srcDevice: CUdeviceptr,
    srcContext: CUcontext,
    ByteCount: usize,
    hStream: CUstream,
) -> CUresult {
    body! {
        check([dstContext, srcContext])?;
        // The stream says where the copy is made, and needs no current context for that.
        let scope = context::scope().or_else(|_| stream::scope_of(hStream))?;
        let target = stream::resolve(scope, default, hStream)?;
        let (places, mode) = ((dstDevice, srcDevice), Mode::Asynchronous);
        // SAFETY: neither end is memory of the program's own.
        unsafe { copy(scope, target, Direction::DeviceToDevice, places, ByteCount, mode) }
    }
}

/// A context of the same device is no peer.
pub unsafe fn cuCtxEnablePeerAccess(peerContext: CUcontext, Flags: u32) -> CUresult {
    body! {
        current()?;
        let (facts, _) = context::find_peer(peerContext)?;
        if Flags != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        let scope = context::scope()?;
        if facts.device() == scope.session.ordinal() {
            return Err(CuError::PEER_ACCESS_UNSUPPORTED);
        }
        peer::enable(scope, scope_of(peerContext)?)
    }
}

pub unsafe fn cuCtxDisablePeerAccess(peerContext: CUcontext) -> CUresult {
    body! {
        current()?;
        context::find_peer(peerContext)?;
        peer::disable(context::scope()?, scope_of(peerContext)?)
    }
}
