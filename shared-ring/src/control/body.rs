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

    /// First message of a guest process. The text behind it holds the driver-relevant part of its environment, one
    /// `NAME=value` per line.
    pub struct HelloFixed {
        /// [`crate::bootstrap::VERSION`] of the guest.
        pub bootstrap_version: u32,
        /// Bytes of the text.
        pub env_len: u32,
        /// Hash of the API table that the guest was built with.
        pub protocol_hash: u64,
        /// Optional features that the guest supports, one bit each.
        pub features: u64,
    }

    /// Description of a session: the segments and addresses that the guest may map.
    pub struct Grant {
        /// The session's number in its tenant.
        pub session: u32,
        /// Generation of that number; each reuse increments it.
        pub generation: u32,
        /// Segment of the window that holds the ring, the slots and the fences.
        pub session_segment: u32,
        /// The first arena segment granted at once.
        pub arena_first: u32,
        /// Arena segments granted at once.
        pub arena_count: u32,
        /// Reserved; 0.
        pub reserved: u32,
        /// Address of the window, in the worker and in the guest.
        pub window_base: u64,
        /// Bytes of the window.
        pub window_size: u64,
        /// Base of the handle band.
        pub handle_base: u64,
        /// Bands of the device's addresses: the high one and the low one.
        pub apertures: [Band; 2],
        /// Hash of the API table that the worker was built with.
        pub protocol_hash: u64,
        /// Features of the hello that the supervisor grants.
        pub features: u64,
    }

    /// Refusal of a session. The text behind it gives the reason, and names both versions if they differ.
    pub struct RefusedFixed {
        /// Reason of the refusal, a [`Refusal`].
        pub code: u32,
        /// Bytes of the text.
        pub text_len: u32,
    }

    /// Request of the guest for more arena segments.
    pub struct ArenaRequest {
        /// Repeated in the answer.
        pub id: u32,
        /// Contiguous segments wanted.
        pub segments: u32,
    }

    /// Request of the guest for more arena segments in a part of the window.
    pub struct ArenaWithin {
        /// Repeated in the answer.
        pub id: u32,
        /// Contiguous segments wanted.
        pub segments: u32,
        /// First segment that may be granted.
        pub first: u32,
        /// Segment behind the last one that may be granted. The window's end is an end of every part.
        pub end: u32,
    }

    /// Process id of a guest process in its guest. It is shown to the tenant and decides nothing.
    pub struct ProcessNumber {
        /// Result of `getpid` in the guest.
        pub pid: u32,
        /// Reserved; 0.
        pub reserved: u32,
    }

    /// Request of the guest for the facts of a device that its tenant may read.
    pub struct Observe {
        /// [`crate::bootstrap::VERSION`] of the guest.
        pub bootstrap_version: u32,
        /// The device's number.
        pub device: u32,
    }

    /// Facts of a device that a tenant may read. The text behind it holds [`facts`](super::facts), as many as fit.
    pub struct ObservationFixed {
        /// The device of the request.
        pub device: u32,
        /// Number of devices.
        pub devices: u32,
        /// 1 if another observation with more facts of the device follows.
        pub more: u32,
        /// Bytes of the text.
        pub text_len: u32,
    }

    /// A run of arena segments.
    pub struct ArenaRun {
        /// `id` of the request that the message answers, 0 in other messages.
        pub id: u32,
        /// The first segment.
        pub first: u32,
        /// Number of segments.
        pub count: u32,
    }

    /// A run of a session's segments that the launcher maps for the guest. Its offset in the session file equals its
    /// offset in the window.
    pub struct WindowRun {
        /// The supervisor's number for the session; repeated in the answer.
        pub session: u32,
        /// The first segment.
        pub first: u32,
        /// Number of segments.
        pub count: u32,
    }

    /// Request of a worker to share an object of its device with the tenant's other processes.
    pub struct Share {
        /// Repeated in the answer.
        pub id: u32,
        /// Kind of the object, as the workers number kinds.
        pub what: u32,
        /// 1 if a file descriptor travels with the message. Each worker that fetches the object gets a copy of it.
        pub descriptor: u32,
        /// 1 if the descriptor is a file that begins with the words of an event. The supervisor notes the death of a
        /// party there.
        pub words: u32,
        /// Parameters with which another worker's device opens the object.
        pub description: [u64; 8],
    }

    /// Answer to [`Share`]: the name of the shared object.
    pub struct Shared {
        /// `id` of the request.
        pub id: u32,
        /// 0, or the `CUresult` that the guest gets.
        pub result: u32,
        /// Name of the object for the tenant's other processes.
        pub token: [u64; 2],
    }

    /// Name of a shared object: one that another process of the tenant has shared, or, in `Unshare`, one of the
    /// worker's own that no other process may open from now on.
    pub struct Fetch {
        /// Repeated in the answer.
        pub id: u32,
        /// Kind that the object must have.
        pub what: u32,
        /// Name of the object.
        pub token: [u64; 2],
    }

    /// Answer to [`Fetch`]: the shared object. Its descriptor, if it has one, travels with the message.
    pub struct Fetched {
        /// `id` of the request.
        pub id: u32,
        /// 0, or the `CUresult` that the guest gets.
        pub result: u32,
        /// See [`Share`].
        pub descriptor: u32,
        /// Party number of the worker if the object is an event; party 0 is the worker that shares it.
        pub party: u32,
        /// See [`Share`].
        pub description: [u64; 8],
    }

    /// Answer to [`ArenaRequest`]: no arena is granted.
    pub struct ArenaDenied {
        /// `id` of the request.
        pub id: u32,
        /// Reason of the refusal, a [`Refusal`].
        pub code: u32,
        /// Bytes of its window that the tenant may use at a time.
        pub limit: u64,
    }

    /// Attachment of a tenant's window. Its file descriptor travels with the message.
    pub struct Attach {
        /// Bytes of the window.
        pub window_size: u64,
        /// Most segments granted at the same time, 0 for the whole window.
        pub segment_limit: u32,
        /// Most sessions alive at the same time, 0 for no limit but the window's size.
        pub session_limit: u32,
        /// Most bytes of device memory that the tenant may allocate, 0 for no limit.
        pub device_memory_limit: u64,
        /// 1 for a static window: the guest has all of the file mapped, and its sessions' memory is in it. 0 if each
        /// session has a file of its own.
        pub static_window: u64,
    }

    /// Memory of the file system in which processes of a guest VM share memory.
    pub struct FileMemory {
        /// Bytes of the file.
        pub bytes: u64,
    }

    /// Request of a launcher for a control stream of a guest process, and the supervisor's answer, with which the guest's
    /// end of the stream travels. Requests are answered in order, by this message or by `Refused`.
    pub struct Stream {
        /// 1 if guest process and backend run on the same system, so that file descriptors can be passed.
        pub local: u32,
    }

    /// A part of the answer to [`AskUsage`](super::Message::AskUsage): usage by tenants as JSON. Each message holds as
    /// much as fits. A launcher's answers are whole: the usage of its tenant, and the same again when the exits of its
    /// guest are known.
    pub struct UsageFixed {
        /// 1 if another part, or the answer with the exits, follows.
        pub more: u32,
        /// Bytes of the text.
        pub text_len: u32,
    }

    /// Answer to [`AskExits`](super::Message::AskExits).
    pub struct Exits {
        /// 1 if the launcher can tell, 0 otherwise.
        pub is_known: u64,
        /// Number of exits of the guest's vCPUs since it booted.
        pub count: u64,
    }

    /// Announcement of a worker that is ready. The text behind it describes its devices with [`facts`](super::facts),
    /// separated by an empty line.
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
    /// Returns the segments of the run.
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
    /// Returns the segments of the run.
    #[must_use]
    pub const fn segments(&self) -> Run {
        Run {
            first: self.first,
            count: self.count,
        }
    }
}

/// Reasons for which a session or a run of segments is refused. The numbers are part of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Refusal {
    /// No worker supports the guest's version.
    Version = 1,
    /// The tenant's quota is used up.
    Quota = 2,
    /// The window has no free segments.
    WindowFull = 3,
    /// No device can be used.
    NoDevice = 4,
    /// The address bands are in use in the guest process.
    Bands = 5,
    /// The guest broke the protocol.
    Protocol = 6,
}

impl Refusal {
    /// Returns the refusal with this number.
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
