//! Files that the guest shares with other processes and that the device reaches in place.
//!
//! The guest sends a file's descriptor straight to its worker, not through the supervisor, and
//! names the address for it in the band for files. The guest may truncate the file at any time: an
//! access beyond the end, be it by a kernel on the CPU device, then ends this worker and no other.
//!
//! A process of a guest VM names parts of the memory of the guest's file system. The guest alone knows
//! to which file a part belongs. All of that memory is the guest's, and its size is fixed.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use std::sync::mpsc::channel;

use vmm_sys_util::sock_ctrl_msg::ScmSocket;
use wormhole_api::{CuResult, FileMap, FileMemoryMap, FilePart, FileUnmap, Outcome, Serve};
use wormhole_device::Device;
use wormhole_ring::band;
use wormhole_ring::layout::FILES;

use super::{Answer, Call, Finish, Session};
use crate::ranges::{Found, Ranges};
use crate::registrar::{Registrar, Registrations, Task};

const PAGE: u64 = 4096;
/// Largest number of queued descriptors that one request searches for its address.
const WAITING: usize = 1024;

/// Way in which a session names files.
#[derive(Debug)]
pub enum FileSource {
    /// Socket that receives descriptors.
    Socket(OwnedFd),
    /// Memory of the file system of a guest VM.
    Memory(OwnedFd),
}

/// The files of a session.
#[derive(Debug, Default)]
pub(super) struct Files {
    /// Socket that receives descriptors; `None` for a guest that cannot send any.
    socket: Option<Arc<UnixDatagram>>,
    /// Memory of the guest's file system; `None` for a guest without it.
    memory: Option<Arc<File>>,
    /// Ranges that are mapped, or that a request is mapping.
    taken: Ranges,
    /// Ranges that the session may name.
    reached: Ranges,
}

impl Files {
    /// Sets the way in which the session names files.
    fn take_from(&mut self, source: FileSource) {
        match source {
            FileSource::Socket(socket) => self.socket = Some(Arc::new(socket.into())),
            FileSource::Memory(memory) => self.memory = Some(Arc::new(memory.into())),
        }
    }

    fn socket(&self) -> Option<Arc<UnixDatagram>> {
        self.socket.clone()
    }

    fn memory(&self) -> Option<Arc<File>> {
        self.memory.clone()
    }

    pub fn contains(&self, address: u64, bytes: u64) -> bool {
        self.reached.contains(address, bytes)
    }

    /// Takes a range for a mapping. Returns false if another mapping has a part of it.
    fn take(&mut self, address: u64, bytes: u64) -> bool {
        self.taken.insert(address, bytes)
    }

    /// Returns a taken range that nothing is mapped at.
    fn release(&mut self, address: u64) {
        self.taken.remove(address);
    }

    /// Lets the session name a mapped range.
    fn admit(&mut self, address: u64, bytes: u64) {
        self.reached.insert(address, bytes);
    }

    /// Lets the session no longer name the range that starts at an address, and returns its bytes.
    fn withdraw(&mut self, address: u64) -> Option<u64> {
        let (bytes, _) = self.reached.remove(address)?;
        Some(bytes)
    }

    /// Returns the file that holds an address.
    pub fn find(&self, address: u64) -> Option<Found> {
        self.reached.find(address)
    }
}

/// Receives the file that was sent for an address. The last one counts, because earlier ones may be
/// left from a request that failed.
fn receive(socket: &UnixDatagram, address: u64) -> Option<File> {
    let mut found = None;
    for _ in 0..WAITING {
        let mut named = [0; 8];
        match socket.recv_with_fd(&mut named) {
            Ok((8, file)) if u64::from_ne_bytes(named) == address => found = file,
            Ok((0, None)) | Err(_) => break,
            Ok(_) => {}
        }
    }
    found
}

