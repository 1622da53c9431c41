//! The fixed parts of the control messages. Frozen: fields are never moved or removed.

#![expect(
    missing_debug_implementations,
    reason = "types that zerocopy's derives make"
)]

use zerocopy::{FromBytes, Immutable, IntoBytes};

#[cfg(feature = "std")]
use crate::session::Run;

macro_rules! bodies {
    ($($(#[$doc:meta])* pub struct $name:ident { $($(#[$field_doc:meta])* pub $field:ident: $type:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[derive(FromBytes, IntoBytes, Immutable)]
        #[repr(C)]
        pub struct $name { $($(#[$field_doc])* pub $field: $type,)* }
    )*};
}

bodies! {
    /// A range of addresses.
    pub struct Band {
        /// The first address.
        pub base: u64,
        /// Bytes.
        pub size: u64,
    }

    /// What a guest process says first. The text behind it holds the driver-relevant part of its
    /// environment, one `NAME=value` per line.
    pub struct HelloFixed {
        /// [`crate::bootstrap::VERSION`] of the guest.
        pub bootstrap_version: u32,
        /// Bytes of the text.
        pub env_len: u32,
        /// Hash of the API table that the guest was built with.
        pub protocol_hash: u64,
        /// Optional features that the guest knows, one bit each.
        pub features: u64,
    }

    /// A session: what the guest may map and where.
    pub struct Grant {
        /// The session's number in its tenant.
        pub session: u32,
        /// Which use of that number this is.
        pub generation: u32,
        /// The segment of the window that holds the ring, the slots and the fences.
        pub session_segment: u32,
        /// The first arena segment granted at once.
        pub arena_first: u32,
        /// Arena segments granted at once.
        pub arena_count: u32,
        /// Reserved; 0.
        pub reserved: u32,
        /// Where the window lies in the worker and must lie in the guest.
        pub window_base: u64,
        /// Bytes of the window.
        pub window_size: u64,
        /// Base of the handle band.
        pub handle_base: u64,
        /// Where the device's addresses lie: the high band and the low one.
        pub apertures: [Band; 2],
        /// Hash of the API table that the worker was built with.
        pub protocol_hash: u64,
        /// The features of the hello that the worker has too.
        pub features: u64,
    }

    /// A refusal. The text behind it says what is refused, and names both versions where they differ.
    pub struct RefusedFixed {
        /// See [`Refusal`].
        pub code: u32,
        /// Bytes of the text.
        pub text_len: u32,
    }

    /// The guest asks for more arena.
    pub struct ArenaRequest {
        /// Repeated in the answer.
        pub id: u32,
        /// Contiguous segments wanted.
        pub segments: u32,
    }

    /// The number that a guest process has in its guest. Nothing is decided by it; it is shown to the tenant.
    pub struct ProcessNumber {
        /// As `getpid` says.
        pub pid: u32,
        /// Reserved; 0.
        pub reserved: u32,
    }

    /// The guest asks for what its tenant may know of a device.
    pub struct Observe {
        /// [`crate::bootstrap::VERSION`] of the guest.
        pub bootstrap_version: u32,
        /// The device's number.
        pub device: u32,
    }

    /// What a tenant may know of a device. The text behind it has [`facts`](super::facts), as many as fit.
    pub struct ObservationFixed {
        /// That of the question.
        pub device: u32,
        /// How many devices there are.
        pub devices: u32,
        /// 1 if another observation follows with more of the same.
        pub more: u32,
        /// Bytes of the text.
        pub text_len: u32,
    }

    /// A run of arena segments. `id` is that of the request it answers, 0 elsewhere.
    pub struct ArenaRun {
        /// See above.
        pub id: u32,
        /// The first segment.
        pub first: u32,
        /// Segments.
        pub count: u32,
    }

    /// A run of a session's segments, as the launcher shows it to the guest. The run lies in the session
    /// file where it lies in the window.
    pub struct WindowRun {
        /// The supervisor's number of the session; repeated in the answer.
        pub session: u32,
        /// The first segment.
        pub first: u32,
        /// Segments.
        pub count: u32,
    }

    /// A worker lets the tenant's other processes use something of its device.
    pub struct Share {
        /// Repeated in the answer.
        pub id: u32,
        /// What it is, as the workers number it.
        pub what: u32,
        /// 1 if a descriptor comes with the message, which those who use it get too.
        pub descriptor: u32,
        /// 1 if that is a file that begins with the words of an event, in which a party's death is to be noted.
        pub words: u32,
        /// What another worker's device needs to use it.
        pub description: [u64; 8],
    }

    /// What is shared has a name.
    pub struct Shared {
        /// That of the request.
        pub id: u32,
        /// 0, or the `CUresult` that the guest gets.
        pub result: u32,
        /// What the tenant's other processes name it by.
        pub token: [u64; 2],
    }

    /// A worker's guest names what another process of the tenant has shared; or, of its own, what nobody may
    /// use from now on.
    pub struct Fetch {
        /// Repeated in the answer.
        pub id: u32,
        /// What it must be.
        pub what: u32,
        /// Its name.
        pub token: [u64; 2],
    }

    /// What was named. The descriptor comes with the message, if there is one.
    pub struct Fetched {
        /// That of the request.
        pub id: u32,
        /// 0, or the `CUresult` that the guest gets.
        pub result: u32,
        /// See [`Share`].
        pub descriptor: u32,
        /// Which of those who use it the worker is: 0 is who shares it.
        pub party: u32,
        /// See [`Share`].
        pub description: [u64; 8],
    }

    /// The arena asked for is not granted.
    pub struct ArenaDenied {
        /// That of the request.
        pub id: u32,
        /// See [`Refusal`].
        pub code: u32,
    }

    /// A tenant's window is attached; its file descriptor comes with the message.
    pub struct Attach {
        /// Bytes of the window.
        pub window_size: u64,
        /// Segments that may be granted at the same time, 0 for the whole window.
        pub segment_limit: u32,
        /// Sessions that may live at the same time, 0 for no limit but the window's.
        pub session_limit: u32,
        /// Bytes of device memory that the tenant may hold, 0 for no limit.
        pub device_memory_limit: u64,
    }

    /// A guest process's control stream; its file descriptor comes with the message.
    pub struct Stream {
        /// 1 when guest process and backend share the system, so that descriptors can be passed.
        pub local: u32,
    }

    /// A worker is ready. The text behind it describes its devices with [`facts`](super::facts), an empty line
    /// between one and the next.
    pub struct ReadyFixed {
        /// Hash of the API table that the worker was built with.
        pub protocol_hash: u64,
        /// Bytes of the text.
        pub text_len: u32,
        /// Reserved; 0.
        pub reserved: u32,
    }
}

#[cfg(feature = "std")]
impl ArenaRun {
    /// The segments that it names.
    #[must_use]
    pub const fn segments(&self) -> Run {
        Run {
            first: self.first,
            count: self.count,
        }
    }
}

#[cfg(feature = "std")]
impl WindowRun {
    /// The segments that it names.
    #[must_use]
    pub const fn segments(&self) -> Run {
        Run {
            first: self.first,
            count: self.count,
        }
    }
}

/// Why a session or a run of segments is refused. The numbers are part of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Refusal {
    /// No worker speaks the guest's version.
    Version = 1,
    /// The tenant's quota is used up.
    Quota = 2,
    /// The window has no room.
    WindowFull = 3,
    /// No device can be used.
    NoDevice = 4,
    /// The address bands are taken in the guest process.
    Bands = 5,
    /// The guest broke the protocol.
    Protocol = 6,
}

impl Refusal {
    /// The refusal with this number.
    #[must_use]
    pub const fn from_code(code: u32) -> Option<Self> {
        Some(match code {
            1 => Self::Version,
            2 => Self::Quota,
            3 => Self::WindowFull,
            4 => Self::NoDevice,
            5 => Self::Bands,
            6 => Self::Protocol,
            _ => return None,
        })
    }
}
