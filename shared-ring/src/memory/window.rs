use core::ptr::NonNull;

use super::{MemoryError, copy};
use crate::layout;

/// The mapping of a tenant's window, or of its first part, in this process.
///
/// A clone refers to the same memory.
#[derive(Clone, Debug)]
pub struct WindowMemory {
    /// Start of `length` mapped, writable bytes, aligned to 4096.
    base: NonNull<u8>,
    length: usize,
}

// SAFETY: the memory is only accessed through volatile copies; the pointer itself is never written.
unsafe impl Send for WindowMemory {}
// SAFETY: as above.
unsafe impl Sync for WindowMemory {}

impl WindowMemory {
    /// Wraps the window that is mapped at `base`.
    ///
    /// # Safety
    /// `base..base + length` stays mapped readable and writable until the last clone, and every
    /// session made from one, is dropped. This process accesses those bytes through this crate
    /// only, or in ways that never conflict with a call of this type.
    ///
    /// # Errors
    /// The region is unaligned or shorter than the bootstrap.
    pub unsafe fn new(base: *mut u8, length: usize) -> Result<Self, MemoryError> {
        let align = layout::BOOTSTRAP_BYTES;
        match NonNull::new(base) {
            Some(base) if base.addr().get().is_multiple_of(align) => {
                if length < layout::BOOTSTRAP_BYTES {
                    return Err(MemoryError::TooShort {
                        length,
                        needed: layout::BOOTSTRAP_BYTES,
                    });
                }
                Ok(Self { base, length })
            }
            _ => Err(MemoryError::Unaligned {
                address: base.addr(),
                align,
            }),
        }
    }

    /// Returns the address of the window in this process.
    #[must_use]
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Returns the number of bytes of the window that are mapped.
    #[must_use]
    pub fn length(&self) -> usize {
        self.length
    }

    /// Returns the session in segment number `segment`.
    ///
    /// # Errors
    /// The segment does not lie in the window.
    #[cfg(not(loom))]
    pub fn session(&self, segment: u32) -> Result<super::SessionMemory, MemoryError> {
        let offset = segment as usize * layout::SEGMENT_BYTES;
        self.check(offset, layout::SEGMENT_BYTES)?;
        // SAFETY: the segment lies in the window, which stays mapped as `new` demands.
        unsafe { super::SessionMemory::new(self.base.as_ptr().add(offset), layout::SEGMENT_BYTES) }
    }

    /// Copies `source` to the window.
    ///
    /// # Errors
    /// The range does not lie in the window.
    pub fn write(&self, offset: usize, source: &[u8]) -> Result<(), MemoryError> {
        self.check(offset, source.len())?;
        // SAFETY: checked to lie in the window.
        unsafe { copy::copy_in(self.base.as_ptr().add(offset), source) };
        Ok(())
    }

    /// Copies a part of the window to `destination`.
    ///
    /// # Errors
    /// The range does not lie in the window.
    pub fn read(&self, offset: usize, destination: &mut [u8]) -> Result<(), MemoryError> {
        self.check(offset, destination.len())?;
        // SAFETY: checked to lie in the window.
        unsafe { copy::copy_out(self.base.as_ptr().add(offset), destination) };
        Ok(())
    }

    fn check(&self, offset: usize, length: usize) -> Result<(), MemoryError> {
        if offset <= self.length && length <= self.length - offset {
            Ok(())
        } else {
            Err(MemoryError::OutOfBounds {
                offset,
                length,
                window: self.length,
            })
        }
    }
}
