//! What processes of one guest share, and how they name it to each other.
//!
//! A shared thing has a token, by which the backend finds it. It travels in the 64 bytes of a handle; or as a
//! descriptor of a socket in which it waits to be read, again and again. The other end of that socket stays here,
//! where it shows when the last copy of the descriptor is gone, in whatever process.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use wormhole_api::constants::ipc_memory_flags::LAZY_ENABLE_PEER_ACCESS;
use wormhole_api::handle::Memory;
use wormhole_api::{
    CloseAllocation, DevicePtr, Handle, OpenAllocation, ShareAddress, SharedAddress,
};

use crate::device::attribute;
use crate::error::{CuError, Result};
use crate::log;
use crate::memory::map::Origin;
use crate::memory::memory_map;
use crate::object::context::Scope;
use crate::session::OnDevice;

/// What stands before the token in a handle; behind it stands nothing.
const MAGIC: [u8; 8] = *b"wormhole";
const NAME_BYTES: usize = 24;

/// What the backend knows a shared thing by.
pub type Token = [u8; 16];

fn name(token: Token) -> [u8; NAME_BYTES] {
    let mut name = [0; NAME_BYTES];
    name[..8].copy_from_slice(&MAGIC);
    name[8..].copy_from_slice(&token);
    name
}

fn token(name: &[u8]) -> Option<Token> {
    let (magic, token) = name.split_at_checked(8)?;
    (magic == MAGIC).then(|| token.try_into().ok()).flatten()
}

/// A handle as programs pass it on.
pub fn to_handle(token: Token) -> [u8; 64] {
    let mut handle = [0; 64];
    handle[..NAME_BYTES].copy_from_slice(&name(token));
    handle
}

/// The token in a handle; `None` for what is no handle of this library's.
pub fn from_handle(handle: &[u8; 64]) -> Option<Token> {
    let (name, rest) = handle.split_at(NAME_BYTES);
    rest.iter().all(|byte| *byte == 0).then(|| token(name))?
}

/// A descriptor that names something, and the end that is kept while it does.
fn descriptor(token: Token) -> Result<(OwnedFd, OwnedFd)> {
    let mut ends = [-1; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: two descriptors fit; then they are nobody else's.
    let (kept, given) = unsafe {
        if libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) != 0 {
            log::error_once!("a descriptor for what is shared cannot be made");
            return Err(CuError::OPERATING_SYSTEM);
        }
        (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1]))
    };
    let name = name(token);
    // SAFETY: the bytes live during the call.
    let sent = unsafe {
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        libc::send(kept.as_raw_fd(), name.as_ptr().cast(), name.len(), flags)
    };
    if usize::try_from(sent) != Ok(name.len()) {
        return Err(CuError::OPERATING_SYSTEM);
    }
    Ok((kept, given))
}

/// The token that a descriptor names; natively any other descriptor is an unknown error.
pub fn from_descriptor(descriptor: RawFd) -> Result<Token> {
    let mut name = [0; NAME_BYTES + 1];
    // It stays there, for others to read.
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: that many bytes fit. The program's number may be any; other kinds of files are refused.
    let read = unsafe { libc::recv(descriptor, name.as_mut_ptr().cast(), name.len(), flags) };
    usize::try_from(read)
        .ok()
        .and_then(|read| token(name.get(..read)?))
        .ok_or(CuError::UNKNOWN)
}

/// The ends that are kept of descriptors that name memory.
static EXPORTED: Mutex<Vec<(Handle<Memory>, OwnedFd)>> = Mutex::new(Vec::new());

fn exported() -> MutexGuard<'static, Vec<(Handle<Memory>, OwnedFd)>> {
    EXPORTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A new descriptor of memory: the program's to close.
pub fn export_memory(memory: Handle<Memory>, token: Token) -> Result<RawFd> {
    let (kept, given) = descriptor(token)?;
    exported().push((memory, kept));
    Ok(given.into_raw_fd())
}

/// A new descriptor of something that lives as long as it does.
pub fn export(token: Token) -> Result<RawFd> {
    Ok(descriptor(token)?.1.into_raw_fd())
}

/// Whether a process has a descriptor of that memory.
pub fn is_exported(memory: Handle<Memory>) -> bool {
    let mut exported = exported();
    exported.retain(|(other, kept)| *other != memory || is_held(kept));
    exported.iter().any(|(other, _)| *other == memory)
}

/// Memory that may be named by descriptors.
pub fn exports() -> Vec<Handle<Memory>> {
    exported().iter().map(|(memory, _)| *memory).collect()
}

/// Whether the other end is still somebody's.
fn is_held(kept: &OwnedFd) -> bool {
    let mut entry = libc::pollfd {
        fd: kept.as_raw_fd(),
        events: 0,
        revents: 0,
    };
    // SAFETY: one entry, which lives during the call.
    let ready = unsafe { libc::poll(&raw mut entry, 1, 0) };
    ready == 0 || entry.revents & libc::POLLHUP == 0
}

/// Allocations of other processes that are open: by token, where each is and how often it was opened.
static OPENED: Mutex<Option<HashMap<Token, (u64, usize)>>> = Mutex::new(None);

