//! A guest process that uses the window directly, without the guest library.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::time::{Duration, Instant};

use wormhole_api::handle::{HandleKind, Key};
use wormhole_api::{
    Decode, DevicePtr, Element, Fence, FenceWrite, Handle, MemAlloc, MemAllocReply, MemCopy,
    MemSet, Message as ApiMessage, PROTOCOL_HASH, Synchronize,
};
use wormhole_link::channel::{self, ChannelError, Incoming, Outgoing};
use wormhole_link::memory::Mapping;
use wormhole_ring::bootstrap;
use wormhole_ring::control::{ArenaRequest, ArenaRun, FEATURE_FILES, Grant, Message};
use wormhole_ring::fence::{FenceIndex, Fences};
use wormhole_ring::layout::SEGMENT_BYTES;
use wormhole_ring::memory::SessionMemory;
use wormhole_ring::ring::{Producer, PushError, RecordHead};
use wormhole_ring::slot::{AnswerSlots, SlotIndex};
use wormhole_ring::status::{Cause, Status};
use wormhole_ring::wait::{Backoff, Step};
use wormhole_ring::waits::Waits;

use crate::backend::{PATIENCE, wait_readable, wait_until};

/// Guest's end of a control stream.
pub struct Control {
    pub socket: UnixStream,
    incoming: Incoming,
    outgoing: Outgoing,
}

/// A message from the supervisor, as an owned value.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    Grant(Grant),
    Refused(u32, String),
    ArenaGrant(ArenaRun),
    ArenaDenied(u32, u32),
    /// Device, number of devices, whether more follows, facts.
    Observation(u32, u32, bool, String),
    Other(&'static str),
    Ended,
}

impl Control {
    pub fn new(socket: UnixStream) -> Self {
        Self {
            socket,
            incoming: Incoming::new(true),
            outgoing: Outgoing::default(),
        }
    }

    pub fn send(&mut self, message: &Message<'_>) -> Result<(), ChannelError> {
        self.outgoing.send(&self.socket, message, Vec::new())?;
        while self.outgoing.is_waiting() {
            channel::wait_writable(&self.socket).map_err(ChannelError::Socket)?;
            self.outgoing.flush(&self.socket)?;
        }
        Ok(())
    }

    /// Sends a message with descriptors, which guests must not send.
    pub fn send_with(
        &mut self,
        message: &Message<'_>,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), ChannelError> {
        self.outgoing.send(&self.socket, message, descriptors)
    }

    /// Writes raw bytes.
    pub fn send_raw(&mut self, bytes: &[u8]) {
        use std::io::Write;
        self.socket.write_all(bytes).unwrap();
    }

    pub fn hello(&mut self, hash: u64, environment: &str) {
        self.send(&Message::Hello {
            bootstrap_version: bootstrap::VERSION,
            protocol_hash: hash,
            features: 0,
            environment,
        })
        .unwrap();
    }

    pub fn receive(&mut self) -> Reply {
        let end = Instant::now() + PATIENCE;
        loop {
            match self.incoming.take() {
                Ok(Some(message)) => {
                    return match message {
                        Message::Grant(grant) => Reply::Grant(grant),
                        Message::Refused { code, reason } => {
                            Reply::Refused(code, reason.to_owned())
                        }
                        Message::ArenaGrant(run) => Reply::ArenaGrant(run),
                        Message::ArenaDenied(denied) => Reply::ArenaDenied(denied.id, denied.code),
                        Message::Observation {
                            device,
                            devices,
                            more,
                            facts,
                        } => Reply::Observation(device, devices, more != 0, facts.to_owned()),
                        other => Reply::Other(other.name()),
                    };
                }
                Ok(None) => {
                    wait_readable(&self.socket, end);
                    self.incoming.fill(&self.socket).unwrap();
                }
                Err(ChannelError::Ended | ChannelError::Cut) => return Reply::Ended,
                Err(error) => panic!("{error}"),
            }
        }
    }

    pub fn descriptor(&mut self) -> Option<OwnedFd> {
        self.incoming.descriptor()
    }

    /// Sends the hello and maps the granted session.
    pub fn open(self) -> Guest {
        self.open_with(PROTOCOL_HASH)
    }

    pub fn open_with(self, hash: u64) -> Guest {
        self.open_in(hash, "")
    }

    pub fn open_in(mut self, hash: u64, environment: &str) -> Guest {
        self.hello(hash, environment);
        self.map().0
    }

