//! Settings of contexts and functions, most of them stored in the guest.

use std::sync::atomic::Ordering;

use wormhole_api::ResetPersistingL2;
use wormhole_api::constants::context_flags::{
    FLAGS_MASK, LMEM_RESIZE_TO_MAX, SCHED_MASK, SYNC_MEMOPS,
};
use wormhole_api::constants::execution_affinity::SM_COUNT;
use wormhole_api::constants::shared_memory_config::{EIGHT_BYTE_BANK_SIZE, FOUR_BYTE_BANK_SIZE};

use super::contexts::{cuCtxDestroy_v2, current};
use crate::device::attribute;
use crate::error::{CuError, Result};
use crate::object::{context, function};
use crate::parameter::Out;
use crate::types::{
    CUcontext, CUexecAffinityParam, CUexecAffinityType, CUfunction, CUsharedconfig,
};

/// Flags that a context reports.
const KEPT: u32 = SCHED_MASK | LMEM_RESIZE_TO_MAX | SYNC_MEMOPS;

pub fn cuCtxSetFlags(flags: u32) -> Result {
    let context = current()?;
    // At most one scheduling flag may be set.
    let scheduling = flags & SCHED_MASK;
    if flags & !FLAGS_MASK != 0 || scheduling.count_ones() > 1 {
        return Err(CuError::INVALID_VALUE);
    }
    // The other flags are not stored: host memory is always mapped, and core dumps cannot be enabled.
    context.flags.store(flags & KEPT, Ordering::Relaxed);
    Ok(())
}

/// Reports the bank size of all devices since compute capability 5.0.
pub fn cuCtxGetSharedMemConfig(pConfig: Out<'_, CUsharedconfig>) -> Result {
    current()?;
    pConfig.put(FOUR_BYTE_BANK_SIZE)
}

pub fn cuCtxSetSharedMemConfig(config: CUsharedconfig) -> Result {
    current()?;
    if config > EIGHT_BYTE_BANK_SIZE {
        Err(CuError::INVALID_VALUE)
    } else {
        Ok(())
    }
}

pub fn cuFuncSetSharedMemConfig(hfunc: CUfunction, config: CUsharedconfig) -> Result {
    context::scope()?;
    function::find(hfunc)?;
    if config > EIGHT_BYTE_BANK_SIZE {
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
    pExecAffinity.not_null()?;
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