fn opened() -> MutexGuard<'static, Option<HashMap<Token, (u64, usize)>>> {
    OPENED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether what a device has can be shared by handles: its attribute says so of events, and of memory as well.
pub fn has_handles(session: OnDevice) -> bool {
    session.device().value(attribute::IPC_EVENT_SUPPORTED) != 0
}

pub fn check_handles(session: OnDevice) -> Result {
    if has_handles(session) {
        Ok(())
    } else {
        Err(CuError::NOT_SUPPORTED)
    }
}

/// `cuIpcGetMemHandle`: the handle of the allocation that an address lies in.
pub fn share_allocation(scope: Scope, address: u64) -> Result<[u8; 64]> {
    let allocation = memory_map()
        .find(address)
        .filter(|allocation| allocation.origin == Origin::Device)
        .ok_or(CuError::INVALID_VALUE)?;
    check_handles(scope.session)?;
    let message = ShareAddress {
        address: DevicePtr(allocation.base),
        what: SharedAddress::Allocation,
    };
    let token = scope.session.request(&message, |reply| reply.token)?;
    Ok(to_handle(token))
}

/// `cuIpcOpenMemHandle`: as natively, an allocation that is open already is where it is.
pub fn open_allocation(scope: Scope, handle: &[u8; 64], flags: u32) -> Result<u64> {
    let token = from_handle(handle).ok_or(CuError::INVALID_VALUE)?;
    if flags != LAZY_ENABLE_PEER_ACCESS {
        return Err(CuError::INVALID_VALUE);
    }
    let mut opened = opened();
    let opened = opened.get_or_insert_default();
    if let Some((address, count)) = opened.get_mut(&token) {
        scope.session.alive()?;
        *count += 1;
        return Ok(*address);
    }
    let message = OpenAllocation { token };
    let (address, bytes) = scope
        .session
        .request(&message, |reply| (reply.address.0, reply.bytes))?;
    if !scope.session.keeps(address, bytes) {
        log::error_once!(
            "shared memory would lie at {address:#x}, where this program has something of its own"
        );
        close(scope, address)?;
        return Err(CuError::OUT_OF_MEMORY);
    }
    opened.insert(token, (address, 1));
    memory_map().insert(address, bytes, Origin::Opened, scope.context);
    Ok(address)
}

/// `cuIpcCloseMemHandle`: each opening is closed, and the last time the memory goes.
pub fn close_allocation(scope: Scope, address: u64) -> Result {
    scope.session.alive()?;
    let mut opened = opened();
    let opened = opened.get_or_insert_default();
    let found = opened.iter_mut().find(|(_, (at, _))| *at == address);
    let (token, count) = match found {
        Some((token, (_, count))) => (*token, count),
        None => return Err(CuError::INVALID_VALUE),
    };
    *count -= 1;
    if *count > 0 {
        return Ok(());
    }
    opened.remove(&token);
    memory_map().remove(address, |allocation| allocation.origin == Origin::Opened)?;
    close(scope, address)
}

/// An allocation that is out of the map: its context goes.
pub fn forget_allocation(address: u64) {
    if let Some(opened) = opened().as_mut() {
        opened.retain(|_, (at, _)| *at != address);
    }
}

pub fn close(scope: Scope, address: u64) -> Result {
    let address = DevicePtr(address);
    scope.session.request(&CloseAllocation { address }, |()| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: Token = [0x5A; 16];

    #[test]
    fn a_handle_names_its_token_and_no_other_bytes_do() {
        let handle = to_handle(TOKEN);
        assert_eq!(from_handle(&handle), Some(TOKEN));
        for (place, value) in [(0, b'W'), (24, 1), (63, 1)] {
            let mut forged = handle;
            forged[place] = value;
            assert_eq!(from_handle(&forged), None);
        }
    }

    #[test]
    fn a_descriptor_is_read_again_and_again_and_its_end_shows() {
        let (kept, given) = descriptor(TOKEN).unwrap();
        for _ in 0..3 {
            assert_eq!(from_descriptor(given.as_raw_fd()), Ok(TOKEN));
        }
        let copy = given.try_clone().unwrap();
        drop(given);
        assert!(is_held(&kept));
        drop(copy);
        assert!(!is_held(&kept));
        let (kept, given) = descriptor(TOKEN).unwrap();
        drop(kept);
        assert_eq!(from_descriptor(given.as_raw_fd()), Ok(TOKEN));
    }

    #[test]
    fn other_descriptors_name_nothing() {
        let null = std::fs::File::open("/dev/null").unwrap();
        let (pipe, _writer) = std::io::pipe().unwrap();
        let (stream, mut other) = std::os::unix::net::UnixStream::pair().unwrap();
        std::io::Write::write_all(&mut other, &[b'w'; 100]).unwrap();
        for file in [
            null.as_raw_fd(),
            pipe.as_raw_fd(),
            stream.as_raw_fd(),
            -1,
            9999,
        ] {
            assert_eq!(from_descriptor(file), Err(CuError::UNKNOWN));
        }
    }
}
