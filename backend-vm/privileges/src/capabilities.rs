//! Drops Linux capabilities.

use std::io;

/// CAP_DAC_READ_SEARCH: reading files and folders whatever their modes say.
pub const READ_ANY_FILE: u32 = 2;

/// Drops all capabilities of this thread and of those that it starts, irreversibly: programs that they execute have
/// none either.
///
/// # Errors
/// As prctl(2) and capset(2).
pub fn drop_capabilities() -> io::Result<()> {
    keep_capabilities(&[])
}

/// Drops all capabilities but these, and keeps them only if this thread has them. Programs that it executes have none.
///
/// # Errors
/// As prctl(2), capget(2) and capset(2).
pub fn keep_capabilities(kept: &[u32]) -> io::Result<()> {
    let check = |result: i64| match result {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    // _LINUX_CAPABILITY_VERSION_3, this thread; two sets of effective, permitted, inheritable.
    let header = [0x2008_0522_u32, 0];
    let mut sets = [0u32; 6];
    // SAFETY: system calls on integers and on complete local structures.
    unsafe {
        // Errors are ignored: without CAP_SETPCAP the call fails, and numbers beyond the last capability are invalid.
        for capability in 0..64 {
            libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0);
        }
        check(
            libc::prctl(
                libc::PR_CAP_AMBIENT,
                libc::PR_CAP_AMBIENT_CLEAR_ALL,
                0,
                0,
                0,
            )
            .into(),
        )?;
        if !kept.is_empty() {
            check(libc::syscall(
                libc::SYS_capget,
                header.as_ptr(),
                sets.as_mut_ptr(),
            ))?;
        }
        let mask = kept
            .iter()
            .fold(0, |bits, capability| bits | 1 << capability);
        let permitted = sets[1] & mask;
        let sets = [permitted, permitted, 0, 0, 0, 0];
        check(libc::syscall(
            libc::SYS_capset,
            header.as_ptr(),
            sets.as_ptr(),
        ))?;
        check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0).into())
    }
}