/// Returns whether a file is shared memory (tmpfs) and long enough. A file of another file system
/// may be changed, or its reads held up, by processes outside the guest.
fn is_shared_memory(file: &File, end: u64) -> bool {
    let Ok(system) = rustix::fs::fstatfs(file) else {
        return false;
    };
    system.f_type == libc::TMPFS_MAGIC && size_of(file).next_multiple_of(PAGE) >= end
}

fn size_of(file: &File) -> u64 {
    let size = rustix::fs::fstat(file).map_or(0, |status| status.st_size);
    u64::try_from(size).unwrap_or(0)
}

fn map(
    socket: &UnixDatagram,
    registrations: &mut Registrations,
    message: &FileMap,
) -> Result<(), CuResult> {
    let (address, bytes) = (message.address.0, message.bytes);
    let file = receive(socket, address).ok_or(CuResult::INVALID_VALUE)?;
    let end = message.offset.checked_add(bytes);
    if !end.is_some_and(|end| is_shared_memory(&file, end)) {
        return Err(CuResult::NOT_SUPPORTED);
    }
    let part = FilePart {
        offset: message.offset,
        bytes,
    };
    map_parts(registrations, &file, address, &[part])
}

/// Maps parts of a file, one behind the other from an address on, and registers them as one range.
fn map_parts(
    registrations: &mut Registrations,
    file: &File,
    address: u64,
    parts: &[FilePart],
) -> Result<(), CuResult> {
    let mut end = address;
    let mapped = parts.iter().try_for_each(|part| {
        // SAFETY: the range lies in the band that this process reserved, and nothing is mapped
        // there: it was not in `taken`.
        unsafe { band::map(end, part.bytes, file, part.offset) }?;
        end += part.bytes;
        Ok(())
    });
    let registered = mapped.map_err(refused).and_then(|()| {
        // SAFETY: just mapped, and unmapped only after its registration has ended.
        unsafe { registrations.add(address, end - address) }
    });
    if registered.is_err() && end > address {
        // SAFETY: the device has not registered it, and no record can name it.
        unsafe { band::unmap(address, end - address) }.map_err(refused)?;
    }
    registered
}

/// Returns the bytes of all parts, if each lies in whole pages of a memory of this size.
fn bytes_of(parts: &[FilePart], size: u64) -> Option<u64> {
    parts.iter().try_fold(0_u64, |sum, part| {
        let whole = part.offset.is_multiple_of(PAGE) && part.bytes.is_multiple_of(PAGE);
        let end = part.offset.checked_add(part.bytes)?;
        (whole && part.bytes != 0 && end <= size).then_some(())?;
        sum.checked_add(part.bytes)
    })
}

fn unmap(registrations: &mut Registrations, address: u64, bytes: u64) -> Result<(), CuResult> {
    registrations.remove(address)?;
    // SAFETY: no record can name it, and the device has unregistered it.
    unsafe { band::unmap(address, bytes) }.map_err(refused)
}

fn refused(error: io::Error) -> CuResult {
    tracing::warn!("a file of the guest cannot be mapped: {error}");
    CuResult::OUT_OF_MEMORY
}

/// Runs a task on the registrar and waits for its result.
fn by_registrar(
    registrar: &Registrar,
    task: impl FnOnce(&mut Registrations) -> Result<(), CuResult> + Send + Sync + 'static,
) -> Result<(), CuResult> {
    let (sender, outcome) = channel();
    registrar.run(Task::new(move |registrations| {
        // The caller waits for the result below.
        let _ = sender.send(task(registrations));
    }));
    outcome.recv().unwrap_or(Err(CuResult::UNKNOWN))
}

impl Session {
    /// Sets the way in which the guest names files.
    pub fn take_files_from(&mut self, source: FileSource) {
        self.addresses.files.take_from(source);
    }

