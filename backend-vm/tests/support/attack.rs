//! Attacks on a live window: what a hostile guest can write, by chance and by design.

use wormhole_api::{
    ContextGetLimit, ContextReset, ContextSetLimit, DeviceDescribe, MemoryOperation, StreamMemory,
    StreamSetAttribute,
};
use wormhole_api::{
    DevicePtr, Element, Event, EventCreate, EventDestroy, EventElapsed, EventQuery, EventRecord,
    EventSynchronize, Fence, FenceWrite, Function, FunctionGetAttribute, FunctionSetAttribute,
    FunctionSetCacheConfig, Handle, Items, JitOption, Kind, LaunchAttribute, LaunchKernel, Library,
    LibraryGetGlobal, LibraryGetKernel, LibraryGetModule, LibraryLoad, LibraryUnload, Link,
    LinkInput, MemAlloc, MemCopy, MemFree, MemGetInfo, MemSet, MemWrite, Message, Module,
    ModuleGetFunction, ModuleGetGlobal, ModuleLoad, ModuleUnload, Occupancy, Stream, StreamCreate,
    StreamDestroy, StreamQuery, StreamWaitEvent, Synchronize, TakeOutput,
};
use wormhole_ring::layout::{MAX_RECORD, RECORD_HEADER, RING_BYTES, UNIT, session};

use super::guest::Guest;
use super::random::Random;

/// A kernel that writes its thread's number, to load and launch.
pub const PTX: &str = "\
.version 7.0
.target sm_70
.address_size 64
.global .align 4 .b8 table[256];
.visible .entry store(.param .u64 out)
{
    .reg .b32 %r<4>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.u32 [%rd3], %r1;
    ret;
}
";

/// A record as it lies in a ring, to be spoilt.
#[derive(Clone)]
pub struct Entry {
    pub message: u16,
    pub slot: u16,
    pub body: Vec<u8>,
    /// Given instead of the right one.
    pub body_len: Option<u32>,
    pub units: Option<u64>,
    pub lap: Option<u32>,
    pub pad: bool,
}

/// What a session owns, for records that make sense.
pub struct Things {
    pub stream: Handle<Stream>,
    pub event: Handle<Event>,
    pub module: Handle<Module>,
    pub library: Handle<Library>,
    pub function: Handle<Function>,
    pub device: DevicePtr,
    pub arena: u64,
}

/// Bytes of device memory behind [`Things::device`].
pub const DEVICE_BYTES: u64 = 65536;

fn entry<M: Message>(message: &M) -> Entry {
    Entry {
        message: M::ID,
        // A request without a slot ends its session.
        slot: match M::KIND {
            Kind::Record => 0xFFFF,
            Kind::Request | Kind::Blocking => M::ID % 128,
        },
        body: message.encode(|parts| parts.concat()).unwrap(),
        body_len: None,
        units: None,
        lap: None,
        pad: false,
    }
}

