//! JIT options of the compiler and the linker, and the program's log buffers.

use std::ffi::c_void;
use std::time::Duration;

use wormhole_api::constants::jit_option::{
    ERROR_LOG_BUFFER, ERROR_LOG_BUFFER_SIZE_BYTES, GLOBAL_SYMBOL_COUNT, GLOBAL_SYMBOL_NAMES,
    INFO_LOG_BUFFER, INFO_LOG_BUFFER_SIZE_BYTES, NUM_OPTIONS, WALL_TIME,
};
use wormhole_api::{JitOption, is_plain_jit_option};

use crate::error::{CuError, Result};
use crate::parameter::{In, InOut};
use crate::types::CUjit_option;

/// Options that name symbols in host memory.
const GLOBAL_SYMBOLS: std::ops::RangeInclusive<CUjit_option> =
    GLOBAL_SYMBOL_NAMES..=GLOBAL_SYMBOL_COUNT;

/// Maximum bytes of a log that are sent; the program's buffer may be larger.
const MOST_LOG: usize = 64 << 10;
/// Maximum number of options that are sent.
const MOST_OPTIONS: usize = 64;

/// JIT options of a call. They are read once: the length of a log later overwrites the size of its buffer, and
/// numbers need not outlive the call that passes them.
#[derive(Debug)]
pub struct Jit {
    /// Options with a plain number as value.
    numbers: Vec<JitOption>,
    info: Option<Text>,
    errors: Option<Text>,
    /// Destination of the compile time.
    time: Option<*mut *mut c_void>,
}

/// Log buffer of the program.
#[derive(Debug)]
struct Text {
    buffer: *mut u8,
    room: usize,
    /// Destination of the log's length.
    length: *mut *mut c_void,
}

// SAFETY: the pointers are the program's, which lends them to the driver for the call, or until the link is
// destroyed.
unsafe impl Send for Jit {}

/// No options.
pub const NONE: Jit = Jit {
    numbers: Vec::new(),
    info: None,
    errors: None,
    time: None,
};

/// Logs of the compiler or linker.
#[derive(Debug, Default)]
pub struct Logs {
    pub info: Vec<u8>,
    pub errors: Vec<u8>,
}

impl Jit {
    /// Reads the options of a call. Both lists have the same length and stay valid until the last use of the result.
    pub fn read(keys: In<'_, [CUjit_option]>, values: InOut<'_, [*mut c_void]>) -> Result<Self> {
        let keys = keys.values()?;
        if keys.len() == 0 {
            return Ok(NONE);
        }
        if values.is_null() || keys.clone().any(|key| key >= NUM_OPTIONS) {
            return Err(CuError::INVALID_VALUE);
        }
        if keys.clone().any(|key| GLOBAL_SYMBOLS.contains(&key)) {
            return Err(CuError::NOT_SUPPORTED);
        }
        let index = |key: CUjit_option| keys.clone().position(|found| found == key);
        let place = |key| values.place(index(key)?).ok();
        // The pointer itself is the size.
        let text = |buffer, bytes| {
            let buffer = values.get(index(buffer)?).ok()?.cast::<u8>();
            let room = values.get(index(bytes)?).ok()?.addr();
            let length = place(bytes)?;
            (!buffer.is_null() && room > 0).then_some(Text {
                buffer,
                room,
                length,
            })
        };
        let numbers = keys.clone().enumerate();
        let numbers = numbers
            .filter(|(_, key)| is_plain_jit_option(*key))
            .take(MOST_OPTIONS)
            .map(|(index, key)| {
                Ok(JitOption {
                    option: key,
                    reserved: 0,
                    // The pointer itself is the number.
                    value: values.get(index)?.addr() as u64,
                })
            });
        Ok(Self {
            numbers: numbers.collect::<Result<_>>()?,
            info: text(INFO_LOG_BUFFER, INFO_LOG_BUFFER_SIZE_BYTES),
            errors: text(ERROR_LOG_BUFFER, ERROR_LOG_BUFFER_SIZE_BYTES),
            time: place(WALL_TIME),
        })
    }

    /// Returns the options with a plain number as value.
    pub fn options(&self) -> &[JitOption] {
        &self.numbers
    }

    /// Returns the size of the larger log buffer in bytes.
    pub fn log_bytes(&self) -> usize {
        let room = |text: &Option<Text>| text.as_ref().map_or(0, |text| text.room);
        room(&self.info).max(room(&self.errors)).min(MOST_LOG)
    }

    /// Writes the logs and the compile time to the program's buffers.
    pub fn write_logs(&self, logs: &Logs, time: Duration) {
        for (place, text) in [(&self.info, &logs.info), (&self.errors, &logs.errors)] {
            if let Some(place) = place {
                place.fill(text);
            }
        }
        if let Some(place) = self.time {
            // SAFETY: it points into the program's array of values; the time is a float in its first bytes.
            unsafe { place.cast::<f32>().write(time.as_secs_f32() * 1e3) };
        }
    }
}