    /// Maps a file at a range that must lie in the band, by a task of the registrar, and lets the session name it.
    fn map_file(
        &mut self,
        call: &Call,
        (address, bytes): (u64, u64),
        task: impl FnOnce(&mut Registrations) -> Result<(), CuResult> + Send + Sync + 'static,
    ) -> Outcome<()> {
        let (base, size) = FILES;
        let in_band = address >= base && bytes <= size && address - base <= size - bytes;
        let whole = address.is_multiple_of(PAGE) && bytes.is_multiple_of(PAGE);
        if !in_band || !whole || !self.addresses.files.take(address, bytes) {
            return Err(self.addresses.refused());
        }
        let registrar = self.registrar.clone();
        let deferred = self.defer(call, self.here(call), move |_: &dyn Device| {
            let mapped = by_registrar(&registrar, task);
            Box::new(move |session: &mut Self| match mapped {
                Ok(()) => {
                    session.addresses.files.admit(address, bytes);
                    Answer::done()
                }
                Err(error) => {
                    session.addresses.files.release(address);
                    Answer::failed(session.failed(error))
                }
            }) as Finish
        });
        if deferred.is_err() {
            self.addresses.files.release(address);
        }
        deferred
    }
}

impl Serve<FileMap> for Session {
    fn serve(&mut self, call: &Call, message: &FileMap) -> Outcome<()> {
        let message = *message;
        let Some(socket) = self.addresses.files.socket() else {
            return Err(CuResult::NOT_SUPPORTED);
        };
        if !message.offset.is_multiple_of(PAGE) {
            return Err(self.addresses.refused());
        }
        let range = (message.address.0, message.bytes);
        self.map_file(call, range, move |registrations| {
            map(&socket, registrations, &message)
        })
    }
}

impl Serve<FileMemoryMap<'_>> for Session {
    fn serve(&mut self, call: &Call, message: &FileMemoryMap<'_>) -> Outcome<()> {
        let Some(memory) = self.addresses.files.memory() else {
            return Err(CuResult::NOT_SUPPORTED);
        };
        let parts: Vec<FilePart> = message.parts.iter().collect();
        let size = size_of(&memory);
        let Some(bytes) = bytes_of(&parts, size) else {
            return Err(self.addresses.refused());
        };
        // The driver keeps notes for each page of each registration.
        let taken = self.addresses.files.taken.bytes_of(0);
        if taken.saturating_add(bytes) > size {
            return Err(CuResult::OUT_OF_MEMORY);
        }
        let address = message.address.0;
        self.map_file(call, (address, bytes), move |registrations| {
            map_parts(registrations, &memory, address, &parts)
        })
    }
}

/// Removes the range from the addresses that may be named. It stays mapped while a job gives the
/// device addresses of a description, and until the session ends if it cannot be unregistered.
impl Serve<FileUnmap> for Session {
    fn serve(&mut self, call: &Call, message: &FileUnmap) -> Outcome<()> {
        let address = message.address.0;
        let Some(bytes) = self.addresses.files.withdraw(address) else {
            return Err(self.addresses.refused());
        };
        self.change(
            call,
            move |registrations| unmap(registrations, address, bytes),
            move |session, unmapped| unmapped.map(|()| session.addresses.files.release(address)),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(offset: u64, bytes: u64) -> FilePart {
        FilePart { offset, bytes }
    }

    #[test]
    fn parts_are_whole_pages_inside_the_memory() {
        const SIZE: u64 = 8 * PAGE;
        let sum = |parts: &[FilePart]| bytes_of(parts, SIZE);
        assert_eq!(sum(&[part(PAGE, 7 * PAGE), part(0, PAGE)]), Some(SIZE));
        assert_eq!(sum(&[]), Some(0));
        for wrong in [
            part(PAGE, SIZE),
            part(SIZE, PAGE),
            part(0, 0),
            part(1, PAGE),
            part(0, PAGE + 1),
            part(u64::MAX - PAGE + 1, PAGE),
            part(PAGE, u64::MAX - PAGE + 1),
        ] {
            assert_eq!(sum(&[part(0, PAGE), wrong]), None, "{wrong:?}");
        }
        assert_eq!(
            bytes_of(&[part(0, 1 << 63), part(0, 1 << 63)], 1 << 63),
            None
        );
    }
}
