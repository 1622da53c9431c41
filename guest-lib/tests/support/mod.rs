//! Backend inside the test process. It records the library's messages and answers them.

#![allow(dead_code, reason = "each test uses its part")]

pub mod calls;
mod managed;

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use vmm_sys_util::sock_ctrl_msg::ScmSocket;
use wormhole_api::constants::kernel_flags::PRINTS;
use wormhole_api::{
    AddressReserveReply, Attribute, ContextGetLimitReply, CuResult, DeviceDescribeReply, Encode,
    EventElapsedReply, Items, LibraryGetKernelReply, LibraryLoadReply, LinkInput, LinkReply,
    ManagedRefreshReply, MemAllocReply, MemGetInfoReply, MemGranularityReply,
    ModuleGetFunctionReply, ModuleGetGlobalReply, ModuleLoadReply, PROTOCOL_HASH, Parameter,
    PoolAllocReply, Request, ShareAddressReply, SlabAllocReply, SynchronizeReply, TakeOutputReply,
    decode,
};
use wormhole_lock::Mutex;
use wormhole_ring::bootstrap::Bootstrap;
use wormhole_ring::control::{
    ArenaDenied, ArenaRun, Band, Grant, HEADER_BYTES, Header, Message, Refusal,
};
use wormhole_ring::fence::{FenceIndex, Fences};
use wormhole_ring::layout::{APERTURE_HIGH, APERTURE_LOW, HANDLE_BASE, SEGMENT_BYTES, WINDOW_BASE};
use wormhole_ring::memory::{SessionMemory, WindowMemory};
use wormhole_ring::ring::{Consumer, RecordBuf, RecordHead};
use wormhole_ring::slot::AnswerSlots;
use wormhole_ring::status::{EndCause, Status};

const SEGMENTS: usize = 64;
const SESSION: usize = 1;
/// Size of the window in bytes.
pub const WINDOW_BYTES: usize = SEGMENTS * SEGMENT_BYTES;
/// Size of the device's only allocation, which every allocation returns.
pub const DEVICE_BYTES: usize = 4 << 20;
/// Free memory of the device, and all of it, as it says.
pub const FREE_BYTES: usize = 1 << 20;
pub const TOTAL_BYTES: usize = 1 << 30;
/// Unit of mappings and reserved addresses.
pub const GRANULE: u64 = 2 << 20;

/// Log of the backend's input, and settings of its behaviour.
#[derive(Debug, Default)]
pub struct Shared {
    /// Names of messages in order; requests end with a question mark.
    log: Mutex<Vec<String>>,
    /// Requests and returns of arena, in segments.
    arena: Mutex<Vec<String>>,
    /// If true, `FenceWrite` has no effect, as if the device made no progress.
    pub holds_fences: AtomicBool,
    /// If true, fences are written only after a pause in the ring's input, as by a slow device.
    pub lags: AtomicBool,
    /// If true, requests for arena are not answered.
    pub holds_arena: AtomicBool,
    /// Flags in the answers to `ModuleLoad`.
    pub image_flags: AtomicU32,
    /// Error of launches that fail asynchronously, or 0. The context is dead before the next request is executed or
    /// fence written; those themselves succeed.
    pub fails_launches: AtomicU32,
    /// If true, the device has no memory for another allocation, image, function, variable, mirror or executable graph, and
    /// as long as there are mirrors, for no launch and managed memory.
    pub lacks_memory: AtomicBool,
    /// Number of requests that found no memory.
    pub refused: AtomicU64,
    /// If true, requests to release mappable memory are not answered yet.
    pub holds_releases: AtomicBool,
    /// If true, the device says that it has work.
    pub is_busy: AtomicBool,
    /// Greatest number of launches under way at the same time.
    pub most_launches: AtomicU64,
}

impl Shared {
    fn note_arena(&self, text: String) {
        let mut arena = self.arena.lock();
        arena.push(text);
    }

    /// Returns the log of arena messages once it has `count` entries.
    pub fn arena(&self, count: usize) -> Vec<String> {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let arena = self.arena.lock();
            if arena.len() >= count {
                return arena.clone();
            }
            assert!(Instant::now() < deadline, "{arena:?}");
            drop(arena);
            std::thread::yield_now();
        }
    }

    /// Returns the messages since the last call.
    pub fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.log.lock())
    }
}

