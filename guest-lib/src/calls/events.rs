//! Events.

use super::{body, put};
use crate::error::CuError;
use crate::stream::target;
use crate::types::{CUevent, CUresult, CUstream, DefaultStream};
use crate::{context, event};

pub unsafe fn cuEventCreate(phEvent: *mut CUevent, Flags: u32) -> CUresult {
    body! {
        let scope = context::scope()?;
        if phEvent.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: as the caller promises.
        unsafe { put(phEvent, event::create(scope, Flags)?) }
    }
}

pub unsafe fn cuEventDestroy_v2(hEvent: CUevent) -> CUresult {
    body! { event::destroy(event::scope(hEvent)?, hEvent) }
}

pub unsafe fn cuEventRecord(
    default: DefaultStream,
    hEvent: CUevent,
    hStream: CUstream,
) -> CUresult {
    // SAFETY: as the caller promises.
    unsafe { cuEventRecordWithFlags(default, hEvent, hStream, 0) }
}

pub unsafe fn cuEventRecordWithFlags(
    default: DefaultStream,
    hEvent: CUevent,
    hStream: CUstream,
    flags: u32,
) -> CUresult {
    body! {
        let (scope, target) = target(default, hStream)?;
        if flags & !1 != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        event::record(scope, hEvent, target, flags)
    }
}

pub unsafe fn cuEventQuery(hEvent: CUevent) -> CUresult {
    body! { event::query(event::scope(hEvent)?, hEvent) }
}

pub unsafe fn cuEventSynchronize(hEvent: CUevent) -> CUresult {
    body! { event::synchronize(event::scope(hEvent)?, hEvent) }
}

pub unsafe fn cuEventElapsedTime_v2(
    pMilliseconds: *mut f32,
    hStart: CUevent,
    hEnd: CUevent,
) -> CUresult {
    body! {
        let scope = event::scope(hStart)?;
        if pMilliseconds.is_null() {
            return Err(CuError::INVALID_HANDLE);
        }
        let milliseconds = event::elapsed(scope, hStart, hEnd)?;
        // SAFETY: as the caller promises.
        unsafe { put(pMilliseconds, milliseconds) }
    }
}
