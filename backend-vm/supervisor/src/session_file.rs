//! Files with the memory of sessions.
//!
//! Each session has an anonymous file of its own, as large as the window, in which a segment has
//! the same offset as in the window. The session's worker has no other session's file, so a
//! compromised worker reaches no other session. A guest on this system maps the same file; the
//! launcher of a guest VM maps the granted runs of it for the guest.
//!
//! The event loop writes to a file before any other process has it, and maps none: a process with
//! the file can punch holes into it, and a page fault waits until that is done. A `pread` does not
//! (`shmem_file_read_iter` in mm/shmem.c of Linux); it takes the page's lock, which no call on a worker's list holds for
//! long. A [scrubber](super::scrubber) writes the status
//! word.
//!
//! The sessions of a [static window](super::static_window) share its file instead, in which their
//! segments have the same offsets. It may be a [device](super::window_memory).

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use wormhole_device::file;
use wormhole_ring::layout::session;
use wormhole_ring::memory::{OwnedMemory, SessionMemory};
use wormhole_ring::ring::Cursors;
use wormhole_ring::session::Run;
use wormhole_ring::status::{Cause, EndCause, Status};
use wormhole_ring::waits::Waits;

use wormhole_link::memory;

use super::window_memory::{self, Kind, Segment};

/// The file for a session's memory cannot be created.
#[derive(Debug, thiserror::Error)]
#[error("no file for the session's memory can be made")]
pub struct SessionFileError(#[source] io::Error);

/// One session's file. Its size is fixed; memory is allocated only where it was written.
#[derive(Debug)]
pub struct SessionFile {
    file: File,
    kind: Kind,
}

impl SessionFile {
    /// Creates the file of a session in a window of this size, and writes the session's generation
    /// to its own segment.
    ///
    /// # Errors
    /// No descriptor or memory is free.
    pub fn new(window_bytes: u64, segment: u32, generation: u32) -> Result<Self, SessionFileError> {
        let make = || {
            let file = File::from(memory::anonymous_file(c"wormhole-session")?);
            file::set_size(&file, window_bytes)?;
            memory::seal_size(&file)?;
            let kind = Kind::File;
            Self { file, kind }.with_generation(segment, generation)
        };
        make().map_err(SessionFileError)
    }

    /// Takes a session's memory from the file of a static window, and writes the session's
    /// generation to its own segment. A holder of the file can delay the write by punching holes into
    /// it, which holds up this tenant's event loop alone.
    ///
    /// # Errors
    /// No descriptor or memory is free.
    pub fn within(
        window: &OwnedFd,
        segment: u32,
        generation: u32,
    ) -> Result<Self, SessionFileError> {
        let make = || {
            let (file, kind) = (File::from(window.try_clone()?), Kind::of(window)?);
            Self { file, kind }.with_generation(segment, generation)
        };
        make().map_err(SessionFileError)
    }

    fn with_generation(self, segment: u32, generation: u32) -> io::Result<Self> {
        let word = u64::from(generation).to_le_bytes();
        window_memory::write(&self.file, self.kind, segment, session::GENERATION, &word)?;
        Ok(self)
    }

    /// Duplicates the descriptor, to send it or to keep the memory allocated.
    ///
    /// # Errors
    /// No descriptor is free.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.file.as_fd().try_clone_to_owned()
    }

    /// Copies the header page of the session's segment.
    ///
    /// # Errors
    /// Same as [`window_memory::read`].
    pub fn header(&self, segment: u32) -> io::Result<SessionHeader> {
        let mut page = [0; session::SLOT_BASE];
        window_memory::read(&self.file, self.kind, segment, 0, &mut page)?;
        let copy = OwnedMemory::segments(1);
        // SAFETY: the copy is stored beside the objects made of it and dropped after them.
        let (window, memory) = unsafe { (copy.window(), copy.session(0)) };
        let written = window.and_then(|window| window.write(0, &page));
        let memory = written.and(memory).map_err(io::Error::other)?;
        Ok(SessionHeader {
            memory,
            _copy: copy,
        })
    }
}

impl From<SessionFile> for OwnedFd {
    fn from(file: SessionFile) -> Self {
        file.file.into()
    }
}

