//! The log of the library.

use std::ffi::{c_char, c_void};
use std::os::unix::ffi::OsStrExt;

use super::{body, put, string};
use crate::error::{CuError, Result};
use crate::logs;
use crate::types::{CUlogIterator, CUlogsCallback, CUlogsCallbackHandle, CUresult};

pub unsafe fn cuLogsRegisterCallback(
    callbackFunc: CUlogsCallback,
    userData: *const c_void,
    callback_out: *mut CUlogsCallbackHandle,
) -> CUresult {
    body! {
        logs::keep();
        if callback_out.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        let id = logs::register(callbackFunc, userData.cast_mut())?;
        // SAFETY: as the caller promises.
        unsafe { put(callback_out, std::ptr::without_provenance_mut(id)) }
    }
}

pub unsafe fn cuLogsUnregisterCallback(callback: CUlogsCallbackHandle) -> CUresult {
    body! { logs::unregister(callback.addr()) }
}

/// The driver takes any flags here.
pub unsafe fn cuLogsCurrent(iterator_out: *mut CUlogIterator, _flags: u32) -> CUresult {
    body! {
        logs::keep();
        // SAFETY: as the caller promises.
        unsafe { put(iterator_out, logs::current()) }
    }
}

/// The lines from where an iterator is, which then is behind them; all lines without one.
///
/// # Safety
/// `iterator` is null or readable and writable.
unsafe fn lines(iterator: *mut CUlogIterator, flags: u32) -> Result<Vec<String>> {
    logs::keep();
    if flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: as the caller promises.
    let place = unsafe { iterator.as_ref() }.copied();
    let (lines, behind) = logs::since(place);
    if !iterator.is_null() {
        // SAFETY: as the caller promises.
        unsafe { iterator.write(behind) };
    }
    Ok(lines)
}

pub unsafe fn cuLogsDumpToFile(
    iterator: *mut CUlogIterator,
    pathToFile: *const c_char,
    flags: u32,
) -> CUresult {
    body! {
        // SAFETY: as the caller promises.
        let path = std::ffi::OsStr::from_bytes(unsafe { string(pathToFile) }?.to_bytes());
        // SAFETY: as the caller promises.
        let text = unsafe { lines(iterator, flags) }?.concat();
        std::fs::write(path, text).map_err(|_| CuError::INVALID_VALUE)
    }
}

/// The oldest lines are left out where there is no room for all.
pub unsafe fn cuLogsDumpToMemory(
    iterator: *mut CUlogIterator,
    buffer: *mut c_char,
    size: *mut usize,
    flags: u32,
) -> CUresult {
    body! {
        if buffer.is_null() || size.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: not null, so a size.
        let room = unsafe { size.read() };
        if room == 0 {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: as the caller promises.
        let mut lines = unsafe { lines(iterator, flags) }?;
        while lines.iter().map(String::len).sum::<usize>() >= room {
            lines.remove(0);
        }
        let text = lines.concat();
        // SAFETY: the program vouches for that much room, which the text and its end fit.
        unsafe {
            buffer.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), text.len());
            buffer.add(text.len()).write(0);
        }
        // SAFETY: as the caller promises.
        unsafe { put(size, text.len()) }
    }
}
