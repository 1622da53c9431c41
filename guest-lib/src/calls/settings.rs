//! Settings of contexts and functions that are kept here.

use std::sync::atomic::Ordering;

use wormhole_api::ResetPersistingL2;

use super::contexts::{cuCtxDestroy_v2, current};
use super::{body, put};
use crate::device::attribute;
use crate::error::CuError;
use crate::types::{
    CTX_FLAGS_KEPT, CTX_FLAGS_MASK, CTX_SCHED_MASK, CUcontext, CUexecAffinityParam,
    CUexecAffinityType, CUfunction, CUresult, CUsharedconfig,
};
use crate::{context, function};

/// The greatest `CUsharedconfig`.
const SHARED_CONFIGS: CUsharedconfig = 2;
/// `CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE`: all devices since compute capability 5.0 have such banks.
const FOUR_BYTE_BANKS: CUsharedconfig = 1;
/// `CU_EXEC_AFFINITY_TYPE_SM_COUNT`, the only one.
const SM_COUNT: CUexecAffinityType = 0;

pub unsafe fn cuCtxSetFlags(flags: u32) -> CUresult {
    body! {
        let context = current()?;
        // Of the ways to wait, one may be chosen.
        let scheduling = flags & CTX_SCHED_MASK;
        if flags & !CTX_FLAGS_MASK != 0 || scheduling.count_ones() > 1 {
            return Err(CuError::INVALID_VALUE);
        }
        // Host memory is mapped and core dumps are made without being asked for.
        context.flags.store(flags & CTX_FLAGS_KEPT, Ordering::Relaxed);
        Ok(())
    }
}

pub unsafe fn cuCtxGetSharedMemConfig(pConfig: *mut CUsharedconfig) -> CUresult {
    body! {
        current()?;
        // SAFETY: as the caller promises.
        unsafe { put(pConfig, FOUR_BYTE_BANKS) }
    }
}

pub unsafe fn cuCtxSetSharedMemConfig(config: CUsharedconfig) -> CUresult {
    body! {
        current()?;
        if config > SHARED_CONFIGS { Err(CuError::INVALID_VALUE) } else { Ok(()) }
    }
}

pub unsafe fn cuFuncSetSharedMemConfig(hfunc: CUfunction, config: CUsharedconfig) -> CUresult {
    body! {
        context::scope()?;
        function::find(hfunc)?;
        if config > SHARED_CONFIGS { Err(CuError::INVALID_VALUE) } else { Ok(()) }
    }
}

/// A context without an affinity of its own executes on all multiprocessors.
pub unsafe fn cuCtxGetExecAffinity(
    pExecAffinity: *mut CUexecAffinityParam,
    kind: CUexecAffinityType,
) -> CUresult {
    body! {
        let scope = context::scope()?;
        if pExecAffinity.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        if kind != SM_COUNT {
            return Err(CuError::UNSUPPORTED_EXEC_AFFINITY);
        }
        let processors = scope.session.device().value(attribute::MULTIPROCESSOR_COUNT);
        let affinity = CUexecAffinityParam { r#type: SM_COUNT, smCount: processors.cast_unsigned() };
        // SAFETY: as the caller promises.
        unsafe { put(pExecAffinity, affinity) }
    }
}

/// Profilers reach the guest through CUPTI, if at all; there is nothing to switch.
pub unsafe fn cuProfilerStart() -> CUresult {
    body! { current().map(|_| ()) }
}

pub unsafe fn cuProfilerStop() -> CUresult {
    body! { current().map(|_| ()) }
}

pub unsafe fn cuCtxResetPersistingL2Cache() -> CUresult {
    body! { context::scope()?.session.request(&ResetPersistingL2 {}, |()| ()) }
}

pub unsafe fn cuCtxAttach(pctx: *mut CUcontext, flags: u32) -> CUresult {
    body! {
        let facts = current()?;
        if pctx.is_null() || flags != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        facts.attach();
        // SAFETY: as the caller promises.
        unsafe { put(pctx, context::current()) }
    }
}

pub unsafe fn cuCtxDetach(ctx: CUcontext) -> CUresult {
    body! {
        let facts = current()?;
        if ctx != context::current() {
            return Err(CuError::INVALID_CONTEXT);
        }
        if facts.detach() {
            return Ok(());
        }
        // SAFETY: as the caller promises.
        match unsafe { cuCtxDestroy_v2(ctx) } {
            0 => Ok(()),
            error => Err(CuError(error)),
        }
    }
}
