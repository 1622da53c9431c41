//! Guest memory in a file: the ranges of RAM one after the other, the memory for files, and the identity of the snapshot. Pages
//! of zeros are holes.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use vm_memory::{Bytes, GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress};

use super::{Identity, SnapshotError};
use crate::memory::FileMemory;
use crate::ram::GuestRam;

const PAGE: usize = 4096;
/// Bytes that are copied at a time.
const CHUNK: usize = 1 << 20;

/// A page of zeros.
static ZEROS: [u8; PAGE] = [0; PAGE];

/// Memory of a VM that a snapshot has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Memory<'a> {
    pub ram: &'a GuestRam,
    pub files: Option<&'a FileMemory>,
}

impl Memory<'_> {
    /// Returns the bytes of RAM.
    fn ram_bytes(self) -> u64 {
        self.ram.iter().map(GuestMemoryRegion::len).sum()
    }

    /// Returns the bytes of all memory.
    fn bytes(self) -> u64 {
        self.ram_bytes() + self.files.map_or(0, FileMemory::len)
    }
}

/// Calls `copy` for each part of RAM, with the part's offset in the file.
fn for_each_chunk(
    ram: &GuestRam,
    mut copy: impl FnMut(&crate::ram::RamRegion, u64, u64, &mut [u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    let mut before = 0;
    for region in ram.iter() {
        for start in (0..region.len()).step_by(CHUNK) {
            let left = region.len() - start;
            let len = usize::try_from(left).map_or(CHUNK, |left| left.min(CHUNK));
            copy(region, start, before + start, &mut buffer[..len])?;
        }
        before += region.len();
    }
    Ok(())
}

/// Length of a file's end, which is the identity.
const IDENTITY: u64 = size_of::<Identity>() as u64;

/// Writes the identity of a snapshot behind memory, which has `end` bytes.
pub(super) fn identify(file: &File, end: u64, identity: &Identity) -> io::Result<()> {
    file.write_all_at(identity, end)
}

/// Writes memory to an empty file. No vCPU and no device may run, and no worker may have memory for files.
pub(super) fn save(
    memory: Memory<'_>,
    file: &File,
    identity: &Identity,
) -> Result<(), SnapshotError> {
    let saved = for_each_chunk(memory.ram, |region, start, offset, bytes| {
        region
            .read_slice(bytes, MemoryRegionAddress(start))
            .map_err(io::Error::other)?;
        write(file, bytes, offset)
    });
    let saved = saved.and_then(|()| match memory.files {
        Some(files) => copy_data((files.file(), 0..files.len()), (file, memory.ram_bytes())),
        None => Ok(()),
    });
    let saved = saved.and_then(|()| identify(file, memory.bytes(), identity));
    saved.map_err(SnapshotError::Write)
}

/// Writes bytes to a file at an offset, but for pages of zeros.
fn write(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    let mut at = offset;
    for run in runs(bytes) {
        if run.iter().any(|byte| *byte != 0) {
            file.write_all_at(run, at)?;
        }
        at += run.len() as u64;
    }
    Ok(())
}

/// Copies the data of a range of a file to another file, so that the range begins at `start` there.
fn copy_data((from, range): (&File, Range<u64>), (to, start): (&File, u64)) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    let mut at = range.start;
    while at < range.end {
        let data = next_data(from, at, range.end)?;
        // A file system that lies about its holes.
        if data.start < at || data.is_empty() && data.start < range.end {
            return Err(io::ErrorKind::InvalidData.into());
        }
        at = data.start;
        while at < data.end.min(range.end) {
            let left = data.end.min(range.end) - at;
            let len = usize::try_from(left).map_or(CHUNK, |left| left.min(CHUNK));
            from.read_exact_at(&mut buffer[..len], at)?;
            write(to, &buffer[..len], start + (at - range.start))?;
            at += len as u64;
        }
    }
    Ok(())
}

/// Divides bytes into runs of pages that are all zero, or all not.
fn runs(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let first = is_zero(rest.chunks(PAGE).next()?);
        let count = rest
            .chunks(PAGE)
            .take_while(|page| is_zero(page) == first)
            .count();
        let (run, others) = rest.split_at((count * PAGE).min(rest.len()));
        rest = others;
        Some(run)
    })
}

