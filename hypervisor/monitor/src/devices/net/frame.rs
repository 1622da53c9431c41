//! Frames that a guest sends, in the buffers of its driver.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use virtio_queue::DescriptorChain;
use vm_memory::VolatileSlice;

use super::device::{HEADER_LEN, MAX_FRAME};
use crate::devices::virtio::{guards, slices, vector};
use crate::ram::GuestRam;

/// Most parts of a frame that the kernel takes (`UIO_MAXIOV`).
const MOST_PARTS: usize = 1024;

/// A frame in the guest's memory, with virtio's header before it. The guest can change it at any time.
#[derive(Debug)]
pub struct GuestFrame<'m> {
    parts: Vec<VolatileSlice<'m>>,
    bytes: usize,
}

impl<'m> GuestFrame<'m> {
    /// Returns the frame in a buffer of the transmit queue; `None` if the buffer holds none.
    pub(super) fn of(memory: &'m GuestRam, chain: DescriptorChain<&GuestRam>) -> Option<Self> {
        Self::new(slices(memory, chain.readable())?)
    }

    /// Returns the frame of these parts; `None` if no frame is as short or as long.
    pub fn new(parts: Vec<VolatileSlice<'m>>) -> Option<Self> {
        let bytes = parts.iter().map(VolatileSlice::len).sum();
        let is_frame = (HEADER_LEN + 1..=MAX_FRAME).contains(&bytes) && parts.len() <= MOST_PARTS;
        is_frame.then_some(Self { parts, bytes })
    }

    /// Returns the bytes of the frame, its header included.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies the frame without its header to the start of `to`, as much of it as fits.
    pub fn copy_without_header(&self, to: &mut [u8]) {
        let (mut skipped, mut to) = (HEADER_LEN, to);
        for part in &self.parts {
            let before = skipped.min(part.len());
            skipped -= before;
            if let Ok(rest) = part.offset(before) {
                let copied = rest.copy_to(to);
                to = &mut to[copied..];
            }
        }
    }

    /// Writes the frame with its header by one call.
    pub fn write_to(&self, file: &impl AsFd) -> io::Result<()> {
        let guards = guards(&self.parts);
        let vector = vector(&guards);
        let count = i32::try_from(vector.len()).map_err(io::Error::other)?;
        let file = file.as_fd().as_raw_fd();
        // SAFETY: each part is a range of guest memory that is mapped while its slice is borrowed; the kernel only reads it.
        match unsafe { libc::writev(file, vector.as_ptr(), count) } {
            0.. => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}
