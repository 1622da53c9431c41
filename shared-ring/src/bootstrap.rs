//! Bootstrap: the frozen structure at the start of a window. Only the supervisor writes it; its
//! layout never changes.

use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::{
    layout::{SEGMENT_BYTES, WINDOW_MAX_BYTES},
    memory::{MemoryError, WindowMemory},
};

/// The first eight bytes of a window.
pub const MAGIC: [u8; 8] = *b"WORMHOLE";
/// The version of the bootstrap, of the control messages and of the session's layout.
pub const VERSION: u32 = 1;

/// Content of the bootstrap, without magic and version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bootstrap {
    /// Bytes of the window.
    pub window_bytes: u64,
    /// Bytes of a segment.
    pub segment_bytes: u64,
    /// Reserved for later versions; 0.
    pub flags: u64,
}

/// Errors of reading a window's bootstrap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BootstrapError {
    /// The mapping is too short.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The memory is no window, or the supervisor has not written the bootstrap yet.
    #[error("the window starts with {found:02x?} instead of {MAGIC:02x?}")]
    Magic {
        /// The first eight bytes.
        found: [u8; 8],
    },
    /// A supervisor of another version wrote the bootstrap.
    #[error("the window's bootstrap has version {found}, this side knows {VERSION}")]
    Version {
        /// The version as read.
        found: u32,
    },
    /// The sizes are impossible.
    #[error(
        "a window of {window_bytes:#x} bytes with segments of {segment_bytes:#x} bytes is impossible"
    )]
    Sizes {
        /// Bytes of the window as read.
        window_bytes: u64,
        /// Bytes of a segment as read.
        segment_bytes: u64,
    },
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Wire {
    magic: [u8; 8],
    version: u32,
    reserved: u32,
    window_bytes: u64,
    segment_bytes: u64,
    flags: u64,
}

impl Bootstrap {
    /// Creates the bootstrap of a window of `window_bytes` bytes.
    #[must_use]
    pub const fn for_window(window_bytes: u64) -> Self {
        Self {
            window_bytes,
            segment_bytes: SEGMENT_BYTES as u64,
            flags: 0,
        }
    }

    /// Returns the number of segments of the window, the bootstrap's own included.
    #[must_use]
    pub const fn segments(&self) -> u64 {
        self.window_bytes / self.segment_bytes
    }

    /// Writes the bootstrap. The supervisor calls it before it shares the window.
    ///
    /// ```
    /// use wormhole_ring::{bootstrap::Bootstrap, memory::OwnedMemory};
    /// let region = OwnedMemory::segments(2);
    /// // SAFETY: the region outlives the window.
    /// let window = unsafe { region.window() }.unwrap();
    /// let bootstrap = Bootstrap::for_window(window.length() as u64);
    /// bootstrap.write(&window).unwrap();
    /// assert_eq!(Bootstrap::read(&window), Ok(bootstrap));
    /// ```
    ///
    /// # Errors
    /// The mapping is too short.
    pub fn write(&self, window: &WindowMemory) -> Result<(), MemoryError> {
        let wire = Wire {
            magic: MAGIC,
            version: VERSION,
            reserved: 0,
            window_bytes: self.window_bytes,
            segment_bytes: self.segment_bytes,
            flags: self.flags,
        };
        window.write(0, wire.as_bytes())
    }

    /// Reads and checks the bootstrap.
    ///
    /// # Errors
    /// See [`BootstrapError`].
    pub fn read(window: &WindowMemory) -> Result<Self, BootstrapError> {
        let mut bytes = [0; size_of::<Wire>()];
        window.read(0, &mut bytes)?;
        let wire: Wire = zerocopy::transmute!(bytes);
        if wire.magic != MAGIC {
            return Err(BootstrapError::Magic { found: wire.magic });
        }
        if wire.version != VERSION {
            return Err(BootstrapError::Version {
                found: wire.version,
            });
        }
        let Wire {
            window_bytes,
            segment_bytes,
            flags,
            ..
        } = wire;
        if segment_bytes != SEGMENT_BYTES as u64
            || !window_bytes.is_multiple_of(segment_bytes)
            || !(segment_bytes..=WINDOW_MAX_BYTES).contains(&window_bytes)
        {
            return Err(BootstrapError::Sizes {
                window_bytes,
                segment_bytes,
            });
        }
        Ok(Self {
            window_bytes,
            segment_bytes,
            flags,
        })
    }
}