fn is_zero(page: &[u8]) -> bool {
    ZEROS.get(..page.len()) == Some(page)
}

/// Reads memory, whose pages are all zero, with that for files, from the file of the snapshot with this identity.
pub(super) fn restore(
    memory: Memory<'_>,
    file: &File,
    identity: &Identity,
) -> Result<(), SnapshotError> {
    let end = memory.bytes();
    let (expected, length) = (
        end + IDENTITY,
        file.metadata().map_err(SnapshotError::Read)?.len(),
    );
    if length != expected {
        return Err(SnapshotError::MemoryLength { length, expected });
    }
    let mut found = Identity::default();
    let read = file.read_exact_at(&mut found, end);
    read.map_err(SnapshotError::Read)?;
    if found != *identity {
        return Err(SnapshotError::OtherMemory);
    }
    let mut data = 0..0;
    let restored = for_each_chunk(memory.ram, |region, start, offset, bytes| {
        let after = offset + bytes.len() as u64;
        if data.end <= offset {
            data = next_data(file, offset, expected)?;
        }
        if data.start >= after {
            return Ok(());
        }
        file.read_exact_at(bytes, offset)?;
        for (page, at) in bytes.chunks(PAGE).zip((start..).step_by(PAGE)) {
            if !is_zero(page) {
                region
                    .write_slice(page, MemoryRegionAddress(at))
                    .map_err(io::Error::other)?;
            }
        }
        Ok(())
    });
    let restored = restored.and_then(|()| match memory.files {
        Some(files) => copy_data((file, memory.ram_bytes()..end), (files.file(), 0)),
        None => Ok(()),
    });
    restored.map_err(SnapshotError::Read)
}

