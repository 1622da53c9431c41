//! Peer access between devices.

use wormhole_api::PeerAttribute;
use wormhole_api::constants::peer_attribute::ACCESS_SUPPORTED;

use super::contexts::{current, scope_of};
use super::copies::{NO_STREAM, copy};
use super::devices::{ordinal, put_atomics};
use crate::error::{CuError, Result};
use crate::memory::end::CopyEnd;
use crate::object::context;
use crate::object::stream;
use crate::parameter::{In, Out};
use crate::session::session;
use crate::types::{CUatomicOperation, CUcontext, CUdevice, CUdeviceptr, CUstream, DefaultStream};
use crate::work::copy::Mode;
use crate::work::peer;

/// Requests a peer attribute of two different devices from the host's driver.
fn attribute(from: usize, to: usize, attribute: u32) -> Result<i32> {
    let session = session()?;
    let message = PeerAttribute {
        peer: session.on(to).number(),
        attribute,
    };
    session.on(from).request(&message, |reply| reply.value)
}

pub fn cuDeviceCanAccessPeer(
    canAccessPeer: Out<'_, i32>,
    dev: CUdevice,
    peerDev: CUdevice,
) -> Result {
    let (from, to) = (ordinal(dev)?, ordinal(peerDev)?);
    canAccessPeer.not_null()?;
    // A device is not a peer of itself.
    let can = if from == to {
        0
    } else {
        attribute(from, to, ACCESS_SUPPORTED)?
    };
    canAccessPeer.put(can)
}

pub fn cuDeviceGetP2PAttribute(
    value: Out<'_, i32>,
    attrib: u32,
    srcDevice: CUdevice,
    dstDevice: CUdevice,
) -> Result {
    session()?;
    value.not_null()?;
    let (from, to) = (ordinal(srcDevice)?, ordinal(dstDevice)?);
    if from == to {
        return Err(CuError::INVALID_DEVICE);
    }
    let found = attribute(from, to, attrib)?;
    value.put(found)
}

/// Reports no capability, as driver 580 does for two H200s in spite of the device attribute.
pub fn cuDeviceGetP2PAtomicCapabilities(
    capabilities: Out<'_, [u32]>,
    operations: In<'_, [CUatomicOperation]>,
    count: u32,
    srcDevice: CUdevice,
    dstDevice: CUdevice,
) -> Result {
    session()?;
    if capabilities.is_null() || operations.is_null() || count == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let (from, to) = (ordinal(srcDevice)?, ordinal(dstDevice)?);
    if from == to {
        return Err(CuError::INVALID_DEVICE);
    }
    put_atomics(capabilities, operations, false)
}

/// Checks that the contexts of a copy exist. Null is accepted, because the addresses identify the device.
fn check(contexts: [CUcontext; 2]) -> Result {
    let mut named = contexts.into_iter().filter(|ctx| !ctx.is_null());
    named.try_for_each(|ctx| context::find_peer(ctx).map(drop))
}

pub fn cuMemcpyPeer(
    default: DefaultStream,
    dstDevice: CUdeviceptr,
    dstContext: CUcontext,
    srcDevice: CUdeviceptr,
    srcContext: CUcontext,
    ByteCount: usize,
) -> Result {
    current()?;
    check([dstContext, srcContext])?;
    let scope = context::scope()?;
    let target = stream::resolve(scope, default, NO_STREAM)?;
    let ends = (CopyEnd::device(dstDevice), CopyEnd::device(srcDevice));
    copy(scope, target, ends, ByteCount, Mode::Synchronous)
}

pub fn cuMemcpyPeerAsync(
    default: DefaultStream,
    dstDevice: CUdeviceptr,
    dstContext: CUcontext,
    srcDevice: CUdeviceptr,
    srcContext: CUcontext,
    ByteCount: usize,
    hStream: CUstream,
) -> Result {
    check([dstContext, srcContext])?;
    // The stream determines where the copy runs, so no current context is needed.
    let scope = context::scope().or_else(|_| stream::scope_of(hStream))?;
    let target = stream::resolve(scope, default, hStream)?;
    let ends = (CopyEnd::device(dstDevice), CopyEnd::device(srcDevice));
    copy(scope, target, ends, ByteCount, Mode::Asynchronous)
}

/// Enables access to another context's device. Fails for a context of the same device.
pub fn cuCtxEnablePeerAccess(peerContext: CUcontext, Flags: u32) -> Result {
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

pub fn cuCtxDisablePeerAccess(peerContext: CUcontext) -> Result {
    current()?;
    context::find_peer(peerContext)?;
    peer::disable(context::scope()?, scope_of(peerContext)?)
}
