//! Initialisation, version, error texts, entry points, hidden tables.

use std::ffi::{c_char, c_void};
use std::ptr;

use wormhole_api::{NoEntryPoint, entry_point};

use super::{body, put, put_if_wanted, string};
use crate::error::CuError;
use crate::export_tables;
use crate::exports::ADDRESSES;
use crate::types::{CUdriverProcAddressQueryResult, CUresult, CUuuid};
use crate::{logs, session};

/// The CUDA version whose whole surface this library exports.
const VERSION: i32 = 13000;

/// `CU_GET_PROC_ADDRESS_SUCCESS`, `_SYMBOL_NOT_FOUND`, `_VERSION_NOT_SUFFICIENT`.
const FOUND: CUdriverProcAddressQueryResult = 0;
const NO_SYMBOL: CUdriverProcAddressQueryResult = 1;
const OLD_VERSION: CUdriverProcAddressQueryResult = 2;

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`; beside it there is one for the legacy stream.
const PER_THREAD: u64 = 2;
const FLAGS: u64 = 3;

pub unsafe fn cuInit(Flags: u32) -> CUresult {
    body! {
        logs::keep();
        if Flags != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        let session = session::initialise()?;
        if session.devices().is_empty() { Err(CuError::NO_DEVICE) } else { Ok(()) }
    }
}

/// What `cuDriverGetVersion` says: no more than this library and the host's driver both have.
pub fn driver_version() -> i32 {
    match session::session() {
        Ok(session) => match session.devices().first() {
            Some(device) if device.driver_version > 0 => VERSION.min(device.driver_version),
            _ => VERSION,
        },
        Err(_) => VERSION,
    }
}

pub unsafe fn cuDriverGetVersion(driverVersion: *mut i32) -> CUresult {
    body! {
        session::not_ended()?;
        // SAFETY: as the caller promises.
        unsafe { put(driverVersion, driver_version()) }
    }
}

pub unsafe fn cuGetErrorName(error: CUresult, pStr: *mut *const c_char) -> CUresult {
    body! {
        session::not_ended()?;
        let name = CuError(error).name();
        // SAFETY: as the caller promises.
        unsafe { put(pStr, name.map_or(ptr::null(), |name| name.as_ptr())) }?;
        name.map(|_| ()).ok_or(CuError::INVALID_VALUE)
    }
}

pub unsafe fn cuGetErrorString(error: CUresult, pStr: *mut *const c_char) -> CUresult {
    body! {
        session::not_ended()?;
        let text = CuError(error).text();
        // SAFETY: as the caller promises.
        unsafe { put(pStr, text.map_or(ptr::null(), |text| text.as_ptr())) }?;
        text.map(|_| ()).ok_or(CuError::INVALID_VALUE)
    }
}

/// The address that a program means, or why there is none.
fn address(
    symbol: &[u8],
    version: i32,
    flags: u64,
) -> Result<*mut c_void, CUdriverProcAddressQueryResult> {
    if symbol.is_empty() {
        return Err(NO_SYMBOL);
    }
    let version = u32::try_from(version).unwrap_or(0);
    match entry_point(symbol, version, flags & PER_THREAD != 0) {
        Ok(index) => Ok(ADDRESSES[index]().cast_mut()),
        Err(NoEntryPoint::Symbol) => Err(NO_SYMBOL),
        Err(NoEntryPoint::Version) => Err(OLD_VERSION),
    }
}

/// Of CUDA 11: four arguments, and what is not found is an error.
pub unsafe fn cuGetProcAddress(
    symbol: *const c_char,
    pfn: *mut *mut c_void,
    driverVersion: i32,
    flags: u64,
) -> CUresult {
    body! {
        // SAFETY: as the caller promises.
        let symbol = unsafe { string(symbol) }?;
        let found = address(symbol.to_bytes(), driverVersion, flags);
        // SAFETY: as the caller promises.
        unsafe { put(pfn, found.unwrap_or(ptr::null_mut())) }?;
        found.map(|_| ()).map_err(|_| CuError::NOT_FOUND)
    }
}

pub unsafe fn cuGetProcAddress_v2(
    symbol: *const c_char,
    pfn: *mut *mut c_void,
    driverVersion: i32,
    flags: u64,
    symbolFound: *mut CUdriverProcAddressQueryResult,
) -> CUresult {
    body! {
        session::not_ended()?;
        if flags & !FLAGS != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: as the caller promises.
        let symbol = unsafe { string(symbol) }?;
        let found = address(symbol.to_bytes(), driverVersion, flags);
        // SAFETY: as the caller promises.
        unsafe {
            put(pfn, found.unwrap_or(ptr::null_mut()))?;
            put_if_wanted(symbolFound, found.err().unwrap_or(FOUND));
        }
        if symbolFound.is_null() { found.map(|_| ()).map_err(|_| CuError::NOT_FOUND) } else { Ok(()) }
    }
}

pub unsafe fn cuGetExportTable(
    ppExportTable: *mut *mut c_void,
    pExportTableId: *const CUuuid,
) -> CUresult {
    body! {
        session::not_ended()?;
        if pExportTableId.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: not null, so an identifier.
        let id = unsafe { pExportTableId.read() };
        let table = export_tables::find(&id.bytes);
        // SAFETY: as the caller promises.
        unsafe { put(ppExportTable, table.unwrap_or(ptr::null()).cast_mut()) }?;
        table.map(|_| ()).ok_or(CuError::INVALID_VALUE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exports;

    fn ask(symbol: &std::ffi::CStr, version: i32, flags: u64) -> (CUresult, usize, u32) {
        let mut pointer = ptr::null_mut();
        let mut status = 99;
        // SAFETY: all places are writable.
        let code = unsafe {
            cuGetProcAddress_v2(
                symbol.as_ptr(),
                &raw mut pointer,
                version,
                flags,
                &raw mut status,
            )
        };
        (code, pointer.addr(), status)
    }

    #[test]
    fn entry_points_are_found_by_version_and_default_stream() {
        assert_eq!(ask(c"", 0, 0), (0, 0, NO_SYMBOL));
        assert_eq!(ask(c"cuNoSuchThing", 13000, 0), (0, 0, NO_SYMBOL));
        let launch = ask(c"cuLaunchKernel", 13000, 0);
        assert_eq!(
            launch,
            (0, exports::cuLaunchKernel as *const () as usize, FOUND)
        );
        let per_thread = ask(c"cuLaunchKernel", 13000, PER_THREAD);
        assert_eq!(
            per_thread.1,
            exports::cuLaunchKernel_ptsz as *const () as usize
        );
        let old = ask(c"cuCtxGetDevice", 12000, 0).1;
        assert_eq!(old, exports::cuCtxGetDevice as *const () as usize);
        assert_eq!(ask(c"cuLibraryLoadData", 11000, 0), (0, 0, OLD_VERSION));
    }

    #[test]
    fn the_four_argument_form_reports_what_is_not_found() {
        let mut pointer = ptr::null_mut();
        // SAFETY: all places are writable.
        let code =
            unsafe { cuGetProcAddress(c"cuNoSuchThing".as_ptr(), &raw mut pointer, 13000, 0) };
        assert_eq!(code, 500);
    }
}