/// Returns whether a test of memory whose accesses are blocked is skipped, and says so on standard error: this process may
/// not hold off writers of memory by userfaultfd.
pub fn is_skipped(is_supported: bool) -> bool {
    let is_root = rustix::process::geteuid().is_root();
    let open = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd");
    let may = is_root || open.is_ok_and(|text| text.trim() == "1");
    assert!(is_supported || !may, "writers cannot be held off");
    if !is_supported {
        eprintln!("skipped: this process may not block accesses to its memory");
    }
    !is_supported
}

/// Backend of one process.
pub struct Backend {
    pub shared: Arc<Shared>,
    base: usize,
    control: Arc<Mutex<Option<UnixStream>>>,
}

impl Backend {
    /// Starts a backend, and makes the library of this process connect to it.
    pub fn start() -> Self {
        Self::start_with(true)
    }

    /// Starts a backend as for a VM, where the library opens the window itself.
    pub fn start_in_vm() -> Self {
        Self::start_with(false)
    }

    fn start_with(passes_window: bool) -> Self {
        let name = format!("wormhole-guest-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).expect("a short name");
        let listener = UnixListener::bind_addr(&address).expect("a name of our own");
        // SAFETY: nothing else in this process reads or writes the environment.
        unsafe { std::env::set_var("WORMHOLE_CONTROL", format!("unix:@{name}")) };
        let window = window();
        if !passes_window {
            let path = format!("/proc/self/fd/{}", window.as_raw_fd());
            // SAFETY: as above.
            unsafe { std::env::set_var("WORMHOLE_WINDOW", path) };
        }
        let base = map(&window);
        write_bootstrap(base);
        let shared = Arc::new(Shared::default());
        let control = Arc::new(Mutex::new(None));
        let (log, asked, place) = (
            Arc::clone(&shared),
            Arc::clone(&shared),
            Arc::clone(&control),
        );
        std::thread::spawn(move || {
            let (connection, _) = listener.accept().expect("the library connects");
            let (stream, library) = UnixStream::pair().expect("sockets");
            connection
                .send_with_fd(&[0][..], library.as_raw_fd())
                .expect("the library listens");
            drop((connection, library));
            *place.lock() = Some(stream.try_clone().expect("a descriptor"));
            grant(&stream, passes_window.then_some(&window));
            let memory = session(base);
            std::thread::spawn(move || Executor::new(base, memory, log).run());
            serve_arena(stream, &asked);
            drop(window);
        });
        Self {
            shared,
            base,
            control,
        }
    }

    /// Kills the device's context.
    pub fn fail(&self, error: CuResult) {
        Status::new(session(self.base)).set_once(error.0, EndCause::ContextDead);
    }

    /// Closes the control connection, as a supervisor that exits.
    pub fn disappear(&self) {
        let stream = self
            .control
            .lock()
            .take()
            .expect("the library has connected");
        stream
            .shutdown(std::net::Shutdown::Both)
            .expect("an open stream");
    }

    pub fn local_calls(&self) -> u64 {
        Status::new(session(self.base)).local_calls()
    }
}

fn window() -> File {
    // SAFETY: the name is a string; the descriptor has no other owner.
    let file =
        unsafe { File::from_raw_fd(libc::memfd_create(c"window".as_ptr(), libc::MFD_CLOEXEC)) };
    file.set_len(WINDOW_BYTES as u64).expect("memory");
    file
}

/// Maps the window for the backend. The library maps it at another address.
fn map(window: &File) -> usize {
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            WINDOW_BYTES,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            window.as_raw_fd(),
            0,
        )
    };
    assert_ne!(address, libc::MAP_FAILED);
    address.expose_provenance()
}

fn write_bootstrap(base: usize) {
    let start = std::ptr::with_exposed_provenance_mut(base);
    // SAFETY: the window is mapped there until the process ends.
    let memory = unsafe { WindowMemory::new(start, SEGMENT_BYTES) }.expect("an aligned segment");
    Bootstrap::for_window((SEGMENTS * SEGMENT_BYTES) as u64)
        .write(&memory)
        .expect("a window");
}

