//! This process's session with a backend: attached at `cuInit`, and alive until the process ends.
//!
//! Every byte offset and memory ordering of the shared memory lives in the ring crate. This module uses it on the
//! guest's side: records, requests, waits, fences, the arena.

mod answers;
mod attach;
mod control;
mod extents;
mod fences;
mod files;
mod fork;
pub mod gate;
mod keeper;
mod mapping;
pub mod output;
mod page_range;
mod requests;
mod transport;
mod wait;
mod watch;

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Once, OnceLock};

use wormhole_lock::Mutex;
use wormhole_ring::fence::Fences;
use wormhole_ring::ring::Producer;
use wormhole_ring::slot::AnswerSlots;
use wormhole_ring::status::Status;
use wormhole_ring::waits::Waits;

use self::answers::Slots;
use self::control::Control;
use self::extents::Extents;
pub use self::extents::STAGING_BYTES;
pub use self::fences::FenceLine;
use self::files::Files;
pub use self::files::MappedFile;
use self::fork::WipedPointer;
use self::transport::Way;
pub use self::wait::Manner;
use crate::device::{Device, MOST};
use crate::error::{CuError, Result};
use crate::{counts, log};

/// State of a process's session with its backend.
#[derive(Debug)]
pub struct Session {
    control: Control,
    status: Status,
    /// Waits of sleeping threads.
    waits: Waits,
    /// Whether the backend runs on this process's own system, so that it wakes threads that sleep on a word.
    is_local: bool,
    way: Way,
    producer: Producer,
    slots: AnswerSlots,
    fences: Fences,
    free_slots: Slots,
    sequence: AtomicU64,
    fence_stock: Mutex<fences::Stock>,
    extents: Extents,
    /// Socket for descriptors of files, if the worker accepts them.
    files: Option<Files>,
    /// Address ranges reserved for device memory: start and bytes.
    reserved: Vec<(u64, u64)>,
    end_logged: Once,
    /// True once an image that prints or asserts is loaded, until the text of a dead context has been shown.
    may_have_output: AtomicBool,
    last_output: Mutex<()>,
    /// Devices that the program sees, indexed by ordinal.
    devices: Vec<Device>,
    /// The session with each device, made at first use.
    on: OnceLock<Box<[Place; MOST]>>,
}

/// A session with one of its devices.
#[derive(Debug)]
struct Place {
    session: &'static Session,
    ordinal: usize,
    /// The device's number at the backend.
    number: u16,
}

/// The session together with one of its devices. One pointer, so that calls pass it in a register.
#[derive(Clone, Copy, Debug)]
pub struct OnDevice(&'static Place);

impl std::ops::Deref for OnDevice {
    type Target = Session;

    #[inline]
    fn deref(&self) -> &Session {
        self.0.session
    }
}

impl OnDevice {
    /// Returns the device's ordinal in the program.
    #[inline]
    pub fn ordinal(self) -> usize {
        self.0.ordinal
    }

    /// Returns the device's number at the backend.
    pub fn number(self) -> u32 {
        self.0.number.into()
    }

    pub fn device(self) -> &'static Device {
        &self.0.session.devices[self.ordinal()]
    }

    #[inline]
    pub fn session(self) -> &'static Session {
        self.0.session
    }
}

static SESSION: WipedPointer<Session> = WipedPointer::new();
/// True once the process's exit handlers have run.
static ENDING: AtomicBool = AtomicBool::new(false);
/// Descriptors of the control stream and of the socket for files. A forked child closes them, because the session lives
/// as long as its parent.
static DESCRIPTORS: [AtomicI32; 2] = [const { AtomicI32::new(-1) }; 2];

/// Lets forked children close a socket for files that was made later.
fn close_in_children(descriptor: i32) {
    DESCRIPTORS[1].store(descriptor, Ordering::Relaxed);
}

/// Lock held while the process attaches. Its value is the cause of the last failure, which is logged once.
static ATTACHING: Mutex<String> = Mutex::new(String::new());

