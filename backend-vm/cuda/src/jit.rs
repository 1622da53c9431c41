//! Options and logs of the driver's compiler and linker.

use std::ffi::c_void;
use std::ptr;

use wormhole_api::constants::jit_option::{
    ERROR_LOG_BUFFER, ERROR_LOG_BUFFER_SIZE_BYTES, INFO_LOG_BUFFER, INFO_LOG_BUFFER_SIZE_BYTES,
};
use wormhole_device::Jit;

/// Options in the driver's form, and the buffers that the driver writes. It may do so until a link that was created
/// with them is destroyed.
#[derive(Debug)]
pub struct Options {
    keys: Vec<u32>,
    values: Vec<*mut c_void>,
    info: Vec<u8>,
    errors: Vec<u8>,
}

impl Options {
    pub fn new(jit: &Jit) -> Self {
        let mut new = Self {
            keys: Vec::new(),
            values: Vec::new(),
            info: vec![0; jit.log_bytes],
            errors: vec![0; jit.log_bytes],
        };
        for (key, value) in &jit.options {
            new.push(*key, plain(*value));
        }
        if jit.log_bytes > 0 {
            let bytes = ptr::without_provenance_mut(jit.log_bytes);
            let (info, errors) = (new.info.as_mut_ptr(), new.errors.as_mut_ptr());
            new.push(INFO_LOG_BUFFER, info.cast());
            new.push(INFO_LOG_BUFFER_SIZE_BYTES, bytes);
            new.push(ERROR_LOG_BUFFER, errors.cast());
            new.push(ERROR_LOG_BUFFER_SIZE_BYTES, bytes);
        }
        new
    }

    fn push(&mut self, key: u32, value: *mut c_void) {
        self.keys.push(key);
        self.values.push(value);
    }

    pub fn count(&self) -> u32 {
        u32::try_from(self.keys.len()).unwrap_or(0)
    }

    pub fn keys(&mut self) -> *mut u32 {
        self.keys.as_mut_ptr()
    }

    pub fn values(&mut self) -> *mut *mut c_void {
        self.values.as_mut_ptr()
    }

    /// Moves the logs to `jit`. Called when the driver writes no more.
    pub fn finish(self, jit: &mut Jit) {
        jit.info = text(self.info);
        jit.errors = text(self.errors);
    }
}

/// Passes a number as the pointer itself.
fn plain(value: u64) -> *mut c_void {
    ptr::without_provenance_mut(usize::try_from(value).unwrap_or(usize::MAX))
}

/// Cuts a buffer off at its zero byte.
fn text(mut buffer: Vec<u8>) -> Vec<u8> {
    let end = buffer.iter().position(|byte| *byte == 0);
    buffer.truncate(end.unwrap_or(buffer.len()));
    buffer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_driver_writes_is_found_again() {
        let mut jit = Jit {
            options: vec![(0, 32)],
            log_bytes: 16,
            ..Jit::default()
        };
        let mut options = Options::new(&jit);
        assert_eq!(
            options.keys,
            [
                0,
                INFO_LOG_BUFFER,
                INFO_LOG_BUFFER_SIZE_BYTES,
                ERROR_LOG_BUFFER,
                ERROR_LOG_BUFFER_SIZE_BYTES
            ]
        );
        assert_eq!(
            (options.values[0].addr(), options.values[2].addr()),
            (32, 16)
        );
        let errors: *mut u8 = options.values[3].cast();
        // SAFETY: the buffer has 16 bytes.
        unsafe { errors.copy_from_nonoverlapping(b"wrong".as_ptr(), 5) };
        assert!(!options.keys().is_null() && !options.values().is_null());
        options.finish(&mut jit);
        assert_eq!((jit.info, jit.errors), (Vec::new(), b"wrong".to_vec()));
        assert_eq!(Options::new(&Jit::default()).count(), 0);
    }
}
