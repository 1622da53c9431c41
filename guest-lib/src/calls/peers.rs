//! Access between the memories of devices.

use wormhole_api::PeerAttribute;

use super::contexts::{current, scope_of};
use super::copies::{cuMemcpyDtoD_v2, cuMemcpyDtoDAsync_v2};
use super::devices::{ordinal, tell_atomics};
use super::{body, put};
use crate::context;
use crate::error::{CuError, Result};
use crate::peer;
use crate::session::session;
use crate::types::{
    CUatomicOperation, CUcontext, CUdevice, CUdeviceptr, CUresult, CUstream, DefaultStream,
};

/// `CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED`, `_NATIVE_ATOMIC_SUPPORTED`.
const ACCESS_SUPPORTED: u32 = 2;
const NATIVE_ATOMIC_SUPPORTED: u32 = 3;

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
        let native = attribute(from, to, NATIVE_ATOMIC_SUPPORTED)? != 0;
        // SAFETY: the program vouches for that many operations and places.
        unsafe { tell_atomics(capabilities, operations, count, native) }
    }
}

/// Sees to it that both contexts of a copy are there.
fn check(contexts: [CUcontext; 2]) -> Result {
    for ctx in contexts {
        context::find_active(ctx).map_err(|_| CuError::INVALID_CONTEXT)?;
    }
    Ok(())
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
        // SAFETY: neither end is memory of the program's own.
        let code = unsafe { cuMemcpyDtoD_v2(default, dstDevice, srcDevice, ByteCount) };
        result_of(code)
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
        current()?;
        check([dstContext, srcContext])?;
        // SAFETY: as above.
        let code =
            unsafe { cuMemcpyDtoDAsync_v2(default, dstDevice, srcDevice, ByteCount, hStream) };
        result_of(code)
    }
}

fn result_of(code: CUresult) -> Result {
    if code == 0 {
        Ok(())
    } else {
        Err(CuError(code))
    }
}

/// A context of the same device is no peer.
pub unsafe fn cuCtxEnablePeerAccess(peerContext: CUcontext, Flags: u32) -> CUresult {
    body! {
        current()?;
        let (facts, _) = context::find_active(peerContext).map_err(|_| CuError::INVALID_CONTEXT)?;
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
        context::find_active(peerContext).map_err(|_| CuError::INVALID_CONTEXT)?;
        peer::disable(context::scope()?, scope_of(peerContext)?)
    }
}
