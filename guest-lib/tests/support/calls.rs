//! Calls of the library that several tests make.

use std::ffi::c_void;
use std::ptr::null_mut;

use super::Backend;

type Pointer = *mut c_void;

unsafe extern "C" {
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> u32;
    pub fn cuLaunchKernel(
        function: Pointer,
        wide: u32,
        high: u32,
        deep: u32,
        block_wide: u32,
        block_high: u32,
        block_deep: u32,
        shared: u32,
        stream: Pointer,
        parameters: *mut Pointer,
        extra: *mut Pointer,
    ) -> u32;
}

impl Backend {
    /// Returns the messages since the last call, after a request, behind which no record is outstanding.
    pub fn messages(&self) -> Vec<String> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both places are writable.
        assert_eq!(unsafe { cuMemGetInfo_v2(&raw mut free, &raw mut total) }, 0);
        let mut sent = self.shared.take();
        assert_eq!(sent.pop().as_deref(), Some("MemGetInfo?"));
        sent
    }
}

/// Launches a kernel of the library, which has one parameter of four bytes, on a stream of the library.
pub fn launch(function: Pointer, stream: Pointer) {
    let mut value = 7_u32;
    let mut values = [(&raw mut value).cast()];
    let values = values.as_mut_ptr();
    // SAFETY: the library's handles, and a kernel with one parameter of four bytes.
    let launched =
        unsafe { cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, values, null_mut()) };
    assert_eq!(launched, 0);
}
