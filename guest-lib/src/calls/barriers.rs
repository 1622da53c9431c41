//! Events of whole contexts.

use super::body;
use super::contexts::scope_of;
use crate::barrier;
use crate::context::Scope;
use crate::error::{CuError, Result};
use crate::types::{CUcontext, CUevent, CUresult};

/// Here null does not mean the current context.
fn scope(ctx: CUcontext) -> Result<Scope> {
    let scope = scope_of(ctx)?;
    if ctx.is_null() {
        Err(CuError::INVALID_CONTEXT)
    } else {
        Ok(scope)
    }
}

pub unsafe fn cuCtxRecordEvent(hCtx: CUcontext, hEvent: CUevent) -> CUresult {
    body! { barrier::record(scope(hCtx)?, hEvent) }
}

pub unsafe fn cuCtxWaitEvent(hCtx: CUcontext, hEvent: CUevent) -> CUresult {
    body! { barrier::wait(scope(hCtx)?, hEvent) }
}