    /// Opens a session of a guest VM that has a static window mapped.
    pub fn open_in_window(mut self, window: OwnedFd) -> Guest {
        self.hello(PROTOCOL_HASH, "");
        self.map_shown(window)
    }

    /// Maps the session that is granted to a process of a guest VM after a hello. The file has the session's memory.
    pub fn map_shown(mut self, file: OwnedFd) -> Guest {
        let grant = match self.receive() {
            Reply::Grant(grant) => grant,
            other => panic!("no grant but {other:?}"),
        };
        assert!(self.descriptor().is_none(), "the grant has no descriptor");
        self.send(&Message::Mapped).unwrap();
        Guest::new(self, grant, file)
    }

    /// Opens a session with a socket on which the guest sends file descriptors.
    pub fn open_with_files(self) -> (Guest, UnixDatagram) {
        self.open_with_files_of(PROTOCOL_HASH)
    }

    /// Same as [`open_with_files`](Self::open_with_files), with a worker of this protocol.
    pub fn open_with_files_of(mut self, hash: u64) -> (Guest, UnixDatagram) {
        self.send(&Message::Hello {
            bootstrap_version: bootstrap::VERSION,
            protocol_hash: hash,
            features: FEATURE_FILES,
            environment: "",
        })
        .unwrap();
        let (guest, socket) = self.map();
        (guest, socket.expect("the socket for files").into())
    }

    /// Maps the session that is granted after a hello. Returns the socket for files too, if the hello wanted one.
    pub fn map(mut self) -> (Guest, Option<OwnedFd>) {
        let grant = match self.receive() {
            Reply::Grant(grant) => grant,
            other => panic!("no grant but {other:?}"),
        };
        let file = self
            .descriptor()
            .expect("the session's file comes with the grant");
        let further = self.descriptor();
        self.send(&Message::Mapped).unwrap();
        (Guest::new(self, grant, file), further)
    }
}

/// Memory of a session.
pub struct Memory(File);

impl Memory {
    /// Returns the bytes allocated to it.
    pub fn held(&self) -> u64 {
        use std::os::unix::fs::MetadataExt;
        self.0.metadata().unwrap().blocks() * 512
    }

    /// Waits until no memory is allocated to it.
    pub fn wait_until_scrubbed(&self) {
        wait_until(
            || self.held() == 0,
            || "the session's memory to be given back".into(),
        );
    }
}

/// A run of arena, mapped in this process at any address.
pub struct Extent {
    pub run: ArenaRun,
    /// Address of the run for the worker and the device.
    pub address: u64,
    mapping: Mapping,
}

impl Extent {
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.mapping.bytes());
        // SAFETY: inside the mapping; the test reads what it wrote after a synchronization.
        unsafe {
            std::ptr::copy_nonoverlapping(
                bytes.as_ptr(),
                self.mapping.base().add(offset),
                bytes.len(),
            );
        }
    }

    pub fn read(&self, offset: usize, length: usize) -> Vec<u8> {
        assert!(offset + length <= self.mapping.bytes());
        let mut bytes = vec![0; length];
        // SAFETY: as in `write`.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.mapping.base().add(offset),
                bytes.as_mut_ptr(),
                length,
            );
        }
        bytes
    }

    pub fn bytes(&self) -> u64 {
        self.mapping.bytes() as u64
    }
}

/// Answer to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub status: u32,
    pub payload: Vec<u8>,
}

/// A session, from the guest's side.
pub struct Guest {
    pub control: Control,
    pub grant: Grant,
    pub producer: Producer,
    pub slots: AnswerSlots,
    pub fences: Fences,
    pub status: Status,
    pub waits: Waits,
    pub arena: Vec<Extent>,
    file: OwnedFd,
    sequences: Vec<u64>,
    next_index: u32,
    /// Start of the session segment, for raw writes.
    pub segment: *mut u8,
    // Dropped last.
    _mapping: Mapping,
}

// SAFETY: the pointer names shared memory that `_mapping` keeps; it is used through volatile accesses.
unsafe impl Send for Guest {}

