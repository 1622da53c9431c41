//! Events of whole contexts.

use super::contexts::scope_of;
use crate::error::{CuError, Result};
use crate::object::context::Scope;
use crate::object::context_events;
use crate::types::{CUcontext, CUevent};

/// Returns the scope of a context. Unlike elsewhere, null does not mean the current context.
fn scope(ctx: CUcontext) -> Result<Scope> {
    let scope = scope_of(ctx)?;
    if ctx.is_null() {
        Err(CuError::INVALID_CONTEXT)
    } else {
        Ok(scope)
    }
}

pub fn cuCtxRecordEvent(hCtx: CUcontext, hEvent: CUevent) -> Result {
    context_events::record(scope(hCtx)?, hEvent)
}

pub fn cuCtxWaitEvent(hCtx: CUcontext, hEvent: CUevent) -> Result {
    context_events::wait(scope(hCtx)?, hEvent)
}
