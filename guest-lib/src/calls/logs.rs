//! Error log (`cuLogsRegisterCallback` and related calls).

use std::ffi::{c_char, c_void};
use std::os::unix::ffi::OsStrExt;

use crate::error::{CuError, Result};
use crate::logs;
use crate::parameter::{InOut, Out, Pointer, Text};
use crate::types::{CUlogIterator, CUlogsCallback, CUlogsCallbackHandle};

pub fn cuLogsRegisterCallback(
    callbackFunc: CUlogsCallback,
    userData: Pointer<'_, c_void>,
    callback_out: Out<'_, CUlogsCallbackHandle>,
) -> Result {
    logs::start();
    callback_out.not_null()?;
    let id = logs::register(callbackFunc, userData.as_ptr())?;
    callback_out.put(std::ptr::without_provenance_mut(id))
}

pub fn cuLogsUnregisterCallback(callback: CUlogsCallbackHandle) -> Result {
    logs::unregister(callback.addr())
}

/// Returns an iterator at the end of the log. The native driver accepts any flags here.
pub fn cuLogsCurrent(iterator_out: Out<'_, CUlogIterator>, _flags: u32) -> Result {
    logs::start();
    iterator_out.put(logs::current())
}

/// Returns the lines after an iterator, or all lines without one, and moves the iterator behind them.
fn lines(iterator: InOut<'_, CUlogIterator>, flags: u32) -> Result<Vec<String>> {
    logs::start();
    if flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let (lines, behind) = logs::since(iterator.get().ok());
    iterator.put_if_wanted(behind);
    Ok(lines)
}

pub fn cuLogsDumpToFile(
    iterator: InOut<'_, CUlogIterator>,
    pathToFile: Text<'_>,
    flags: u32,
) -> Result {
    let path = std::ffi::OsStr::from_bytes(pathToFile.get()?.to_bytes());
    let text = lines(iterator, flags)?.concat();
    std::fs::write(path, text).map_err(|_| CuError::INVALID_VALUE)
}

/// Writes lines to a buffer. Omits the oldest lines if not all fit.
pub fn cuLogsDumpToMemory(
    iterator: InOut<'_, CUlogIterator>,
    buffer: Pointer<'_, c_char>,
    size: InOut<'_, usize>,
    flags: u32,
) -> Result {
    if buffer.is_null() || size.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let room = size.get()?;
    if room == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let mut lines = lines(iterator, flags)?;
    while lines.iter().map(String::len).sum::<usize>() >= room {
        lines.remove(0);
    }
    let text = lines.concat();
    // SAFETY: `size` is the length of the buffer.
    let buffer = unsafe { buffer.room(room) };
    buffer.put_all(text.bytes().chain([0]))?;
    size.put(text.len())
}
