//! Sharing of memory, events and pools between the processes of one guest.
//!
//! The backend finds a shared object by its token. The token travels in the 64 bytes of an IPC handle, with the place of
//! an allocation in the memory that the driver shares, which contains other allocations too. Or it travels as a
//! message in a socket whose descriptor the program passes on; receivers read it with `MSG_PEEK`, so it stays
//! readable. This process keeps the other end of the socket, where `POLLHUP` shows that the last copy of the
//! descriptor was closed, in any process.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
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
use crate::memory::{memory_map, offset_in_slab, set_shared};
use crate::object::context::Scope;
use crate::session::OnDevice;

/// First bytes of an IPC handle, before the token and the place. All bytes after the place are zero.
const MAGIC: [u8; 8] = *b"wormhole";
const NAME_BYTES: usize = 24;
const PLACE_BYTES: usize = 16;

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

/// Place of an allocation in shared memory: offset and bytes. 0 bytes for all of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Place {
    offset: u64,
    bytes: u64,
}

impl Place {
    /// Returns the place in memory of this size, with its bytes. Fails if it does not lie there.
    fn within(self, bytes: u64) -> Result<Self> {
        if self == Self::default() {
            return Ok(Self { offset: 0, bytes });
        }
        let end = self.offset.checked_add(self.bytes);
        let inside = self.bytes != 0 && end.is_some_and(|end| end <= bytes);
        inside.then_some(self).ok_or(CuError::INVALID_VALUE)
    }
}

/// Encodes a token as an IPC handle.
pub fn to_handle(token: Token) -> [u8; 64] {
    to_memory_handle(token, Place::default())
}

fn to_memory_handle(token: Token, place: Place) -> [u8; 64] {
    let mut handle = [0; 64];
    handle[..NAME_BYTES].copy_from_slice(&name(token));
    handle[24..32].copy_from_slice(&place.offset.to_ne_bytes());
    handle[32..40].copy_from_slice(&place.bytes.to_ne_bytes());
    handle
}

/// Decodes the token of an IPC handle of an event. Returns `None` for a handle that this library did not make.
pub fn from_handle(handle: &[u8; 64]) -> Option<Token> {
    let (token, place) = from_memory_handle(handle)?;
    (place == Place::default()).then_some(token)
}

fn from_memory_handle(handle: &[u8; 64]) -> Option<(Token, Place)> {
    let (name, rest) = handle.split_at(NAME_BYTES);
    let (place, rest) = rest.split_at(PLACE_BYTES);
    let ([offset, bytes], []) = place.as_chunks::<8>() else {
        return None;
    };
    let place = Place {
        offset: u64::from_ne_bytes(*offset),
        bytes: u64::from_ne_bytes(*bytes),
    };
    let token = token(name)?;
    rest.iter().all(|byte| *byte == 0).then_some((token, place))
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

/// Memory of another process that is open here.
#[derive(Debug)]
struct Opened {
    address: u64,
    bytes: u64,
    /// Number of openings of each allocation in it.
    places: HashMap<Place, usize>,
}

impl Opened {
    /// Returns the place of the open allocation that starts at an address.
    fn find(&self, address: u64) -> Option<Place> {
        let offset = address.checked_sub(self.address)?;
        let mut places = self.places.keys();
        places.find(|place| place.offset == offset).copied()
    }
}

/// Open memory of other processes, by token.
static OPENED: Mutex<BTreeMap<Token, Opened>> = Mutex::new(BTreeMap::new());

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
    let place = match offset_in_slab(&allocation) {
        Some(offset) => Place {
            offset,
            bytes: allocation.bytes,
        },
        None => Place::default(),
    };
    let token = scope.session.request(&message, |reply| reply.token)?;
    set_shared(allocation);
    Ok(to_memory_handle(token, place))
}