/// A valid record of every kind, in the order of a program that would send them.
pub fn grammar(things: &Things, guest: &mut Guest) -> Vec<Entry> {
    let Things {
        stream,
        event,
        module,
        library,
        function,
        device,
        arena,
    } = *things;
    let attribute = [LaunchAttribute {
        id: 8,
        reserved: 0,
        value: [0; 64],
    }];
    let fresh = (guest.mint(), guest.mint(), guest.mint(), guest.mint());
    let (image, bytes) = (DevicePtr(arena), PTX.len() as u64);
    let host = DevicePtr(arena + 65536);
    let name = b"store";
    vec![
        entry(&DeviceDescribe { ordinal: 0 }),
        entry(&MemGetInfo {}),
        entry(&MemAlloc { bytes: 4096 }),
        entry(&MemFree {
            address: DevicePtr(1),
        }),
        entry(&MemWrite {
            destination: device,
            stream,
            data: &[5; 100],
        }),
        entry(&MemCopy {
            destination: device,
            source: host,
            bytes: 4096,
            stream,
        }),
        entry(&MemSet {
            destination: device,
            pitch: 256,
            width: 16,
            height: 4,
            value: 3,
            element: Element::Word,
            stream,
        }),
        entry(&StreamMemory {
            stream,
            operations: Items::new(&[
                MemoryOperation {
                    kind: 2,
                    flags: 0,
                    address: device.0,
                    value: 7,
                },
                MemoryOperation {
                    kind: 1,
                    flags: 0,
                    address: device.0,
                    value: 7,
                },
                MemoryOperation {
                    kind: 6,
                    flags: 1,
                    address: 0,
                    value: 0,
                },
            ]),
        }),
        entry(&StreamSetAttribute {
            stream,
            id: 3,
            value: [1; 64],
        }),
        entry(&StreamCreate {
            new: fresh.0,
            flags: 1,
            priority: 0,
        }),
        entry(&StreamDestroy { stream: fresh.0 }),
        entry(&StreamQuery { stream }),
        entry(&StreamWaitEvent {
            stream,
            event,
            flags: 0,
        }),
        entry(&FenceWrite {
            stream,
            fence: Fence::new(9).unwrap(),
            value: 1,
        }),
        entry(&Synchronize {
            stream: Some(stream),
        }),
        entry(&EventCreate {
            new: fresh.1,
            flags: 0,
        }),
        entry(&EventRecord {
            event,
            stream,
            flags: 0,
            fence: Fence::new(4),
            value: 7,
        }),
        entry(&EventQuery { event }),
        entry(&EventSynchronize { event }),
        entry(&EventElapsed {
            start: event,
            end: event,
        }),
        entry(&EventDestroy { event: fresh.1 }),
        entry(&ModuleLoad {
            log: DevicePtr(0),
            log_bytes: 0,
            options: Items::new(&[]),
            new: fresh.2,
            image,
            bytes,
        }),
        entry(&ModuleGetFunction {
            module,
            new: guest.mint(),
            name,
        }),
        entry(&ModuleGetGlobal {
            module,
            name: b"table",
        }),
        entry(&ModuleUnload { module: fresh.2 }),
        entry(&Link {
            complete: 1,
            inputs: image,
            image,
            room: bytes,
            log: image,
            log_bytes: bytes / 2,
            parts: Items::new(&[LinkInput {
                kind: 1,
                name: 1,
                bytes,
            }]),
            options: Items::new(&[JitOption {
                option: 3,
                reserved: 0,
                value: bytes,
            }]),
        }),
        entry(&LibraryLoad {
            log: DevicePtr(0),
            log_bytes: 0,
            options: Items::new(&[]),
            new: fresh.3,
            image,
            bytes,
        }),
        entry(&LibraryGetKernel {
            library,
            new: guest.mint(),
            name,
        }),
        entry(&LibraryGetGlobal {
            library,
            name: b"table",
        }),
        entry(&LibraryGetModule {
            library,
            new: guest.mint(),
        }),
        entry(&LibraryUnload { library: fresh.3 }),
        entry(&FunctionGetAttribute {
            function,
            attribute: 0,
        }),
        entry(&FunctionSetAttribute {
            function,
            attribute: 8,
            value: 1024,
        }),
        entry(&Occupancy {
            function,
            block: 32,
            flags: 0,
            shared: 0,
        }),
        entry(&LaunchKernel {
            function,
            stream,
            grid: [1, 1, 1],
            block: [32, 1, 1],
            shared: 0,
            attributes: Items::new(&attribute),
            parameters: &device.0.to_le_bytes(),
        }),
        entry(&ContextGetLimit { limit: 0 }),
        entry(&ContextSetLimit {
            limit: 0,
            value: 1024,
        }),
        entry(&FunctionSetCacheConfig {
            function,
            config: 1,
        }),
        entry(&TakeOutput {}),
        entry(&ContextReset {}),
    ]
}

/// Writes entries straight into a ring, as its only producer.
pub struct Writer {
    segment: *mut u8,
    /// Bytes since the session began.
    pub cursor: u64,
}

// SAFETY: a pointer to shared memory that the guest keeps mapped, used through volatile accesses.
unsafe impl Send for Writer {}