fn session(base: usize) -> SessionMemory {
    let start = std::ptr::with_exposed_provenance_mut(base + SESSION * SEGMENT_BYTES);
    // SAFETY: the window is mapped there until the process ends.
    unsafe { SessionMemory::new(start, SEGMENT_BYTES) }.expect("an aligned segment")
}

fn receive(mut stream: &UnixStream) -> Option<(u16, Vec<u8>)> {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header).ok()?;
    let header = Header::decode(&header).expect("a header");
    let mut body = vec![0; header.body_len];
    stream.read_exact(&mut body).ok()?;
    Some((header.kind, body))
}

fn grant(mut stream: &UnixStream, window: Option<&File>) {
    let (kind, body) = receive(stream).expect("the library says hello");
    let hello = Message::decode(kind, &body).expect("a message");
    assert!(
        matches!(
            hello,
            Message::Hello {
                protocol_hash: PROTOCOL_HASH,
                ..
            }
        ),
        "{hello:?}"
    );
    let band = |(base, size)| Band { base, size };
    let grant = Message::Grant(Grant {
        session: 0,
        generation: 1,
        session_segment: u32::try_from(SESSION).expect("small"),
        arena_first: 2,
        arena_count: 1,
        reserved: 0,
        window_base: WINDOW_BASE,
        window_size: WINDOW_BYTES as u64,
        handle_base: HANDLE_BASE,
        apertures: [band(APERTURE_HIGH), band(APERTURE_LOW)],
        protocol_hash: PROTOCOL_HASH,
        features: 0,
    });
    let frame = grant.to_vec().expect("a short message");
    match window {
        Some(window) => drop(
            stream
                .send_with_fd(&frame[..], window.as_raw_fd())
                .expect("the library listens"),
        ),
        None => stream.write_all(&frame).expect("the library listens"),
    }
    let (kind, _) = receive(stream).expect("the library answers");
    assert_eq!(kind, Message::Mapped.kind());
}

/// Grants arena by first fit, takes back returned arena, and records both.
fn serve_arena(mut stream: UnixStream, shared: &Shared) {
    // The session segment and its first arena come first.
    let mut free = [true; SEGMENTS];
    free[..3].fill(false);
    while let Some((kind, body)) = receive(&stream) {
        match Message::decode(kind, &body).expect("a message") {
            Message::ArenaRequest(request) => {
                let count = request.segments as usize;
                if shared.holds_arena.load(Ordering::Acquire) {
                    shared.note_arena(format!("ask {count}"));
                    continue;
                }
                let place = free
                    .windows(count)
                    .position(|run| run.iter().all(|free| *free));
                let answer = match place {
                    Some(first) => {
                        free[first..first + count].fill(false);
                        Message::ArenaGrant(ArenaRun {
                            id: request.id,
                            first: u32::try_from(first).expect("small"),
                            count: request.segments,
                        })
                    }
                    None => Message::ArenaDenied(ArenaDenied {
                        id: request.id,
                        code: Refusal::WindowFull as u32,
                        limit: free.len() as u64 * SEGMENT_BYTES as u64,
                    }),
                };
                shared.note_arena(format!("ask {count}"));
                let frame = answer.to_vec().expect("a short message");
                stream.write_all(&frame).expect("the library listens");
            }
            Message::ArenaReturn(run) => {
                let range = run.first as usize..(run.first + run.count) as usize;
                assert!(free[range.clone()].iter().all(|free| !free), "{run:?}");
                free[range].fill(true);
                shared.note_arena(format!("return {}", run.count));
            }
            _ => {}
        }
    }
}

/// Consumer of the ring that simulates a device with a little memory.
struct Executor {
    status: Status,
    /// True once a launch has failed asynchronously.
    has_failed: bool,
    base: usize,
    consumer: Consumer,
    slots: AnswerSlots,
    fences: Fences,
    device: Vec<u8>,
    /// End of the addresses that are reserved.
    reserved: u64,
    managed: managed::Managed,
    /// Requests that free managed memory or its mirror. They wait for the device, as the driver does.
    frees: Vec<(RecordHead, managed::Free)>,
    shared: Arc<Shared>,
    /// Fences that a slow device has not written yet.
    late: Vec<(FenceIndex, u64)>,
    launches: u64,
    /// Requests that are not answered yet.
    held: Vec<RecordHead>,
    /// Number of empty polls since the last record.
    idle: u32,
}

