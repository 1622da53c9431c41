//! Settings of contexts and functions, most of them stored in the guest.

use std::sync::atomic::Ordering;

use wormhole_api::ResetPersistingL2;

use super::contexts::{cuCtxDestroy_v2, current};
use crate::device::attribute;
use crate::error::{CuError, Result};
use crate::object::{context, function};
use crate::parameter::Out;
use crate::types::{
    CTX_FLAGS_KEPT, CTX_FLAGS_MASK, CTX_SCHED_MASK, CUcontext, CUexecAffinityParam,
    CUexecAffinityType, CUfunction, CUsharedconfig,
};

/// Greatest `CUsharedconfig`.
const SHARED_CONFIGS: CUsharedconfig = 2;
/// `CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE`, the bank size of all devices since compute capability 5.0.
const FOUR_BYTE_BANKS: CUsharedconfig = 1;
/// `CU_EXEC_AFFINITY_TYPE_SM_COUNT`, the only affinity type.
const SM_COUNT: CUexecAffinityType = 0;

pub fn cuCtxSetFlags(flags: u32) -> Result {
    let context = current()?;
    // At most one scheduling flag may be set.
    let scheduling = flags & CTX_SCHED_MASK;
    if flags & !CTX_FLAGS_MASK != 0 || scheduling.count_ones() > 1 {
        return Err(CuError::INVALID_VALUE);
    }
    // The other flags are not stored: host memory is always mapped, and core dumps cannot be enabled.
    context
        .flags
        .store(flags & CTX_FLAGS_KEPT, Ordering::Relaxed);
    Ok(())
}

pub fn cuCtxGetSharedMemConfig(pConfig: Out<'_, CUsharedconfig>) -> Result {
    current()?;
    pConfig.put(FOUR_BYTE_BANKS)
}

pub fn cuCtxSetSharedMemConfig(config: CUsharedconfig) -> Result {
    current()?;
    if config > SHARED_CONFIGS {
        Err(CuError::INVALID_VALUE)
    } else {
        Ok(())
    }
}

pub fn cuFuncSetSharedMemConfig(hfunc: CUfunction, config: CUsharedconfig) -> Result {
    context::scope()?;
    function::find(hfunc)?;
    if config > SHARED_CONFIGS {
        Err(CuError::INVALID_VALUE)
    } else {
        Ok(())
    }
}

/// Returns the number of all multiprocessors, as for a context without execution affinity.
pub fn cuCtxGetExecAffinity(
    pExecAffinity: Out<'_, CUexecAffinityParam>,
    kind: CUexecAffinityType,
) -> Result {
    let scope = context::scope()?;
    if pExecAffinity.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    if kind != SM_COUNT {
        return Err(CuError::UNSUPPORTED_EXEC_AFFINITY);
    }
    let processors = scope
        .session
        .device()
        .value(attribute::MULTIPROCESSOR_COUNT);
    let affinity = CUexecAffinityParam {
        r#type: SM_COUNT,
        smCount: processors.cast_unsigned(),
    };
    pExecAffinity.put(affinity)
}

/// Succeeds without effect: profilers use CUPTI, if anything, so there is no profiler to start.
pub fn cuProfilerStart() -> Result {
    current().map(|_| ())
}

pub fn cuProfilerStop() -> Result {
    current().map(|_| ())
}

pub fn cuCtxResetPersistingL2Cache() -> Result {
    context::scope()?
        .session
        .request(&ResetPersistingL2 {}, |()| ())
}

pub fn cuCtxAttach(pctx: Out<'_, CUcontext>, flags: u32) -> Result {
    let facts = current()?;
    if pctx.is_null() || flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    facts.attach();
    pctx.put(context::current())
}

pub fn cuCtxDetach(ctx: CUcontext) -> Result {
    let facts = current()?;
    if ctx != context::current() {
        return Err(CuError::INVALID_CONTEXT);
    }
    if facts.detach() {
        return Ok(());
    }
    cuCtxDestroy_v2(ctx)
}
