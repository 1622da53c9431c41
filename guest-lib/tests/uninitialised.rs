//! Forwarded functions fail before `cuInit`, here with all arguments zero.

use std::ffi::{CString, c_void};
use std::path::PathBuf;

/// Functions that succeed, as natively, because they need no driver or do nothing.
const WORK: [&str; 0] = [];

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
) -> u32;

/// Opens the shared library beside this test.
fn library() -> *mut c_void {
    let mut folder: PathBuf = std::env::current_exe().expect("the test has a path");
    folder.pop();
    if !folder.join("libcuda.so").exists() {
        folder.pop();
    }
    let path = folder.join("libcuda.so");
    let path = CString::new(path.into_os_string().into_encoded_bytes()).expect("a path");
    // SAFETY: the library's constructors have no requirements.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
    assert!(!library.is_null(), "{path:?}");
    library
}

#[test]
fn before_it_is_initialised_every_function_refuses_nothing_but_zeros() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../shared-ring/api");
    let table = wormhole_idl::load(folder.as_ref()).expect("the table");
    let library = library();
    let mut working = Vec::new();
    for function in &table.functions {
        if table.forwarded(function).is_none() || function.name == "cuInit" {
            continue;
        }
        let name = CString::new(function.name.as_str()).expect("a name");
        // SAFETY: the library is open.
        let found = unsafe { libc::dlsym(library, name.as_ptr()) };
        assert!(!found.is_null(), "{name:?}");
        // SAFETY: the function accepts integers and pointers, no more than these, and checks for null pointers.
        let code = unsafe {
            let call = std::mem::transmute::<*mut c_void, Function>(found);
            call(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        };
        if code == 0 {
            working.push(function.name.as_str());
        }
    }
    assert_eq!(working, WORK);
}
