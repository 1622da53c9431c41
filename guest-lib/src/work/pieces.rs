//! Copies between pageable memory and staging buffers by the processor.

use std::slice;

use super::copy::host_pointer;
use crate::bulk::{Bulk, Stores};
use crate::session::OnDevice;

/// A range of the program's memory, and a part of a staging buffer of the same length.
///
/// Both are valid for the copy, and do not overlap: only functions whose callers vouch for the program's memory make one.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    pub(super) destination: u64,
    pub(super) source: u64,
    pub(super) bytes: usize,
    pub(super) stores: Stores,
}

impl Piece {
    /// Copies the piece to a staging buffer; one of large memory with the help of other threads.
    pub fn copy_up(self, session: OnDevice, is_large: bool) {
        let (to, from) = (host_pointer(self.destination), host_pointer(self.source));
        // SAFETY: both ranges are valid for the copy and apart. The source is the program's memory.
        unsafe {
            if session.carries_data() {
                session.put(self.destination, slice::from_raw_parts(from, self.bytes));
            } else {
                copy(Bulk::new(to, from, self.bytes, self.stores), is_large);
            }
        }
    }

    /// Copies the piece from a staging buffer, likewise.
    pub fn copy_down(self, session: OnDevice, is_large: bool) {
        let (to, from) = (host_pointer(self.destination), host_pointer(self.source));
        // SAFETY: both ranges are valid for the copy and apart. The destination is the program's memory.
        unsafe {
            if session.carries_data() {
                session.get(self.source, slice::from_raw_parts_mut(to, self.bytes));
            } else {
                copy(Bulk::new(to, from, self.bytes, self.stores), is_large);
            }
        }
    }
}

fn copy(bulk: Bulk, is_large: bool) {
    if is_large {
        bulk.copy_shared(None);
    } else {
        bulk.copy_alone();
    }
}