impl Guest {
    pub fn new(control: Control, grant: Grant, file: OwnedFd) -> Self {
        let offset = u64::from(grant.session_segment) * SEGMENT_BYTES as u64;
        let mapping = Mapping::new(&file, offset, SEGMENT_BYTES).unwrap();
        // SAFETY: the mapping lives as long as the guest; this process accesses it through the
        // crate, except for tests that corrupt it on purpose.
        let memory = unsafe { SessionMemory::new(mapping.base(), mapping.bytes()) }.unwrap();
        // SAFETY: the consumer lives in the worker; one thread of the test polls a slot.
        let (producer, slots) = unsafe {
            (
                Producer::new(memory.clone()),
                AnswerSlots::new(memory.clone()),
            )
        };
        let mut guest = Self {
            control,
            grant,
            producer,
            slots,
            fences: Fences::new(memory.clone()),
            status: Status::new(memory.clone()),
            waits: Waits::new(memory),
            arena: Vec::new(),
            file,
            sequences: vec![0; 128],
            next_index: 0,
            segment: mapping.base(),
            _mapping: mapping,
        };
        if grant.arena_count > 0 {
            guest.map_arena(ArenaRun {
                id: 0,
                first: grant.arena_first,
                count: grant.arena_count,
            });
        }
        guest
    }

    pub fn map_arena(&mut self, run: ArenaRun) {
        let offset = u64::from(run.first) * SEGMENT_BYTES as u64;
        let bytes = run.count as usize * SEGMENT_BYTES;
        self.arena.push(Extent {
            run,
            address: self.grant.window_base + offset,
            mapping: Mapping::new(&self.file, offset, bytes).unwrap(),
        });
    }

    /// Copies bytes through the first extent to the device and back, and compares them. Returns the device memory.
    pub fn round_trip(&mut self, bytes: &[u8]) -> DevicePtr {
        let length = bytes.len() as u64;
        let device = self.call(&MemAlloc { bytes: length });
        let device = device.reply::<MemAllocReply>().address;
        self.arena[0].write(0, bytes);
        let arena = DevicePtr(self.arena[0].address);
        let back = DevicePtr(self.arena[0].address + length);
        for (destination, source) in [(device, arena), (back, device)] {
            self.record(&MemCopy {
                destination,
                source,
                bytes: length,
                stream: Handle::LEGACY,
            });
        }
        assert_eq!(self.call(&Synchronize { stream: None }).status, 0);
        assert_eq!(self.arena[0].read(bytes.len(), bytes.len()), bytes);
        device
    }

    pub fn request_arena(&mut self, id: u32, segments: u32) -> Reply {
        self.control
            .send(&Message::ArenaRequest(ArenaRequest { id, segments }))
            .unwrap();
        self.control.receive()
    }

    /// Requests one more segment of arena, and returns its address for the worker and the device.
    pub fn more_arena(&mut self) -> u64 {
        self.next_index += 1;
        match self.request_arena(self.next_index, 1) {
            Reply::ArenaGrant(run) => self.map_arena(run),
            other => panic!("no arena: {other:?}"),
        }
        self.arena.last().expect("just mapped").address
    }

    /// Mints a handle that was not used before.
    pub fn mint<K: HandleKind>(&mut self) -> Handle<K> {
        self.next_index += 1;
        Handle::new(Key {
            index: self.next_index,
            generation: 1,
        })
        .unwrap()
    }

    /// Pushes a record: waits for room, and rings the doorbell as a frontend does.
    pub fn push(&mut self, head: RecordHead, parts: &[&[u8]]) {
        let end = Instant::now() + PATIENCE;
        loop {
            match self.producer.push(head, parts) {
                Ok(()) => break,
                Err(PushError::Full { .. }) => {
                    assert!(Instant::now() < end, "the ring stays full");
                    std::thread::yield_now();
                }
                Err(error) => panic!("{error}"),
            }
        }
        if self.producer.consumer_parked() {
            let _ = self.control.send(&Message::Doorbell);
        }
    }

    /// Sends a record.
    pub fn record<M: ApiMessage>(&mut self, message: &M) {
        message
            .encode(|parts| self.push(RecordHead::record(M::ID), parts))
            .unwrap();
    }

    /// Sends a request on `slot` without waiting, and returns its sequence number.
    pub fn start<M: ApiMessage>(&mut self, slot: u16, message: &M) -> u64 {
        message
            .encode(|parts| self.start_raw(slot, M::ID, parts))
            .unwrap()
    }

    pub fn start_raw(&mut self, slot: u16, id: u16, parts: &[&[u8]]) -> u64 {
        self.start_on(0, slot, id, parts)
    }