/// Number of empty polls after which a slow device completes its work.
const WHILE: u32 = 10_000;

impl Executor {
    fn new(base: usize, memory: SessionMemory, shared: Arc<Shared>) -> Self {
        Self {
            base,
            // SAFETY: the only consumer, and the only side that publishes.
            consumer: unsafe { Consumer::new(memory.clone()) },
            // SAFETY: as above.
            slots: unsafe { AnswerSlots::new(memory.clone()) },
            fences: Fences::new(memory.clone()),
            status: Status::new(memory),
            has_failed: false,
            device: vec![0; DEVICE_BYTES],
            reserved: APERTURE_LOW.0,
            managed: managed::Managed::new(base),
            frees: Vec::new(),
            shared,
            late: Vec::new(),
            launches: 0,
            held: Vec::new(),
            idle: 0,
        }
    }

    fn run(mut self) {
        let mut buffer = RecordBuf::new();
        loop {
            match self
                .consumer
                .take(&mut buffer)
                .expect("the library keeps the ring's rules")
            {
                Some(head) => {
                    let request =
                        decode(head.message, buffer.body()).expect("the library encodes well");
                    let mark = if head.slot.is_some() { "?" } else { "" };
                    let name = format!("{}{mark}", request.info().name);
                    self.shared.log.lock().push(name);
                    self.idle = 0;
                    self.execute(head, &request);
                }
                None => {
                    if !self.shared.holds_releases.load(Ordering::Acquire) {
                        for head in std::mem::take(&mut self.held) {
                            self.answer(head, &());
                        }
                    }
                    self.free();
                    self.idle += 1;
                    if self.idle > WHILE {
                        self.finish();
                    }
                    std::thread::yield_now();
                }
            }
        }
    }

    /// Frees what waits for the device, if it is idle.
    fn free(&mut self) {
        if self.shared.is_busy.load(Ordering::Acquire) {
            return;
        }
        for (head, free) in std::mem::take(&mut self.frees) {
            self.managed.free(free);
            self.answer(head, &());
        }
    }

    /// Returns whether a request finds no memory of the device.
    fn lacks_memory_for(&self, request: &Request<'_>) -> bool {
        let takes_memory = match request {
            Request::LaunchKernel(_) => self.managed.has_mirrors(),
            Request::GraphInstantiate(_)
            | Request::MemAlloc(_)
            | Request::MemCreate(_)
            | Request::ModuleLoad(_)
            | Request::ModuleGetFunction(_)
            | Request::ModuleGetGlobal(_) => true,
            _ => false,
        };
        takes_memory && self.shared.lacks_memory.load(Ordering::Acquire)
    }

    /// Kills the context if a launch has failed.
    fn show_failure(&self) {
        if self.has_failed {
            let error = self.shared.fails_launches.load(Ordering::Acquire);
            self.status.set_once(error, EndCause::ContextDead);
        }
    }

    /// Completes all work so far.
    fn finish(&mut self) {
        if !self.late.is_empty() {
            self.show_failure();
        }
        self.idle = 0;
        self.launches = 0;
        for (fence, value) in self.late.drain(..) {
            self.fences.store(fence, value);
        }
    }

