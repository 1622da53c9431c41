//! Offsets and sizes of the window's segments, of a session segment, and of the address bands.

/// Bytes of a segment, the unit in which the supervisor grants the window.
pub const SEGMENT_BYTES: usize = 2 << 20;

/// Default address of the window, in a guest process and in its worker.
pub const WINDOW_BASE: u64 = 0x5000_0000_0000;
/// Bytes of the largest window that fits its band: 4 TiB.
pub const WINDOW_MAX_BYTES: u64 = 4 << 40;
/// Start of the band of handles that guests mint. Nothing is ever mapped there.
pub const HANDLE_BASE: u64 = 0x4000_0000_0000;
/// Bytes of the handle band.
pub const HANDLE_BYTES: u64 = 1 << 42;
/// Band in which a worker maps the files that its guest shares with other processes: address and bytes.
pub const FILES: (u64, u64) = (0x5800_0000_0000, 1 << 40);
/// Band of managed memory that changes sides: address and bytes. The driver gets the addresses at which it places memory
/// there only as long as nothing is mapped, so no process reserves the band.
pub const MANAGED: (u64, u64) = (0x5A00_0000_0000, 5 << 40);
/// Alignment of allocations in [`MANAGED`], and room behind each: driver 580 takes a hint at multiples of 32 MiB, and not
/// in a gap between two mappings that it fills (measured).
pub const MANAGED_ALIGN: u64 = 32 << 20;
/// Band above the window in which the driver places device memory: address and bytes.
pub const APERTURE_HIGH: (u64, u64) = (0x6000_0000_0000, 0x400_0000_0000);
/// Low band in which the driver places pools and reserved virtual memory: address and bytes.
pub const APERTURE_LOW: (u64, u64) = (0x2_0000_0000, 0x100_0000_0000 - 0x2_0000_0000);
/// Address from which up a worker with a CUDA device reserves the address space, so that the driver allocates below.
pub const RESERVED_ABOVE: u64 = APERTURE_HIGH.0 + APERTURE_HIGH.1;

/// Bytes of the frozen bootstrap at the start of segment 0.
pub const BOOTSTRAP_BYTES: usize = 4096;

/// Number of answer slots of a session, and so of guest threads that can wait for answers at the same time.
pub const SLOTS: usize = session::SLOTS;
/// Payload bytes of an answer slot.
pub const SLOT_PAYLOAD: usize = session::SLOT_PAYLOAD;
/// Number of fence words of a session.
pub const FENCES: usize = session::FENCES;
/// Bytes of a session's ring, a power of two.
pub const RING_BYTES: usize = session::RING_BYTES;
/// Bytes of a ring unit: every record starts at a multiple of it.
pub const UNIT: usize = 64;
/// Most bytes of a record, with its header.
pub const MAX_RECORD: usize = session::MAX_RECORD;
/// Bytes of a record's header.
pub const RECORD_HEADER: usize = 32;
/// Most bytes of a record's body.
pub const MAX_BODY: usize = MAX_RECORD - RECORD_HEADER;

/// Offsets inside a session segment.
#[cfg(not(loom))]
pub mod session {
    /// Status word: 0 while the session lives.
    pub const STATUS: usize = 0;
    /// Reservation cursor of the producers.
    pub const TAIL: usize = 128;
    /// Cursor that the consumer publishes.
    pub const HEAD: usize = 256;
    /// Not 0 while the consumer sleeps or is about to: 2 if a futex wake of this word ends the sleep as well as the
    /// doorbell does.
    pub const PARKED: usize = 384;
    /// Generation of the session, in the low 32 bits.
    pub const GENERATION: usize = 512;
    /// Number of calls that the guest answered by itself; a hint for the summary.
    pub const LOCAL_CALLS: usize = 640;
    /// Processor on which the executor runs; a hint for waits.
    pub const EXECUTOR: usize = 768;
    /// Notes whose threads sleep, one bit each.
    pub const SLEEPING: usize = 896;
    /// First note of the guest's waiting threads.
    pub const WAITS_BASE: usize = 1024;
    /// Bytes from one note to the next.
    pub const WAIT_STRIDE: usize = 32;
    /// Number of notes, one for each bit of a word.
    pub const WAITS: usize = 64;

    /// First answer slot.
    pub const SLOT_BASE: usize = 0x1000;
    /// Bytes from one answer slot to the next: the header and the payload.
    pub const SLOT_STRIDE: usize = SLOT_HEADER + SLOT_PAYLOAD;
    /// Bytes of an answer slot's header.
    pub const SLOT_HEADER: usize = 64;
    pub(super) const SLOTS: usize = 128;
    pub(super) const SLOT_PAYLOAD: usize = 4096;

    /// First fence word.
    pub const FENCE_BASE: usize = 0xA_0000;
    pub(super) const FENCES: usize = 49152;

    /// First byte of the ring.
    pub const RING_BASE: usize = 0x10_0000;
    pub(super) const RING_BYTES: usize = 1 << 20;
    pub(super) const MAX_RECORD: usize = 36 << 10;

    /// Bytes of a session segment.
    pub const BYTES: usize = super::SEGMENT_BYTES;
}

/// Offsets inside the small session that loom explores.
#[cfg(loom)]
#[allow(missing_docs)]
pub mod session {
    pub const STATUS: usize = 0;
    pub const TAIL: usize = 8;
    pub const HEAD: usize = 16;
    pub const PARKED: usize = 24;
    pub const GENERATION: usize = 32;
    pub const LOCAL_CALLS: usize = 40;
    pub const EXECUTOR: usize = 48;
    pub const SLEEPING: usize = 56;
    pub const WAITS_BASE: usize = 64;
    pub const WAIT_STRIDE: usize = 32;
    pub const WAITS: usize = 1;

    pub const SLOT_BASE: usize = 128;
    pub const SLOT_STRIDE: usize = SLOT_HEADER + SLOT_PAYLOAD;
    pub const SLOT_HEADER: usize = 64;
    pub(super) const SLOTS: usize = 1;
    pub(super) const SLOT_PAYLOAD: usize = 64;

    pub const FENCE_BASE: usize = 256;
    pub(super) const FENCES: usize = 2;

    pub const RING_BASE: usize = 320;
    pub(super) const RING_BYTES: usize = 256;
    pub(super) const MAX_RECORD: usize = 128;

    pub const BYTES: usize = 576;
}

const _: () = {
    assert!(RING_BYTES.is_power_of_two() && RING_BYTES.is_multiple_of(UNIT));
    assert!(MAX_RECORD.is_multiple_of(UNIT) && MAX_RECORD * 2 <= RING_BYTES);
    assert!(session::WAITS_BASE + session::WAITS * session::WAIT_STRIDE <= session::SLOT_BASE);
    assert!(session::SLOT_BASE + SLOTS * session::SLOT_STRIDE <= session::FENCE_BASE);
    assert!(session::FENCE_BASE + FENCES * 8 <= session::RING_BASE);
    assert!(session::RING_BASE + RING_BYTES <= session::BYTES);
    assert!(
        size_of::<usize>() == 8,
        "offsets in the window are 64 bits wide"
    );
};

/// Most devices of a tenant. The limit lets the facts of all of them fit a control message.
pub const MOST_DEVICES: usize = 16;