impl Text {
    fn fill(&self, text: &[u8]) {
        let length = text.len().min(self.room - 1);
        // SAFETY: the program vouches for `room` bytes, and for its array of values.
        unsafe {
            self.buffer.copy_from_nonoverlapping(text.as_ptr(), length);
            self.buffer.add(length).write(0);
            self.length.write(std::ptr::without_provenance_mut(length));
        }
    }
}

impl Logs {
    /// Reads both logs from the memory that the worker wrote.
    ///
    /// # Safety
    /// `2 * bytes` bytes are readable at `address`.
    pub unsafe fn at(address: *const u8, bytes: usize) -> Self {
        let read = |start: *const u8| {
            let mut text = vec![0; bytes];
            // SAFETY: as the caller promises.
            unsafe { start.copy_to_nonoverlapping(text.as_mut_ptr(), bytes) };
            let end = text.iter().position(|byte| *byte == 0);
            text.truncate(end.unwrap_or(bytes));
            text
        };
        Self {
            info: read(address),
            errors: read(address.wrapping_add(bytes)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::without_provenance_mut as number;

    use super::*;

    /// Reads the options of two arrays; the second may be missing.
    fn read(keys: &[CUjit_option], values: *mut *mut c_void) -> Result<Jit> {
        // SAFETY: both arrays are as long and outlive the options.
        let lists = unsafe {
            (
                In::list(keys.as_ptr(), keys.len()),
                InOut::list(values, keys.len()),
            )
        };
        Jit::read(lists.0, lists.1)
    }

    #[test]
    fn texts_fit_their_buffers_and_sizes_become_lengths() {
        let (mut info, mut errors) = ([7_u8; 16], [7_u8; 4]);
        let keys = [
            INFO_LOG_BUFFER,
            INFO_LOG_BUFFER_SIZE_BYTES,
            0,
            ERROR_LOG_BUFFER,
            ERROR_LOG_BUFFER_SIZE_BYTES,
            WALL_TIME,
        ];
        let mut values = [
            info.as_mut_ptr().cast(),
            number(16),
            number(32),
            errors.as_mut_ptr().cast(),
            number(4),
            std::ptr::null_mut(),
        ];
        let jit = read(&keys, values.as_mut_ptr()).unwrap();
        assert_eq!(jit.log_bytes(), 16);
        let options: Vec<(u32, u64)> = jit
            .options()
            .iter()
            .map(|option| (option.option, option.value))
            .collect();
        assert_eq!(options, [(0, 32)]);
        let logs = Logs {
            info: b"told".to_vec(),
            errors: b"wrong".to_vec(),
        };
        jit.write_logs(&logs, Duration::from_millis(1500));
        assert_eq!((&info[..5], &errors), (&b"told\0"[..], b"wro\0"));
        assert_eq!((values[1].addr(), values[4].addr()), (4, 3));
        let time = u32::try_from(values[5].addr()).unwrap();
        assert_eq!(f32::from_bits(time), 1500.0);

        // Later logs can use the whole buffers again.
        assert_eq!(jit.log_bytes(), 16);
        let logs = Logs {
            info: b"told once more".to_vec(),
            errors: Vec::new(),
        };
        jit.write_logs(&logs, Duration::ZERO);
        assert_eq!((&info[..15], errors[0]), (&b"told once more\0"[..], 0));
        assert_eq!((values[1].addr(), values[4].addr()), (14, 0));
    }

    #[test]
    fn numbers_are_the_calls_own() {
        let mut value = number(32);
        let jit = read(&[0], &raw mut value).unwrap();
        value = number(48);
        assert_eq!(jit.options().first().map(|option| option.value), Some(32));
        assert_eq!(value.addr(), 48);
    }

    #[test]
    fn unknown_options_are_refused() {
        let (key, mut value) = (NUM_OPTIONS, std::ptr::null_mut());
        let refused = |key, value| read(&[key], value).err();
        assert_eq!(refused(key, &raw mut value), Some(CuError::INVALID_VALUE));
        assert_eq!(refused(17, &raw mut value), Some(CuError::NOT_SUPPORTED));
        assert_eq!(refused(0, &raw mut value), None);
        assert_eq!(
            refused(0, std::ptr::null_mut()),
            Some(CuError::INVALID_VALUE)
        );
    }

    #[test]
    fn both_texts_are_read_up_to_their_zero_bytes() {
        let place = *b"ab\0xcdef";
        // SAFETY: twice four bytes.
        let logs = unsafe { Logs::at(place.as_ptr(), 4) };
        assert_eq!((logs.info, logs.errors), (b"ab".to_vec(), b"cdef".to_vec()));
    }
}