/// Opens an allocation (`cuIpcOpenMemHandle`). An allocation that is already open keeps its address, as in the native
/// driver.
pub fn open_allocation(scope: Scope, handle: &[u8; 64], flags: u32) -> Result<u64> {
    let (token, place) = from_memory_handle(handle).ok_or(CuError::INVALID_VALUE)?;
    if flags != LAZY_ENABLE_PEER_ACCESS {
        return Err(CuError::INVALID_VALUE);
    }
    let mut all = OPENED.lock();
    let opened = match all.entry(token) {
        Entry::Occupied(known) => {
            scope.session.alive()?;
            known.into_mut()
        }
        Entry::Vacant(new) => new.insert(open_memory(scope, token)?),
    };
    let found = open_place(scope, opened, place);
    if opened.places.is_empty() {
        let address = opened.address;
        all.remove(&token);
        close(scope, address)?;
    }
    found
}

/// Opens an allocation in open memory, and returns its address.
fn open_place(scope: Scope, opened: &mut Opened, place: Place) -> Result<u64> {
    let place = place.within(opened.bytes)?;
    let address = opened.address + place.offset;
    if let Some(count) = opened.places.get_mut(&place) {
        *count += 1;
        return Ok(address);
    }
    if memory_map().overlaps(address, place.bytes) {
        return Err(CuError::INVALID_VALUE);
    }
    opened.places.insert(place, 1);
    memory_map().insert(address, place.bytes, Origin::Opened, scope.context);
    Ok(address)
}

fn open_memory(scope: Scope, token: Token) -> Result<Opened> {
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
    Ok(Opened {
        address,
        bytes,
        places: HashMap::new(),
    })
}

/// Closes one opening of an allocation (`cuIpcCloseMemHandle`). The last close unmaps the memory.
pub fn close_allocation(scope: Scope, address: u64) -> Result {
    scope.session.alive()?;
    let mut all = OPENED.lock();
    let mut found = all.values_mut();
    let found = found.find_map(|opened| opened.places.get_mut(&opened.find(address)?));
    let count = found.ok_or(CuError::INVALID_VALUE)?;
    *count -= 1;
    if *count > 0 {
        return Ok(());
    }
    memory_map().remove(address, |allocation| allocation.origin == Origin::Opened)?;
    close_last(scope, &mut all, address)
}

/// Drops an opened allocation after the end of its context has removed it from the memory map.
pub fn close_forgotten(scope: Scope, address: u64) -> Result {
    close_last(scope, &mut OPENED.lock(), address)
}

/// Forgets all opened memory, after the worker has closed it.
pub fn forget_opened() {
    OPENED.lock().clear();
}

/// Removes an allocation that is not open any more, and closes the memory if it was the last one there.
fn close_last(scope: Scope, all: &mut BTreeMap<Token, Opened>, address: u64) -> Result {
    let mut found = all.iter_mut();
    let found = found.find_map(|(token, opened)| Some((*token, opened.find(address)?, opened)));
    let Some((token, place, opened)) = found else {
        return Ok(());
    };
    opened.places.remove(&place);
    let whole = opened.address;
    if !opened.places.is_empty() {
        return Ok(());
    }
    all.remove(&token);
    close(scope, whole)
}

fn close(scope: Scope, address: u64) -> Result {
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
        for (place, value) in [(0, b'W'), (24, 1), (39, 1), (40, 1), (63, 1)] {
            let mut forged = handle;
            forged[place] = value;
            assert_eq!(from_handle(&forged), None);
        }
    }

    #[test]
    fn a_handle_of_memory_names_a_place_in_it() {
        let place = Place {
            offset: 512,
            bytes: 100,
        };
        let handle = to_memory_handle(TOKEN, place);
        assert_eq!(from_memory_handle(&handle), Some((TOKEN, place)));
        assert_eq!(from_handle(&handle), None, "no event has a place");
        assert_eq!(place.within(612), Ok(place));
        let whole = Place::default().within(612);
        assert_eq!(whole.map(|whole| whole.bytes), Ok(612));
        for (offset, bytes) in [(513, 100), (512, 101), (512, 0), (1, u64::MAX)] {
            let forged = Place { offset, bytes };
            assert_eq!(forged.within(612), Err(CuError::INVALID_VALUE));
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
