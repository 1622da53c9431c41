//! Access between the memories of devices.

use super::body;
use super::contexts::current;
use crate::context;
use crate::error::CuError;
use crate::types::{CUcontext, CUresult};

/// A context of the same device is no peer.
pub unsafe fn cuCtxEnablePeerAccess(peerContext: CUcontext, Flags: u32) -> CUresult {
    body! {
        current()?;
        context::find_active(peerContext).map_err(|_| CuError::INVALID_CONTEXT)?;
        if Flags != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        Err(CuError::PEER_ACCESS_UNSUPPORTED)
    }
}

pub unsafe fn cuCtxDisablePeerAccess(peerContext: CUcontext) -> CUresult {
    body! {
        current()?;
        context::find_active(peerContext).map_err(|_| CuError::INVALID_CONTEXT)?;
        Err(CuError::PEER_ACCESS_NOT_ENABLED)
    }
}