    fn execute(&mut self, head: RecordHead, request: &Request<'_>) {
        if head.slot.is_some() {
            self.show_failure();
        }
        if let Some(free) = managed::Free::of(request)
            && self.shared.is_busy.load(Ordering::Acquire)
        {
            self.frees.push((head, free));
            return;
        }
        if let Some(result) = self.managed.execute(request, &self.shared) {
            if let Some(slot) = head.slot {
                self.slots
                    .publish(slot, head.sequence, result.0, &[])
                    .expect("it fits");
            }
            return;
        }
        match request {
            Request::ManagedRefresh(message) => {
                let current = self.managed.refresh(message).into();
                self.answer(head, &ManagedRefreshReply { current });
            }
            Request::DeviceDescribe(_) => {
                let attributes = [
                    (1, 1024),
                    (2, 1024),
                    (3, 1024),
                    (4, 64),
                    (5, 65535),
                    (6, 65535),
                    (7, 65535),
                    (8, 49152),
                    (12, 65536),
                    (99, 1),
                    (125, 1),
                ];
                let attributes = attributes.map(|(id, value)| Attribute { id, value });
                self.answer(
                    head,
                    &DeviceDescribeReply {
                        devices: 1,
                        driver_version: 13000,
                        total_memory: DEVICE_BYTES as u64,
                        uuid: [1; 16],
                        least_priority: 0,
                        greatest_priority: -5,
                        name: b"pretended",
                        attributes: Items::new(&attributes),
                    },
                );
            }
            _ if head.slot.is_some() && self.lacks_memory_for(request) => {
                let (slot, code) = (head.slot.expect("as above"), CuResult::OUT_OF_MEMORY.0);
                self.slots
                    .publish(slot, head.sequence, code, &[])
                    .expect("it fits");
                self.shared.refused.fetch_add(1, Ordering::Release);
            }
            Request::MemRelease(_) if self.shared.holds_releases.load(Ordering::Acquire) => {
                self.held.push(head);
            }
            Request::MemAlloc(_) => self.answer(
                head,
                &MemAllocReply {
                    address: wormhole_api::DevicePtr(APERTURE_HIGH.0),
                },
            ),
            Request::MemGranularity(_) => self.answer(
                head,
                &MemGranularityReply {
                    minimum: GRANULE,
                    recommended: GRANULE,
                },
            ),
            Request::AddressReserve(wanted) => {
                let start = self
                    .reserved
                    .next_multiple_of(wanted.alignment.max(GRANULE));
                self.reserved = start + wanted.bytes;
                let address = wormhole_api::DevicePtr(start);
                self.answer(head, &AddressReserveReply { address });
            }
            Request::PoolAlloc(_) => self.answer(
                head,
                &PoolAllocReply {
                    address: wormhole_api::DevicePtr(APERTURE_HIGH.0),
                },
            ),
            Request::ShareAddress(_) => self.answer(head, &ShareAddressReply { token: [7; 16] }),
            Request::SlabAlloc(_) => self.answer(
                head,
                &SlabAllocReply {
                    // The second half of the device's memory.
                    address: wormhole_api::DevicePtr(APERTURE_HIGH.0 + (DEVICE_BYTES / 2) as u64),
                },
            ),
            Request::ModuleLoad(_) => self.answer(
                head,
                &ModuleLoadReply {
                    flags: self.shared.image_flags.load(Ordering::Acquire),
                    managed: 0,
                },
            ),
            Request::ModuleGetGlobal(_) => self.answer(
                head,
                &ModuleGetGlobalReply {
                    address: wormhole_api::DevicePtr(APERTURE_HIGH.0),
                    bytes: 4,
                },
            ),
            Request::ModuleGetFunction(message) => self.answer(
                head,
                &ModuleGetFunctionReply {
                    flags: if message.name == b"talk" { PRINTS } else { 0 },
                    parameters: Items::new(&[Parameter { offset: 0, size: 4 }]),
                    // The register count allows no larger blocks.
                    attributes: Items::new(&[
                        Attribute { id: 0, value: 256 },
                        Attribute { id: 4, value: 250 },
                    ]),
                },
            ),
            Request::Link(link) => {
                // The linked image is eight copies of the inputs and their names.
                let length = |part: LinkInput| u64::from(part.name) + part.bytes;
                let bytes = u64::from(link.complete) * link.parts.iter().map(length).sum::<u64>();
                if 8 * bytes <= link.room {
                    for copy in 0..8 {
                        let place = |address: u64| usize::try_from(address).expect("64 bits");
                        let from = std::ptr::with_exposed_provenance::<u8>(place(link.inputs.0));
                        let to = place(link.image.0 + copy * bytes);
                        let to = std::ptr::with_exposed_provenance_mut::<u8>(to);
                        // SAFETY: both lie in arena that the waiting library does not access.
                        unsafe { to.copy_from_nonoverlapping(from, place(bytes)) };
                    }
                }
                self.answer(head, &LinkReply { bytes: 8 * bytes });
            }
            Request::LibraryLoad(_) => self.answer(
                head,
                &LibraryLoadReply {
                    flags: 0,
                    managed: 0,
                },
            ),
            Request::LibraryGetKernel(_) => self.answer(
                head,
                &LibraryGetKernelReply {
                    flags: 0,
                    parameters: Items::new(&[Parameter { offset: 0, size: 4 }]),
                    attributes: Items::new(&[Attribute { id: 0, value: 256 }]),
                },
            ),
            Request::FenceWrite(message) if !self.shared.holds_fences.load(Ordering::Acquire) => {
                let fence = FenceIndex::new(message.fence.index()).expect("decoded");
                self.late.push((fence, message.value));
                if !self.shared.lags.load(Ordering::Acquire) {
                    self.finish();
                }
            }
            Request::EventRecord(message) => {
                if let Some(fence) = message.fence {
                    let fence = FenceIndex::new(fence.index()).expect("decoded");
                    self.late.push((fence, message.value));
                }
            }
            Request::LaunchKernel(_) => {
                self.launches += 1;
                self.shared
                    .most_launches
                    .fetch_max(self.launches, Ordering::AcqRel);
                match head.slot {
                    Some(_) => self.answer(head, &()),
                    None => {
                        self.has_failed |= self.shared.fails_launches.load(Ordering::Acquire) != 0
                    }
                }
            }
            Request::MemWrite(message) => {
                let start = device_offset(message.destination.0).expect("a device address");
                self.device[start..start + message.data.len()].copy_from_slice(message.data);
            }
            Request::MemCopy(message) => {
                let bytes = usize::try_from(message.bytes).expect("small");
                let mut data = vec![0; bytes];
                match device_offset(message.source.0) {
                    Some(start) => data.copy_from_slice(&self.device[start..start + bytes]),
                    // SAFETY: the library names arena memory, which is mapped here too.
                    None => unsafe {
                        data.as_mut_ptr()
                            .copy_from_nonoverlapping(self.arena(message.source.0), bytes)
                    },
                }
                match device_offset(message.destination.0) {
                    Some(start) => self.device[start..start + bytes].copy_from_slice(&data),
                    // SAFETY: as above.
                    None => unsafe {
                        self.arena(message.destination.0)
                            .copy_from_nonoverlapping(data.as_ptr(), bytes)
                    },
                }
            }
            Request::Synchronize(_) => self.answer(
                head,
                &SynchronizeReply {
                    remaining: 0,
                    stdout: b"",
                    stderr: b"",
                },
            ),
            Request::TakeOutput(_) => self.answer(
                head,
                &TakeOutputReply {
                    remaining: 0,
                    stdout: b"",
                    stderr: b"",
                },
            ),
            Request::EventElapsed(_) => self.answer(head, &EventElapsedReply { milliseconds: 1.0 }),
            Request::ContextGetLimit(_) => self.answer(head, &ContextGetLimitReply { value: 1 }),
            Request::MemGetInfo(_) => self.answer(
                head,
                &MemGetInfoReply {
                    free: FREE_BYTES as u64,
                    total: TOTAL_BYTES as u64,
                },
            ),
            _ if head.slot.is_some() => self.answer(head, &()),
            _ => {}
        }
    }