/// Returns the session, once `cuInit` has succeeded in this very process.
#[inline]
pub fn session() -> Result<&'static Session> {
    match SESSION.get() {
        Some(session) if !ENDING.load(Ordering::Relaxed) => Ok(session),
        _ => Err(no_session()),
    }
}

/// Fails once the exit handlers have run. For calls that need no session.
pub fn not_ended() -> Result {
    if ENDING.load(Ordering::Relaxed) {
        Err(CuError::DEINITIALIZED)
    } else {
        Ok(())
    }
}

#[cold]
fn no_session() -> CuError {
    if ENDING.load(Ordering::Relaxed) {
        CuError::DEINITIALIZED
    } else {
        CuError::NOT_INITIALIZED
    }
}

/// Attaches this process to its backend, unless it already is.
pub fn initialise() -> Result<&'static Session> {
    if let Ok(session) = session() {
        return Ok(session);
    }
    let mut said = ATTACHING.lock();
    if let Ok(session) = session() {
        return Ok(session);
    }
    if ENDING.load(Ordering::Relaxed) || SESSION.was_lost_in_fork() {
        return Err(no_session());
    }
    let session = attach::attach().map_err(|error| {
        let why = error.to_string();
        if *said != why {
            log::error!("no CUDA device: {why}");
            if let Some(hint) = error.hint() {
                log::error!("{hint}");
            }
            *said = why;
        }
        error.code()
    })?;
    let files = session.files.as_ref().and_then(Files::descriptor);
    let descriptors = [session.control.descriptor(), files.unwrap_or(-1)];
    let session = SESSION.set(session).map_err(|error| {
        log::error_once!("no CUDA device: a page that forks wipe cannot be made: {error}");
        CuError::OPERATING_SYSTEM
    })?;
    for (place, descriptor) in DESCRIPTORS.iter().zip(descriptors) {
        place.store(descriptor, Ordering::Relaxed);
    }
    // SAFETY: both handlers are functions of this library, which is never unloaded (it is linked with
    // `nodelete`), and call only what is safe where they run.
    unsafe {
        libc::pthread_atfork(None, None, Some(close_in_child));
        libc::atexit(at_exit);
    }
    if let Err(error) = watch::start(session) {
        // The calls that wait notice the end all the same.
        log::debug!("no thread watches the control stream: {error}");
    }
    Ok(session)
}

extern "C" fn close_in_child() {
    for place in &DESCRIPTORS {
        let descriptor = place.swap(-1, Ordering::Relaxed);
        if descriptor >= 0 {
            // SAFETY: this library owns the descriptor, and the child never uses it.
            unsafe { libc::close(descriptor) };
        }
    }
}

extern "C" fn at_exit() {
    if let Ok(session) = session() {
        session.publish_counts();
        ENDING.store(true, Ordering::Relaxed);
    }
}

impl Session {
    /// Returns the devices that the program sees.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Returns the session with one of its devices, which must exist.
    #[inline]
    pub fn on(&'static self, ordinal: usize) -> OnDevice {
        let all = self.on.get_or_init(|| self.places());
        OnDevice(all.get(ordinal).unwrap_or(&all[0]))
    }

    #[cold]
    fn places(&'static self) -> Box<[Place; MOST]> {
        Box::new(std::array::from_fn(|ordinal| Place {
            session: self,
            ordinal,
            number: self.devices.get(ordinal).map_or(0, |device| device.number),
        }))
    }

    /// Returns true if a range is reserved for device memory, so that no mapping of the program lies there.
    pub fn is_reserved(&self, address: u64, bytes: u64) -> bool {
        self.reserved
            .iter()
            .any(|&(base, size)| address >= base && bytes <= size && address - base <= size - bytes)
    }

    /// Publishes the number of calls that this process has answered by itself.
    pub fn publish_counts(&self) {
        self.status.set_local_calls(counts::local());
    }
}
