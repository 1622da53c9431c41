//! Confinement that the worker adds to what it was started with, before it reads a byte of a guest's.

use std::ffi::{c_int, c_void};

use wormhole_link::device::DeviceKind;
use wormhole_privileges::{Filter, FilterError};

use crate::open;

/// Seals the program and its libraries, and denies all threads of this process to execute another program, to add further
/// filters, and what the device does not need any more. The kernel kills a worker whose supervisor dies because its first
/// thread has asked for that (`PR_SET_PDEATHSIG`). A thread that executes a program takes the place of the first one, and has
/// not asked.
///
/// # Errors
/// The kernel refuses the filter.
pub fn confine(kind: DeviceKind) -> Result<(), FilterError> {
    seal_objects();
    let own = [libc::SYS_execve, libc::SYS_seccomp, libc::SYS_mseal];
    let calls = [&own[..], open::give_up(kind)].concat();
    Filter::against(&calls)?.install_on_all_threads()
}

/// Seals the mappings of the program and of its libraries (Linux 6.10). To split or to move a mapping of a file takes a lock of
/// the file, for which every process waits that maps the file or ends, and all processes map the C library.
fn seal_objects() {
    let mut segments: Vec<(usize, usize)> = Vec::new();
    // SAFETY: `add_segments` casts the pointer back to this vector, and nothing calls it after this call.
    unsafe { libc::dl_iterate_phdr(Some(add_segments), (&raw mut segments).cast()) };
    for (start, len) in segments {
        // SAFETY: the call changes no memory. Nothing changes the mappings of these objects, since nothing unloads them.
        let sealed = unsafe { libc::syscall(libc::SYS_mseal, start, len, 0) };
        let error = std::io::Error::last_os_error();
        if sealed != 0 && error.raw_os_error() != Some(libc::ENOSYS) {
            tracing::warn!("a part of the worker's program is not sealed: {error}");
        }
    }
}

/// Adds the mapped pages of an object to a `Vec<(usize, usize)>`.
unsafe extern "C" fn add_segments(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    segments: *mut c_void,
) -> c_int {
    // SAFETY: `dl_iterate_phdr` gives an object with its program headers, and the caller's pointer.
    let (info, headers, segments) = unsafe {
        let info = &*info;
        let headers = std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into());
        (info, headers, &mut *segments.cast::<Vec<(usize, usize)>>())
    };
    let page = rustix::param::page_size();
    for header in headers
        .iter()
        .filter(|header| header.p_type == libc::PT_LOAD)
    {
        let (start, bytes) = (info.dlpi_addr + header.p_vaddr, header.p_memsz);
        let [start, end] = [start, start + bytes].map(|at| usize::try_from(at).unwrap_or(0));
        let (start, end) = (start / page * page, end.next_multiple_of(page));
        segments.push((start, end - start));
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_of_the_program_are_not_split() {
        let page = rustix::param::page_size();
        let own = (confine as fn(_) -> _) as usize / page * page;
        let all = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
        seal_objects();
        // SAFETY: the call makes at most a page of this program's code writable, and nothing writes to it.
        let changed = unsafe { libc::mprotect(std::ptr::without_provenance_mut(own), page, all) };
        let release = rustix::system::uname();
        let mut numbers = release.release().to_str().unwrap_or("").split('.');
        let mut next = || numbers.next()?.parse::<u32>().ok();
        if (next(), next()) < (Some(6), Some(10)) {
            println!("skipped: this kernel seals no mappings");
            return;
        }
        assert_eq!(changed, -1);
        let error = std::io::Error::last_os_error();
        assert_eq!(error.raw_os_error(), Some(libc::EPERM));
    }
}
