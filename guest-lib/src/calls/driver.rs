//! Initialization, version, error texts, entry points, and export tables.

use std::ffi::{c_char, c_void};
use std::ptr;

use wormhole_api::constants::api_version::VERSION;
use wormhole_api::constants::proc_address_flags::{LEGACY_STREAM, PER_THREAD_DEFAULT_STREAM};
use wormhole_api::constants::proc_address_result::{
    SUCCESS, SYMBOL_NOT_FOUND, VERSION_NOT_SUFFICIENT,
};
use wormhole_api::{NoEntryPoint, entry_point};

use crate::error::{CuError, Result};
use crate::export_tables;
use crate::exports::ADDRESSES;
use crate::parameter::{In, Out, Text};
use crate::types::{CUdriverProcAddressQueryResult, CUresult, CUuuid};
use crate::{logs, session};

pub fn cuInit(Flags: u32) -> Result {
    logs::start();
    if Flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let session = session::initialise()?;
    if session.devices().is_empty() {
        Err(CuError::NO_DEVICE)
    } else {
        Ok(())
    }
}

/// Returns the version for `cuDriverGetVersion`: the lower of this library's and the host driver's.
pub fn driver_version() -> i32 {
    match session::session() {
        Ok(session) => match session.devices().first() {
            Some(device) if device.driver_version > 0 => VERSION.min(device.driver_version),
            _ => VERSION,
        },
        Err(_) => VERSION,
    }
}

pub fn cuDriverGetVersion(driverVersion: Out<'_, i32>) -> Result {
    session::not_ended()?;
    driverVersion.put(driver_version())
}

pub fn cuGetErrorName(error: CUresult, pStr: Out<'_, *const c_char>) -> Result {
    session::not_ended()?;
    let name = CuError(error).name();
    pStr.put(name.map_or(ptr::null(), |name| name.as_ptr()))?;
    name.map(|_| ()).ok_or(CuError::INVALID_VALUE)
}

pub fn cuGetErrorString(error: CUresult, pStr: Out<'_, *const c_char>) -> Result {
    session::not_ended()?;
    let text = CuError(error).text();
    pStr.put(text.map_or(ptr::null(), |text| text.as_ptr()))?;
    text.map(|_| ()).ok_or(CuError::INVALID_VALUE)
}

/// Returns the address of an entry point, or the reason why none is found.
fn address(
    symbol: &[u8],
    version: i32,
    flags: u64,
) -> std::result::Result<*mut c_void, CUdriverProcAddressQueryResult> {
    if symbol.is_empty() {
        return Err(SYMBOL_NOT_FOUND);
    }
    let version = u32::try_from(version).unwrap_or(0);
    match entry_point(symbol, version, flags & PER_THREAD_DEFAULT_STREAM != 0) {
        Ok(index) => Ok(ADDRESSES[index]().cast_mut()),
        Err(NoEntryPoint::Symbol) => Err(SYMBOL_NOT_FOUND),
        Err(NoEntryPoint::Version) => Err(VERSION_NOT_SUFFICIENT),
    }
}

/// Looks up an entry point with the signature of CUDA 11: four arguments, and an error if none is found.
pub fn cuGetProcAddress(
    symbol: Text<'_>,
    pfn: Out<'_, *mut c_void>,
    driverVersion: i32,
    flags: u64,
) -> Result {
    let symbol = symbol.get()?;
    let found = address(symbol.to_bytes(), driverVersion, flags);
    pfn.put(found.unwrap_or(ptr::null_mut()))?;
    found.map(|_| ()).map_err(|_| CuError::NOT_FOUND)
}

pub fn cuGetProcAddress_v2(
    symbol: Text<'_>,
    pfn: Out<'_, *mut c_void>,
    driverVersion: i32,
    flags: u64,
    symbolFound: Out<'_, CUdriverProcAddressQueryResult>,
) -> Result {
    session::not_ended()?;
    if flags & !(LEGACY_STREAM | PER_THREAD_DEFAULT_STREAM) != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let symbol = symbol.get()?;
    let found = address(symbol.to_bytes(), driverVersion, flags);
    pfn.put(found.unwrap_or(ptr::null_mut()))?;
    symbolFound.put_if_wanted(found.err().unwrap_or(SUCCESS));
    if symbolFound.is_null() {
        found.map(|_| ()).map_err(|_| CuError::NOT_FOUND)
    } else {
        Ok(())
    }
}

pub fn cuGetExportTable(
    ppExportTable: Out<'_, *mut c_void>,
    pExportTableId: In<'_, CUuuid>,
) -> Result {
    session::not_ended()?;
    let id = pExportTableId.get()?;
    let table = export_tables::find(&id.bytes);
    ppExportTable.put(table.unwrap_or(ptr::null()).cast_mut())?;
    table.map(|_| ()).ok_or(CuError::INVALID_VALUE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exports;

    fn ask(symbol: &std::ffi::CStr, version: i32, flags: u64) -> (CUresult, usize, u32) {
        let (mut pointer, mut status) = (ptr::null_mut(), 99);
        let (place, of_status) = (Out::from(&mut pointer), Out::from(&mut status));
        let code = exports::cuGetProcAddress_v2(symbol.into(), place, version, flags, of_status);
        (code, pointer.addr(), status)
    }

    #[test]
    fn entry_points_are_found_by_version_and_default_stream() {
        assert_eq!(ask(c"", 0, 0), (0, 0, SYMBOL_NOT_FOUND));
        assert_eq!(ask(c"cuNoSuchThing", 13000, 0), (0, 0, SYMBOL_NOT_FOUND));
        let launch = ask(c"cuLaunchKernel", 13000, 0);
        assert_eq!(
            launch,
            (0, exports::cuLaunchKernel as *const () as usize, SUCCESS)
        );
        let per_thread = ask(c"cuLaunchKernel", 13000, PER_THREAD_DEFAULT_STREAM);
        assert_eq!(
            per_thread.1,
            exports::cuLaunchKernel_ptsz as *const () as usize
        );
        let old = ask(c"cuCtxGetDevice", 12000, 0).1;
        assert_eq!(old, exports::cuCtxGetDevice as *const () as usize);
        assert_eq!(
            ask(c"cuLibraryLoadData", 11000, 0),
            (0, 0, VERSION_NOT_SUFFICIENT)
        );
    }

    #[test]
    fn the_four_argument_form_reports_what_is_not_found() {
        let mut pointer = ptr::null_mut();
        let (name, place) = (c"cuNoSuchThing".into(), Out::from(&mut pointer));
        let code = exports::cuGetProcAddress(name, place, 13000, 0);
        assert_eq!(code, 500);
    }
}
