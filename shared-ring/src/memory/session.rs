use core::ptr::NonNull;

use super::{MemoryError, copy};
use crate::{
    layout,
    sync::{AtomicU64, Ordering},
};

/// The mapping of one session segment in this process.
///
/// A clone refers to the same memory.
#[derive(Clone, Debug)]
pub struct SessionMemory {
    /// Start of [`layout::session::BYTES`] mapped, writable bytes, aligned to 4096.
    base: NonNull<u8>,
}

// SAFETY: the memory is only accessed through atomics and through volatile copies that the ring's
// protocol orders; the pointer itself is never written.
unsafe impl Send for SessionMemory {}
// SAFETY: as above.
unsafe impl Sync for SessionMemory {}

impl SessionMemory {
    /// Wraps the session segment that is mapped at `base`.
    ///
    /// # Safety
    /// `base..base + length` stays mapped readable and writable until the last clone, and the last
    /// ring, slot or fence made from one, is dropped. This process accesses those bytes through
    /// this crate only.
    ///
    /// # Errors
    /// The region is unaligned or shorter than a session segment.
    pub unsafe fn new(base: *mut u8, length: usize) -> Result<Self, MemoryError> {
        let align = layout::BOOTSTRAP_BYTES;
        match NonNull::new(base) {
            Some(base) if base.addr().get().is_multiple_of(align) => {
                if length < layout::session::BYTES {
                    return Err(MemoryError::TooShort {
                        length,
                        needed: layout::session::BYTES,
                    });
                }
                Ok(Self { base })
            }
            _ => Err(MemoryError::Unaligned {
                address: base.addr(),
                align,
            }),
        }
    }

    /// Returns the address of the segment in this process.
    #[must_use]
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Returns the word at `offset`, which is a multiple of 8.
    #[inline]
    pub(crate) fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset < layout::session::BYTES);
        // SAFETY: inside the segment and aligned. Words that are also written without atomics (a
        // body that crosses a unit) are so only while the protocol assigns them to one thread.
        unsafe { AtomicU64::at(self.base.as_ptr().add(offset).cast()) }
    }

    /// Asks the processor for the line at `offset` before this thread writes it. Other processors lose their copies of
    /// the line, the bytes stay the same.
    #[inline]
    pub(crate) fn prefetch_for_write(&self, offset: usize) {
        debug_assert!(offset < layout::session::BYTES);
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: a prefetch is a hint: it never faults and changes no byte. Processors without `prefetchw` execute it
        // as a no-operation.
        unsafe {
            core::arch::asm!(
                "prefetchw [{}]",
                in(reg) self.base.as_ptr().wrapping_add(offset),
                options(nostack, preserves_flags),
            );
        }
    }

    /// Writes a word that the protocol assigns to this thread.
    #[inline]
    pub(crate) fn write_word(&self, offset: usize, value: u64) {
        self.word(offset).store(value, Ordering::Relaxed);
    }

    /// Reads a word that the protocol assigns to this thread.
    #[inline]
    pub(crate) fn read_word(&self, offset: usize) -> u64 {
        self.word(offset).load(Ordering::Relaxed)
    }

    /// Writes bytes that the protocol assigns to this thread.
    #[inline]
    pub(crate) fn write(&self, offset: usize, source: &[u8]) {
        assert!(
            offset <= layout::session::BYTES && source.len() <= layout::session::BYTES - offset
        );
        // SAFETY: inside the segment; the caller owns the range by the protocol.
        unsafe { copy::copy_in(self.base.as_ptr().add(offset), source) };
    }

    /// Reads bytes that the protocol assigns to this thread.
    #[inline]
    pub(crate) fn read(&self, offset: usize, destination: &mut [u8]) {
        assert!(
            offset <= layout::session::BYTES
                && destination.len() <= layout::session::BYTES - offset
        );
        // SAFETY: inside the segment; the caller owns the range by the protocol.
        unsafe { copy::copy_out(self.base.as_ptr().add(offset), destination) };
    }
}