impl Writer {
    pub fn new(guest: &Guest) -> Self {
        let mut writer = Self {
            segment: guest.segment,
            cursor: 0,
        };
        writer.cursor = writer.word(session::TAIL);
        writer
    }

    pub fn word(&self, offset: usize) -> u64 {
        assert!(offset + 8 <= session::BYTES);
        // SAFETY: inside the segment.
        unsafe { self.segment.add(offset).cast::<u64>().read_volatile() }
    }

    pub fn set_word(&self, offset: usize, value: u64) {
        assert!(offset + 8 <= session::BYTES);
        // SAFETY: inside the segment.
        unsafe { self.segment.add(offset).cast::<u64>().write_volatile(value) }
    }

    pub fn set_byte(&self, offset: usize, value: u8) {
        assert!(offset < session::BYTES);
        // SAFETY: inside the segment.
        unsafe { self.segment.add(offset).write_volatile(value) }
    }

    /// Where the next entry goes, as an offset in the segment.
    pub fn place(&self) -> usize {
        session::RING_BASE + (self.cursor as usize & (RING_BYTES - 1))
    }

    /// Writes an entry, right or wrong, and publishes it.
    pub fn write(&mut self, entry: &Entry, sequence: u64) {
        let bytes = (RECORD_HEADER + entry.body.len()).next_multiple_of(UNIT);
        assert!(bytes <= MAX_RECORD);
        let left = RING_BYTES - (self.cursor as usize & (RING_BYTES - 1));
        let lap = |cursor: u64| (cursor / RING_BYTES as u64) << 32;
        if left < bytes {
            let place = self.place();
            let end = self.cursor + left as u64;
            self.set_word(session::TAIL, end);
            self.set_word(place, lap(self.cursor) | 1 << 16 | (left / UNIT) as u64);
            self.cursor = end;
        }
        let place = self.place();
        let cursor = self.cursor;
        self.cursor += bytes as u64;
        self.set_word(session::TAIL, self.cursor);
        let body_len = entry.body_len.unwrap_or(entry.body.len() as u32);
        let heads = u64::from(entry.message) | u64::from(entry.slot) << 32;
        self.set_word(place + 8, heads);
        self.set_word(place + 16, u64::from(body_len) << 32);
        self.set_word(place + 24, sequence);
        for (index, byte) in entry.body.iter().enumerate() {
            self.set_byte(place + RECORD_HEADER + index, *byte);
        }
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        let units = entry.units.unwrap_or((bytes / UNIT) as u64);
        let lap = entry.lap.map_or(lap(cursor), |lap| u64::from(lap) << 32);
        self.set_word(place, lap | u64::from(entry.pad) << 16 | units);
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }
}

/// Spoils a valid entry the way somebody would who knows the grammar.
pub fn mutate(entry: &mut Entry, random: &Random) {
    for _ in 0..=random.below(3) {
        // What spoils the content comes more often than what spoils the ring, which ends the session.
        match random.below(32).saturating_sub(16) {
            0..=4 if !entry.body.is_empty() => {
                let at = random.below(entry.body.len());
                entry.body[at] = random.byte();
            }
            5..=6 if entry.body.len() >= 8 => {
                // A whole field becomes an extreme.
                let at = random.below(entry.body.len() / 8) * 8;
                let extremes = [0, 1, 2, u64::MAX, 1 << 31, 1 << 32, 1 << 38, 1 << 63];
                let value: u64 = extremes[random.below(extremes.len())];
                entry.body[at..at + 8].copy_from_slice(&value.to_le_bytes());
            }
            7 if !entry.body.is_empty() => {
                entry.body.truncate(random.below(entry.body.len()));
            }
            8 => {
                let extra = random.below(200);
                entry.body.extend((0..extra).map(|_| random.byte()));
            }
            9 => entry.message = random.below(48) as u16,
            10 => entry.slot = random.below(256) as u16,
            11 => entry.body_len = Some(random.next() as u32 >> random.below(32)),
            12 => entry.units = Some(random.below(128) as u64),
            13 => entry.lap = Some(random.below(3) as u32),
            14 => entry.pad = true,
            _ => entry.slot = random.below(4) as u16,
        }
    }
}
