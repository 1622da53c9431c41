//! Events of whole contexts.

use super::contexts::scope_of;
use crate::error::{CuError, Result};
use crate::object::context::Scope;
use crate::types::{CUcontext, CUevent};
use crate::work::barrier;

/// Here null does not mean the current context.
fn scope(ctx: CUcontext) -> Result<Scope> {
    let scope = scope_of(ctx)?;
    if ctx.is_null() {
        Err(CuError::INVALID_CONTEXT)
    } else {
        Ok(scope)
    }
}

pub fn cuCtxRecordEvent(hCtx: CUcontext, hEvent: CUevent) -> Result {
    barrier::record(scope(hCtx)?, hEvent)
}

pub fn cuCtxWaitEvent(hCtx: CUcontext, hEvent: CUevent) -> Result {
    barrier::wait(scope(hCtx)?, hEvent)
}