    fn arena(&self, address: u64) -> *mut u8 {
        let offset = usize::try_from(address - WINDOW_BASE).expect("small");
        assert!(
            offset < WINDOW_BYTES,
            "{address:#x} lies outside the window"
        );
        std::ptr::with_exposed_provenance_mut(self.base + offset)
    }

    fn answer(&self, head: RecordHead, reply: &impl Encode) {
        let slot = head.slot.expect("this message is a request");
        reply
            .encode(|parts| {
                self.slots
                    .publish(slot, head.sequence, 0, parts)
                    .expect("it fits")
            })
            .expect("it encodes");
    }
}

fn device_offset(address: u64) -> Option<usize> {
    let offset = usize::try_from(address.checked_sub(APERTURE_HIGH.0)?).ok()?;
    (offset < DEVICE_BYTES).then_some(offset)
}

/// Runs a scenario in a forked process, because the library has one session per process.
pub fn in_process(scenario: impl FnOnce() + std::panic::UnwindSafe) {
    // SAFETY: the child runs the scenario and ends without the parent's handlers.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let passed = std::panic::catch_unwind(scenario).is_ok();
        // SAFETY: as above.
        unsafe { libc::_exit(i32::from(!passed)) };
    }
    let mut status = 0;
    // SAFETY: the place outlives the call.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0,
        "status {status:#x}"
    );
}
