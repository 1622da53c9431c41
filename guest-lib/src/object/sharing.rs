//! Sharing of memory, events and pools between the processes of one guest.
//!
//! The backend finds a shared object by its token. The token travels in the 64 bytes of an IPC handle, or as a
//! message in a socket whose descriptor the program passes on; receivers read it with `MSG_PEEK`, so it stays
//! readable. This process keeps the other end of the socket, where `POLLHUP` shows that the last copy of the
//! descriptor was closed, in any process.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};

use wormhole_api::constants::ipc_memory_flags::LAZY_ENABLE_PEER_ACCESS;
use wormhole_api::handle::Memory;
use wormhole_api::{
    CloseAllocation, DevicePtr, Handle, OpenAllocation, ShareAddress, SharedAddress,
};
use wormhole_lock::{Mutex, MutexGuard};

use crate::device::attribute;
use crate::error::{CuError, Result};
use crate::log;
use crate::memory::map::Origin;
use crate::memory::memory_map;
use crate::object::context::Scope;
use crate::session::OnDevice;

/// First bytes of an IPC handle, before the token. All bytes after the token are zero.
const MAGIC: [u8; 8] = *b"wormhole";
const NAME_BYTES: usize = 24;

/// Backend's identifier of a shared object.
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

/// Encodes a token as an IPC handle.
pub fn to_handle(token: Token) -> [u8; 64] {
    let mut handle = [0; 64];
    handle[..NAME_BYTES].copy_from_slice(&name(token));
    handle
}

/// Decodes the token of an IPC handle. Returns `None` for a handle that this library did not make.
pub fn from_handle(handle: &[u8; 64]) -> Option<Token> {
    let (name, rest) = handle.split_at(NAME_BYTES);
    rest.iter().all(|byte| *byte == 0).then(|| token(name))?
}

/// Creates a socket pair with the token as a message. Returns the end to keep and the end for the program.
fn descriptor(token: Token) -> Result<(OwnedFd, OwnedFd)> {
    let mut ends = [-1; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: the array has room for two descriptors, which have no other owner.
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

/// Reads the token of a descriptor. Fails with `UNKNOWN` for any other descriptor, as the native driver does.
pub fn from_descriptor(descriptor: RawFd) -> Result<Token> {
    let mut name = [0; NAME_BYTES + 1];
    // The message stays in the socket for other readers.
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: that many bytes fit. The program's number may be any; other kinds of files are refused.
    let read = unsafe { libc::recv(descriptor, name.as_mut_ptr().cast(), name.len(), flags) };
    usize::try_from(read)
        .ok()
        .and_then(|read| token(name.get(..read)?))
        .ok_or(CuError::UNKNOWN)
}

/// This process's socket end for each descriptor of exported memory.
static EXPORTED: Mutex<Vec<(Handle<Memory>, OwnedFd)>> = Mutex::new(Vec::new());

fn exported() -> MutexGuard<'static, Vec<(Handle<Memory>, OwnedFd)>> {
    EXPORTED.lock()
}

/// Creates a descriptor of memory. The program closes it.
pub fn export_memory(memory: Handle<Memory>, token: Token) -> Result<RawFd> {
    let (kept, given) = descriptor(token)?;
    exported().push((memory, kept));
    Ok(given.into_raw_fd())
}

/// Creates a descriptor whose kept end is closed at once, for objects whose export is not tracked.
pub fn export(token: Token) -> Result<RawFd> {
    Ok(descriptor(token)?.1.into_raw_fd())
}

/// Returns whether any process has a descriptor of the memory.
pub fn is_exported(memory: Handle<Memory>) -> bool {
    let mut exported = exported();
    exported.retain(|(other, kept)| *other != memory || is_held(kept));
    exported.iter().any(|(other, _)| *other == memory)
}

/// Returns the memory that may have open descriptors.
pub fn exports() -> Vec<Handle<Memory>> {
    exported().iter().map(|(memory, _)| *memory).collect()
}

/// Returns whether any process still has the other end open.
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

/// Open allocations of other processes by token: address and number of openings.
static OPENED: Mutex<Option<HashMap<Token, (u64, usize)>>> = Mutex::new(None);

fn opened() -> MutexGuard<'static, Option<HashMap<Token, (u64, usize)>>> {
    OPENED.lock()
}

/// Returns whether the device supports IPC handles. The attribute is defined for events; it applies to memory as
/// well.
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

/// Returns the IPC handle of the allocation that contains an address (`cuIpcGetMemHandle`).
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

/// Opens an allocation (`cuIpcOpenMemHandle`). An allocation that is already open keeps its address, as in the native
/// driver.
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
    if !scope.session.is_reserved(address, bytes) {
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

/// Closes one opening of an allocation (`cuIpcCloseMemHandle`). The last close unmaps the memory.
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

/// Drops an opened allocation after the end of its context has removed it from the memory map.
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
