//! Log lines of this library, for programs that read the driver's log (`cuLogs*`).

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::Once;

use wormhole_lock::{Mutex, MutexGuard};

use wormhole_api::constants::log_level::ERROR;

use crate::error::{CuError, Result};
use crate::log;
use crate::types::{CUlogIterator, CUlogsCallback};

/// Number of lines kept (CUDA driver API, "Error Log Management Functions").
const LINES: usize = 100;

/// A program's callback with its user data.
#[derive(Clone, Copy, Debug)]
struct Callback {
    id: usize,
    function: CUlogsCallback,
    data: usize,
}

#[derive(Debug)]
struct Logs {
    /// Number of lines so far, modulo 2³².
    said: u32,
    /// The last [`LINES`] lines.
    lines: VecDeque<String>,
    callbacks: Vec<Callback>,
    next: usize,
}

static LOGS: Mutex<Logs> = Mutex::new(Logs {
    said: 0,
    lines: VecDeque::new(),
    callbacks: Vec::new(),
    next: 1,
});

fn logs() -> MutexGuard<'static, Logs> {
    LOGS.lock()
}

/// Starts keeping lines. Called by every function that reads the log, and when the library starts work.
pub fn start() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| log::to(said));
}

fn said(line: &str) {
    let mut logs = logs();
    if logs.lines.len() == LINES {
        logs.lines.pop_front();
    }
    logs.lines.push_back(line.to_owned());
    logs.said = logs.said.wrapping_add(1);
    let callbacks = logs.callbacks.clone();
    drop(logs);
    for callback in callbacks {
        let Some(function) = callback.function else {
            continue;
        };
        let mut text = line.as_bytes().to_vec();
        text.push(0);
        let data = std::ptr::with_exposed_provenance_mut::<c_void>(callback.data);
        // SAFETY: the program registered the function for such calls; the text is a string of that length.
        unsafe { function(data, ERROR, text.as_mut_ptr().cast(), line.len()) };
    }
}

/// Implements `cuLogsRegisterCallback`; returns the number of the registration.
pub fn register(function: CUlogsCallback, data: *mut c_void) -> Result<usize> {
    if function.is_none() {
        return Err(CuError::INVALID_VALUE);
    }
    let mut logs = logs();
    let id = logs.next;
    logs.next += 1;
    logs.callbacks.push(Callback {
        id,
        function,
        data: data.expose_provenance(),
    });
    Ok(id)
}

/// Implements `cuLogsUnregisterCallback`.
pub fn unregister(id: usize) -> Result {
    let mut logs = logs();
    let before = logs.callbacks.len();
    logs.callbacks.retain(|callback| callback.id != id);
    if logs.callbacks.len() < before {
        Ok(())
    } else {
        Err(CuError::INVALID_VALUE)
    }
}

/// Implements `cuLogsCurrent`: returns the iterator behind the last line.
pub fn current() -> CUlogIterator {
    logs().said
}

/// Returns the lines from an iterator on, each with a newline, and the iterator behind them.
pub fn since(place: Option<CUlogIterator>) -> (Vec<String>, CUlogIterator) {
    let logs = logs();
    let kept = u32::try_from(logs.lines.len()).unwrap_or(0);
    let wanted = place.map_or(kept, |place| logs.said.wrapping_sub(place));
    let skipped = kept.saturating_sub(wanted) as usize;
    let lines = logs.lines.iter().skip(skipped);
    (lines.map(|line| format!("{line}\n")).collect(), logs.said)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_found_from_a_place_on_until_there_are_too_many() {
        static HEARD: Mutex<Vec<(usize, String)>> = Mutex::new(Vec::new());
        unsafe extern "C" fn hear(
            data: *mut c_void,
            level: u32,
            text: *mut std::ffi::c_char,
            length: usize,
        ) {
            assert_eq!(level, ERROR);
            // SAFETY: the caller passes a string.
            let text = unsafe { std::ffi::CStr::from_ptr(text) };
            assert_eq!(text.to_bytes().len(), length);
            let text = text.to_string_lossy().into_owned();
            HEARD.lock().push((data.addr(), text));
        }
        let start = current();
        said("one");
        let callback = register(Some(hear), std::ptr::without_provenance_mut(7)).unwrap();
        said("two");
        unregister(callback).unwrap();
        assert_eq!(unregister(callback), Err(CuError::INVALID_VALUE));
        assert_eq!(
            register(None, std::ptr::null_mut()),
            Err(CuError::INVALID_VALUE)
        );
        let (lines, place) = since(Some(start));
        assert_eq!(lines, ["one\n", "two\n"]);
        assert_eq!(place, current());
        assert_eq!(since(Some(place)).0, [""; 0]);
        assert_eq!(*HEARD.lock(), [(7, "two".to_owned())]);
        for number in 0..2 * LINES {
            said(&number.to_string());
        }
        let (lines, _) = since(Some(start));
        assert_eq!(lines.len(), LINES);
        assert_eq!(lines[LINES - 1], "199\n");
        assert_eq!(since(None).0.len(), LINES);
    }
}
