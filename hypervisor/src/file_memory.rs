//! Memory of a guest's shared files, which workers of its backend reach.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;

use wormhole_monitor::sealed_file;
use wormhole_ring::control::{self, Message};
use wormhole_ring::layout::SEGMENT_BYTES;
use wormhole_ring::shared_files::MARK;

use crate::backend::{Backend, BackendError, send};
use crate::run::{RunError, largest_file};

/// Memory of a guest's shared files.
#[derive(Debug)]
pub struct FileMemory {
    file: File,
    bytes: u64,
}

impl FileMemory {
    /// Returns the bytes of this memory that a guest with so much RAM has: half of it, as Linux takes for a tmpfs, and no more
    /// than a file of this process may have. A backend in a VM cannot reach such memory: none is of use then.
    pub fn usual(ram: u64, backend: &Backend) -> u64 {
        match backend.is_static() {
            true => 0,
            false => {
                let bytes = largest_file().min(ram / 2);
                bytes - bytes % SEGMENT_BYTES as u64
            }
        }
    }

    /// Makes memory for a guest that boots, which makes a file system of it, and gives it to the backend unless that runs in a
    /// VM. Returns none for no bytes.
    ///
    /// # Errors
    /// The system has no room for the file, or the backend is gone.
    pub fn open(bytes: u64, backend: &mut Backend) -> Result<Option<Self>, RunError> {
        Self::given(bytes, backend, Self::marked)
    }

    /// As [`Self::open`], for a guest that is restored, whose snapshot has the contents.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_empty(bytes: u64, backend: &mut Backend) -> Result<Option<Self>, RunError> {
        Self::given(bytes, backend, Self::empty)
    }

    fn given(
        bytes: u64,
        backend: &mut Backend,
        make: fn(u64) -> io::Result<Self>,
    ) -> Result<Option<Self>, RunError> {
        if bytes == 0 {
            return Ok(None);
        }
        let failed = |source| RunError::Io {
            what: format!("cannot make {bytes} bytes of memory for the guest's files"),
            source,
        };
        let memory = make(bytes).map_err(failed)?;
        if !backend.is_static() {
            backend.give_file_memory(memory.share().map_err(failed)?)?;
        }
        Ok(Some(memory))
    }

    fn empty(bytes: u64) -> io::Result<Self> {
        let file = sealed_file("files", bytes)?.into();
        Ok(Self { file, bytes })
    }

    fn marked(bytes: u64) -> io::Result<Self> {
        let memory = Self::empty(bytes)?;
        memory.file.write_all_at(&MARK, 0)?;
        Ok(memory)
    }

    /// Returns the same memory by another descriptor.
    fn share(&self) -> io::Result<Self> {
        Ok(Self {
            file: self.file.try_clone()?,
            bytes: self.bytes,
        })
    }

    pub fn into_file(self) -> OwnedFd {
        self.file.into()
    }

    /// Gives it to the backend, on the stream of a tenant whose window is not static.
    ///
    /// # Errors
    /// The backend is gone.
    pub fn give(&self, stream: &UnixStream) -> Result<(), BackendError> {
        let message = control::FileMemory { bytes: self.bytes };
        let message = Message::FileMemory(message);
        send(stream, &message, &[self.file.as_raw_fd()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::receive;

    #[test]
    fn a_backend_is_given_the_memory_and_its_size() {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let bytes = 4 << 20;
        let memory = FileMemory::marked(bytes).expect("memory");
        memory
            .share()
            .expect("a descriptor")
            .give(&ours)
            .expect("sent");
        let mut body = Vec::new();
        let Some((Message::FileMemory(given), Some(file))) =
            receive(&theirs, &mut body).expect("a message")
        else {
            panic!("the backend got another message");
        };
        assert_eq!(given.bytes, bytes);
        assert_eq!(file.metadata().expect("a file").len(), bytes);
        let mut mark = [0; MARK.len()];
        file.read_exact_at(&mut mark, 0).expect("it is there");
        assert_eq!(mark, MARK);
    }
}
