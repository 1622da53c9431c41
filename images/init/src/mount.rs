//! Mounts file systems.

use std::ffi::CString;
use std::io;

/// Calls mount(2).
///
/// # Errors
/// The kernel refuses the mount, or a text has a NUL.
pub fn mount_one(
    kind: &str,
    source: &str,
    path: &str,
    flags: libc::c_ulong,
    options: &str,
) -> io::Result<()> {
    let source = CString::new(source)?;
    let kind = CString::new(kind)?;
    let path = CString::new(path)?;
    let options = CString::new(options)?;
    // SAFETY: all pointers are to strings that end in NUL and outlive the call.
    let result = unsafe {
        libc::mount(
            source.as_ptr(),
            path.as_ptr(),
            kind.as_ptr(),
            flags,
            options.as_ptr().cast(),
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