/// Returns the next range of a file from `offset` on that is no hole.
fn next_data(file: &File, offset: u64, end: u64) -> io::Result<Range<u64>> {
    match seek(file, SeekFrom::Data(offset)) {
        Ok(start) => Ok(start..seek(file, SeekFrom::Hole(start))?),
        Err(Errno::NXIO) => Ok(end..end),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use proptest::prelude::*;
    use vm_memory::GuestAddress;

    use super::*;
    use crate::memory::{Range as GuestRange, map_ram, sealed_file};
    use crate::ram::is_resident;

    const IDENTITY_OF_TEST: Identity = [7; 16];

    /// Two ranges, neither of them whole chunks.
    fn ram() -> GuestRam {
        let range = |start, len| GuestRange { start, len };
        map_ram(&[range(0, 3 << 20 | 0x5000), range(1 << 32, 0x3000)]).expect("memory")
    }

    fn files() -> FileMemory {
        let file = sealed_file("files", 4 << 20).expect("a file");
        FileMemory::new(file).expect("memory")
    }

    fn of(ram: &GuestRam) -> Memory<'_> {
        Memory { ram, files: None }
    }

    #[test]
    fn memory_for_files_comes_back_and_what_is_not_written_takes_no_room() {
        let (own, saved) = (ram(), files());
        own.write_obj(7_u8, GuestAddress(1 << 32 | 0x2fff))
            .expect("in RAM");
        // At the ends of chunks and of the memory, and zeros.
        for (text, at) in [
            (&b"first"[..], 0),
            (b"between", (1 << 20) - 3),
            (&[0; 9000], 2 << 20),
            (b"last", (4 << 20) - 4),
        ] {
            saved.file().write_all_at(text, at).expect("room");
        }
        let memory = Memory {
            ram: &own,
            files: Some(&saved),
        };
        let file = tempfile::tempfile().expect("a file");
        save(memory, &file, &IDENTITY_OF_TEST).expect("room");
        let data = file.metadata().expect("a file");
        assert_eq!(data.len(), (3 << 20) + 0x8000 + (4 << 20) + IDENTITY);
        assert!(data.blocks() * 512 <= 6 * 4096, "{}", data.blocks());
        let (own, restored) = (ram(), files());
        let memory = Memory {
            ram: &own,
            files: Some(&restored),
        };
        restore(memory, &file, &IDENTITY_OF_TEST).expect("it is there");
        let byte: u8 = own
            .read_obj(GuestAddress(1 << 32 | 0x2fff))
            .expect("in RAM");
        assert_eq!(byte, 7);
        let contents = |memory: &FileMemory| {
            let mut bytes = vec![0; 4 << 20];
            memory.file().read_exact_at(&mut bytes, 0).expect("memory");
            bytes
        };
        assert!(contents(&restored) == contents(&saved));
        let held = restored.file().metadata().expect("a file").blocks() * 512;
        assert_eq!(held, 4 * 4096);
        let refused = restore(of(&ram()), &file, &IDENTITY_OF_TEST);
        let refused = refused.expect_err("a guest without memory for files");
        assert!(
            matches!(refused, SnapshotError::MemoryLength { .. }),
            "{refused}"
        );
    }

    #[test]
    fn memory_comes_back_and_zeros_take_no_room() {
        let saved = ram();
        let written = [0, 0x1fff, (1 << 20) - 1, (3 << 20) + 1, (1 << 32) + 0x1000];
        for (value, at) in (1u8..).zip(written) {
            saved.write_obj(value, GuestAddress(at)).expect("in RAM");
        }
        let file = tempfile::tempfile().expect("a file");
        save(of(&saved), &file, &IDENTITY_OF_TEST).expect("room");
        let data = file.metadata().expect("a file");
        assert_eq!(data.len(), (3 << 20) + 0x8000 + IDENTITY);
        assert!(data.blocks() * 512 <= 7 * 4096, "{}", data.blocks());
        let restored = ram();
        restore(of(&restored), &file, &IDENTITY_OF_TEST).expect("it is there");
        for (value, at) in (1u8..).zip(written) {
            let byte: u8 = restored.read_obj(GuestAddress(at)).expect("in RAM");
            assert_eq!(byte, value);
        }
        assert!(!is_resident(&restored, GuestAddress(2 << 20)));
    }

    #[test]
    fn the_memory_of_another_snapshot_is_refused() {
        let file = tempfile::tempfile().expect("a file");
        save(of(&ram()), &file, &[8; 16]).expect("room");
        let refused = restore(of(&ram()), &file, &IDENTITY_OF_TEST).expect_err("another one");
        assert!(matches!(refused, SnapshotError::OtherMemory), "{refused}");
    }

    #[test]
    fn a_file_of_another_size_is_refused() {
        let file = tempfile::tempfile().expect("a file");
        save(of(&ram()), &file, &IDENTITY_OF_TEST).expect("room");
        for length in [0, (3 << 20) + 0x8000, (3 << 20) + 0x8011] {
            file.set_len(length).expect("room");
            let refused = restore(of(&ram()), &file, &IDENTITY_OF_TEST).expect_err("another size");
            assert!(
                refused.to_string().contains(&length.to_string()),
                "{refused}"
            );
        }
    }

    proptest! {
        #[test]
        fn runs_are_all_of_the_bytes_in_their_order(pages in proptest::collection::vec(any::<bool>(), 0..20)) {
            let bytes: Vec<u8> = pages.iter().flat_map(|page| [u8::from(*page); PAGE]).collect();
            let found: Vec<&[u8]> = runs(&bytes).collect();
            prop_assert_eq!(found.concat(), &bytes[..]);
            prop_assert!(found.iter().all(|run| !run.is_empty()));
        }
    }
}