    fn start_on(&mut self, device: u16, slot: u16, id: u16, parts: &[&[u8]]) -> u64 {
        let sequence = self.next_sequence(slot);
        let index = SlotIndex::new(slot).unwrap();
        let head = RecordHead::request(id, index, sequence).on(device);
        self.push(head, parts);
        sequence
    }

    /// Sends a request for a device and waits for its answer.
    pub fn call_on<M: ApiMessage>(&mut self, device: u16, message: &M) -> Answer {
        let sequence = message.encode(|parts| self.start_on(device, 0, M::ID, parts));
        self.wait(0, sequence.unwrap())
            .unwrap_or_else(|cause| panic!("the session ended: {cause:?}"))
    }

    pub fn next_sequence(&mut self, slot: u16) -> u64 {
        let sequence = &mut self.sequences[usize::from(slot)];
        *sequence += 1;
        *sequence
    }

    /// Waits for the answer, or for the cause of the session's end.
    pub fn wait(&self, slot: u16, sequence: u64) -> Result<Answer, Cause> {
        self.wait_at_most(slot, sequence, PATIENCE)
    }

    pub fn wait_at_most(
        &self,
        slot: u16,
        sequence: u64,
        patience: Duration,
    ) -> Result<Answer, Cause> {
        let slot = SlotIndex::new(slot).unwrap();
        let end = Instant::now() + patience;
        let mut backoff = Backoff::new();
        loop {
            if let Some(answer) = self.slots.poll(slot, sequence).unwrap() {
                let mut payload = vec![0; answer.length];
                self.slots.copy_payload(slot, 0, &mut payload);
                return Ok(Answer {
                    status: answer.status,
                    payload,
                });
            }
            if let Some(cause) = self.status.load() {
                return Err(cause);
            }
            assert!(Instant::now() < end, "waited in vain for an answer");
            // Yielding for ever takes the processor from the workers that answer.
            match backoff.step() {
                Step::Spun => {}
                Step::Yield => std::thread::yield_now(),
                Step::Sleep(time) => std::thread::sleep(time),
            }
        }
    }

    /// Returns the session's memory, which can be inspected after the session.
    pub fn memory(&self) -> Memory {
        Memory(self.file.try_clone().unwrap().into())
    }

    /// Sends a request and waits for its answer.
    pub fn call<M: ApiMessage>(&mut self, message: &M) -> Answer {
        let sequence = self.start(0, message);
        self.wait(0, sequence)
            .unwrap_or_else(|cause| panic!("the session ended: {cause:?}"))
    }

    pub fn call_raw(&mut self, id: u16, body: &[u8]) -> Result<Answer, Cause> {
        let sequence = self.start_raw(0, id, &[body]);
        self.wait(0, sequence)
    }

    /// Waits until the status word contains the cause of the session's end.
    pub fn wait_for_status(&self) -> Cause {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(cause) = self.status.load() {
                return cause;
            }
            assert!(Instant::now() < end, "the status word stays empty");
            std::thread::yield_now();
        }
    }

    /// Sets words of the device's memory, in the legacy stream.
    pub fn fill(&mut self, destination: DevicePtr, words: u64, value: u32) {
        self.record(&MemSet {
            destination,
            pitch: 0,
            width: words,
            height: 1,
            value,
            element: Element::Word,
            stream: Handle::LEGACY,
        });
    }

    /// Waits for all earlier work of the legacy stream, by a fence that tests use for nothing else.
    pub fn finish(&mut self) {
        const FENCE: u32 = 5;
        let value = 1 + self.fences.load(FenceIndex::new(FENCE).unwrap());
        self.record(&FenceWrite {
            stream: Handle::LEGACY,
            fence: Fence::new(FENCE).unwrap(),
            value,
        });
        self.wait_for_fence(FENCE, value);
    }

    pub fn wait_for_fence(&self, index: u32, value: u64) {
        let fence = FenceIndex::new(index).unwrap();
        let end = Instant::now() + PATIENCE;
        while self.fences.load(fence) < value {
            assert!(Instant::now() < end, "the fence is not written");
            std::thread::yield_now();
        }
    }
}

impl Answer {
    /// Decodes the reply of a call that must succeed.
    pub fn reply<'a, R: Decode<'a>>(&'a self) -> R {
        assert_eq!(self.status, 0, "the call failed");
        R::decode(&self.payload).unwrap()
    }
}
