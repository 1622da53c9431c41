//! The memory behind a session's part of its window.
//!
//! Each session has an anonymous file of its own, as large as the window, in which a segment lies where it
//! lies in the window. The session's worker holds no other file, so that it reaches no other session,
//! whatever becomes of it. A guest on this system maps the same file; the launcher of a guest VM lets the
//! guest see the granted runs of it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use wormhole_device::file;
use wormhole_ring::layout::SEGMENT_BYTES;
use wormhole_ring::memory::{MemoryError, SessionMemory};
use wormhole_ring::ring::Cursors;
use wormhole_ring::session::Run;
use wormhole_ring::status::Status;
use wormhole_ring::waits::Waits;

use wormhole_link::memory::{self, Mapping};

const SEGMENT: u64 = SEGMENT_BYTES as u64;

/// Why a session has no memory.
#[derive(Debug, thiserror::Error)]
pub enum SessionFileError {
    #[error("no file for the session's memory can be made")]
    Make(#[source] io::Error),
    #[error("the session's segment cannot be mapped")]
    Map(#[source] io::Error),
    #[error("the session's segment cannot be used")]
    Memory(#[from] MemoryError),
}

/// One session's file. Its size is fixed; it holds what was written to it and nothing else.
#[derive(Debug)]
pub struct SessionFile(File);

impl SessionFile {
    /// The file for a session in a window of this size.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new(window_bytes: u64) -> Result<Self, SessionFileError> {
        let make = || {
            let file = File::from(memory::anonymous_file(c"wormhole-session")?);
            file::set_size(&file, window_bytes)?;
            memory::seal_size(&file)?;
            Ok(file)
        };
        make().map(Self).map_err(SessionFileError::Make)
    }

    /// Another descriptor, to send away or to keep the memory for.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.0.as_fd().try_clone_to_owned()
    }

    /// The header of the session's segment.
    ///
    /// # Errors
    /// The segment cannot be mapped.
    pub fn header(&self, segment: u32) -> Result<SessionHeader, SessionFileError> {
        let mapping = Mapping::new(&self.0, u64::from(segment) * SEGMENT, SEGMENT_BYTES)
            .map_err(SessionFileError::Map)?;
        // SAFETY: the mapping is kept beside the status word and dropped after it.
        let memory = unsafe { SessionMemory::new(mapping.base(), mapping.bytes()) }?;
        Ok(SessionHeader {
            status: Status::new(memory.clone()),
            memory,
            _mapping: mapping,
        })
    }
}

impl From<SessionFile> for OwnedFd {
    fn from(file: SessionFile) -> Self {
        file.0.into()
    }
}

/// Gives the memory of some of a session's segments back; they read as zero afterwards.
///
/// # Errors
/// As `fallocate`.
pub fn scrub(file: &OwnedFd, run: Run) -> io::Result<()> {
    file::punch_hole(
        file,
        u64::from(run.first) * SEGMENT,
        u64::from(run.count) * SEGMENT,
    )
}

/// A session's header page, mapped: its status word, hints, the ring's cursors and the notes of waiting guest threads. The supervisor touches no other word
/// of the segment.
#[derive(Debug)]
pub struct SessionHeader {
    // Dropped in this order.
    pub status: Status,
    memory: SessionMemory,
    _mapping: Mapping,
}

impl SessionHeader {
    /// How the session's ring stands.
    pub fn cursors(&self) -> Cursors {
        Cursors::of(&self.memory)
    }

    /// Sleeping threads of the guest, by the guest's own notes.
    pub fn waits(&self) -> Waits {
        Waits::new(self.memory.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt, MetadataExt};

    #[test]
    fn a_scrubbed_run_reads_as_zero_and_holds_no_memory() {
        let file = SessionFile::new(4 * SEGMENT).unwrap();
        let before = file.0.metadata().unwrap().blocks();
        file.0.write_all_at(&[7; 8192], SEGMENT * 2).unwrap();
        assert!(file.0.metadata().unwrap().blocks() > before);
        scrub(&file.descriptor().unwrap(), Run { first: 2, count: 1 }).unwrap();
        assert_eq!(file.0.metadata().unwrap().blocks(), before);
        let mut byte = [1];
        file.0.read_exact_at(&mut byte, SEGMENT * 2).unwrap();
        assert_eq!(byte, [0]);
    }

    #[test]
    fn nobody_changes_the_size() {
        let file = SessionFile::new(4 * SEGMENT).unwrap();
        assert!(file.0.set_len(5 * SEGMENT).is_err());
        assert!(file.0.set_len(SEGMENT).is_err());
    }
}
