//! The driver's library, whichever a program finds.

use std::ffi::{CString, c_void};

/// `libcuda.so.1`.
#[derive(Clone, Copy, Debug)]
pub struct Library(*mut c_void);

/// Most arguments of a function.
pub const ARGUMENTS: usize = 18;

type Function = unsafe extern "C" fn(
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
) -> u32;

/// What is returned for a function that the library does not have.
pub const ABSENT: u32 = u32::MAX;

impl Library {
    pub fn open() -> Self {
        // SAFETY: loading the driver's library runs its constructors, which it is made for.
        let handle = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null(), "there is no libcuda.so.1");
        Self(handle)
    }

    /// Calls a function with integers and addresses; what is more than its parameters it does not see (System
    /// V ABI of x86-64, section 3.2.3).
    pub fn call(self, name: &str, arguments: &[u64]) -> u32 {
        let name = CString::new(name).expect("a name");
        // SAFETY: the library is open.
        let found = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if found.is_null() {
            return ABSENT;
        }
        // SAFETY: the name is that of a function of the driver API, which takes integers and pointers.
        let function = unsafe { std::mem::transmute::<*mut c_void, Function>(found) };
        let mut a = [0; ARGUMENTS];
        a[..arguments.len()].copy_from_slice(arguments);
        // SAFETY: the caller's arguments are meant to be wrong; the process is one that may end here.
        unsafe {
            function(
                a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12],
                a[13], a[14], a[15], a[16], a[17],
            )
        }
    }
}
