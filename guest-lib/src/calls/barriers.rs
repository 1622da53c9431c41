//! Events of whole contexts.

use super::body;
use super::contexts::scope_of;
use crate::barrier;
use crate::types::{CUcontext, CUevent, CUresult};

pub unsafe fn cuCtxRecordEvent(hCtx: CUcontext, hEvent: CUevent) -> CUresult {
    body! { barrier::record(scope_of(hCtx)?, hEvent) }
}

pub unsafe fn cuCtxWaitEvent(hCtx: CUcontext, hEvent: CUevent) -> CUresult {
    body! { barrier::wait(scope_of(hCtx)?, hEvent) }
}