/// Frees the memory of a run of a session's segments; it reads as zero afterwards.
///
/// # Errors
/// Same as [`window_memory::clear`].
pub fn scrub(file: &OwnedFd, run: Run) -> io::Result<()> {
    window_memory::clear(file, Kind::of(file)?, run)
}

/// Writes the cause of a session's end to its status word, unless the word is set already.
///
/// # Errors
/// Same as `mmap`.
pub fn set_status(file: &OwnedFd, segment: u32, result: u32, cause: EndCause) -> io::Result<()> {
    let mapped = Segment::map(file, segment)?;
    let memory = mapped.memory().session(0).map_err(io::Error::other)?;
    Status::new(memory).set_once(result, cause);
    Ok(())
}

/// Copy of a session's header page: status word, hints, the ring's cursors and the notes of waiting
/// guest threads.
#[derive(Debug)]
pub struct SessionHeader {
    // Dropped in this order.
    memory: SessionMemory,
    _copy: OwnedMemory,
}

impl SessionHeader {
    /// Returns the status word's content, if it is set.
    pub fn status(&self) -> Option<Cause> {
        Status::new(self.memory.clone()).load()
    }

    /// Returns the number of calls that the guest reports to have answered by itself.
    pub fn local_calls(&self) -> u64 {
        Status::new(self.memory.clone()).local_calls()
    }
}

/// Formats the ring's cursors, and the guest's own notes of its sleeping threads.
impl fmt::Display for SessionHeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let waits = Waits::new(self.memory.clone());
        write!(f, "{}{waits}", Cursors::of(&self.memory))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt, MetadataExt};

    use wormhole_ring::layout::SEGMENT_BYTES;

    const SEGMENT: u64 = SEGMENT_BYTES as u64;

    #[test]
    fn a_scrubbed_run_reads_as_zero_and_holds_no_memory() {
        let file = SessionFile::new(4 * SEGMENT, 1, 9).unwrap();
        let before = file.file.metadata().unwrap().blocks();
        file.file.write_all_at(&[7; 8192], SEGMENT * 2).unwrap();
        assert!(file.file.metadata().unwrap().blocks() > before);
        scrub(&file.descriptor().unwrap(), Run { first: 2, count: 1 }).unwrap();
        assert_eq!(file.file.metadata().unwrap().blocks(), before);
        let mut byte = [1];
        file.file.read_exact_at(&mut byte, SEGMENT * 2).unwrap();
        assert_eq!(byte, [0]);
    }

    #[test]
    fn a_status_is_said_once_and_read_from_a_copy() {
        let file = SessionFile::new(4 * SEGMENT, 1, 9).unwrap();
        let header = || file.header(1).unwrap();
        assert_eq!(header().status(), None);
        let generation = Status::new(header().memory.clone()).generation();
        assert_eq!(generation, 9);
        let descriptor = file.descriptor().unwrap();
        for (result, cause) in [(709, EndCause::WorkerLost), (802, EndCause::Revoked)] {
            set_status(&descriptor, 1, result, cause).unwrap();
        }
        let cause = EndCause::WorkerLost as u32;
        let said = Cause { result: 709, cause };
        assert_eq!(header().status(), Some(said));
        assert_eq!(file.header(2).unwrap().status(), None);
    }

    /// A device is reached by mappings alone.
    #[test]
    fn a_session_in_a_device_has_its_generation_and_its_status() {
        let window = SessionFile::new(4 * SEGMENT, 1, 0).unwrap();
        let (file, kind) = (window.file, Kind::Device);
        let session = SessionFile { file, kind }.with_generation(2, 9).unwrap();
        let header = |segment| session.header(segment).unwrap();
        let generation = |segment| Status::new(header(segment).memory.clone()).generation();
        assert_eq!((generation(2), generation(1)), (9, 0));
        let descriptor = session.descriptor().unwrap();
        set_status(&descriptor, 2, 709, EndCause::WorkerLost).unwrap();
        assert_eq!(header(2).status().map(|cause| cause.result), Some(709));
        assert_eq!(header(1).status(), None);
    }

    #[test]
    fn nobody_changes_the_size() {
        let file = SessionFile::new(4 * SEGMENT, 1, 9).unwrap();
        assert!(file.file.set_len(5 * SEGMENT).is_err());
        assert!(file.file.set_len(SEGMENT).is_err());
    }
}
