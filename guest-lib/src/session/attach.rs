//! Attaches a session: connects, receives the grant, maps its memory, and requests the descriptions of the devices.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Once, OnceLock};

use wormhole_api::{DeviceDescribe, PROTOCOL_HASH};
use wormhole_connect::{ConnectError, WINDOW, environment::trusted};
use wormhole_lock::Mutex;
use wormhole_ring::band;
use wormhole_ring::bootstrap::{Bootstrap, BootstrapError};
use wormhole_ring::control::{
    Band, FEATURE_FILE_MEMORY, FEATURE_FILES, FEATURE_PROCESS, FEATURE_WITHIN, Grant, Message,
    ProcessNumber, Refusal,
};
use wormhole_ring::fence::Fences;
use wormhole_ring::layout::{FILES, HANDLE_BASE, HANDLE_BYTES, SEGMENT_BYTES};
use wormhole_ring::memory::{MemoryError, SessionMemory, WindowMemory};
use wormhole_ring::ring::Producer;
use wormhole_ring::slot::AnswerSlots;
use wormhole_ring::status::Status;
use wormhole_ring::waits::Waits;

use super::Session;
use super::answers::Slots;
use super::control::{ChannelError, Control};
use super::extents::Extents;
use super::fences::Stock;
use super::files::Files;
use super::keeper::{Keeper, SessionPlace};
use super::mapping::Window;
use super::page_range::{PageRange, PageRangeError};
use super::transport::{Way, WayError};
use crate::device::{Device, MOST, attribute, visible};
use crate::error::CuError;
use crate::log;
use crate::pages::can_hold_writers;

/// Failure to attach.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    #[error(transparent)]
    Channel(#[from] ChannelError),
    #[error("the backend's worker speaks protocol {granted:#018x}, this library {own:#018x}")]
    Protocol { granted: u64, own: u64 },
    #[error("the window {path} cannot be opened: {source}")]
    Window { path: String, source: io::Error },
    #[error("the grant puts handles at {granted:#x}, this library at {own:#x}")]
    HandleBand { granted: u64, own: u64 },
    #[error("addresses {base:#x}+{bytes:#x} cannot be reserved for the {what}: {source}")]
    Band {
        what: &'static str,
        base: u64,
        bytes: u64,
        source: io::Error,
    },
    #[error("the granted {what} cannot be mapped: {source}")]
    Map {
        what: &'static str,
        source: io::Error,
    },
    #[error(transparent)]
    Transport(#[from] WayError),
    #[error("the window's part for registered memory: {0}")]
    Pages(#[from] PageRangeError),
    #[error("the window's file is no window: {0}")]
    Bootstrap(#[from] BootstrapError),
    #[error("the window's file is another window: of {found} bytes, not of {granted}")]
    OtherWindow { found: u64, granted: u64 },
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("the backend does not describe its device: {0}")]
    Describe(CuError),
}

impl AttachError {
    /// Returns the error for the program: no device, or a device that is not ready.
    pub fn code(&self) -> CuError {
        match self {
            Self::Channel(ChannelError::Connect(
                ConnectError::NoBackend | ConnectError::Address { .. },
            )) => CuError::NO_DEVICE,
            Self::Channel(ChannelError::Refused { code, .. })
                if Refusal::from_code(*code) == Some(Refusal::NoDevice) =>
            {
                CuError::NO_DEVICE
            }
            _ => CuError::SYSTEM_NOT_READY,
        }
    }

    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Channel(ChannelError::Connect(error)) => error.hint(),
            Self::Protocol { .. } => {
                Some("hint: install the library and the backend of one version")
            }
            Self::Window { .. }
            | Self::Pages(_)
            | Self::Bootstrap(_)
            | Self::OtherWindow { .. } => Some(
                "hint: the window of a VM is a /dev/dax device: run `wormhole-guest check`, or set WORMHOLE_WINDOW to it",
            ),
            Self::Band { .. } => Some("hint: something in the process occupies these addresses"),
            _ => None,
        }
    }
}

/// Attaches this process to its backend.
pub fn attach() -> Result<Session, AttachError> {
    let control = Control::connect()?;
    let (grant, descriptors) = control.hello(PROTOCOL_HASH, &environment())?;
    let mut descriptors = descriptors.into_iter();
    if grant.protocol_hash != PROTOCOL_HASH {
        return Err(AttachError::Protocol {
            granted: grant.protocol_hash,
            own: PROTOCOL_HASH,
        });
    }
    // A process on the backend's own system receives its session's file, which has no bootstrap.
    let (file, shared) = match descriptors.next() {
        Some(file) => (File::from(file), false),
        None => (open_window()?, true),
    };
    let reserved = match reserve_bands(&grant) {
        Ok(reserved) => reserved,
        Err(error) => {
            // The supervisor then takes the session back.
            control.send(&Message::Unmappable)?;
            return Err(error);
        }
    };
    let pages = match shared {
        true => page_range(&file, grant.window_size)?,
        false => None,
    };
    let is_placed = grant.features & FEATURE_WITHIN != 0;
    let window = Window::new(grant.window_base, grant.window_size, file, shared)
        .with_pages(pages, is_placed);
    if shared {
        check_bootstrap(&window, &grant)?;
    }
    let files = files(&grant, &window, descriptors.next());
    let files = files.map_err(|source| AttachError::Map {
        what: "socket for files",
        source,
    })?;
    let session = map(control, &grant, window, reserved, files)?;
    session.control.send(&Message::Mapped)?;
    if grant.features & FEATURE_PROCESS != 0 {
        let process = ProcessNumber {
            pid: std::process::id(),
            reserved: 0,
        };
        session.control.send(&Message::Process(process))?;
    }
    describe(session)
}

/// Returns the way in which files are sent to the worker, if it accepts any. A socket for them may have come with the grant.
fn files(grant: &Grant, window: &Window, socket: Option<OwnedFd>) -> io::Result<Option<Files>> {
    match socket.filter(|_| grant.features & FEATURE_FILES != 0) {
        Some(socket) => Files::by_socket(UnixDatagram::from(socket)).map(Some),
        None if grant.features & FEATURE_FILE_MEMORY != 0 => {
            let (file, offset) = window.file_at(window.address(grant.session_segment))?;
            let place = SessionPlace {
                window: file.try_clone()?,
                offset,
                generation: grant.generation,
            };
            Files::by_keeper(Keeper::new(place)).map(Some)
        }
        None => Ok(None),
    }
}

/// Returns the part of a VM's window that is mapped in single pages, or logs why there is none.
fn page_range(window: &File, bytes: u64) -> Result<Option<PageRange>, PageRangeError> {
    let without = |cause: &dyn std::error::Error| {
        log::debug!("registered memory is out of the device's reach: {cause}");
    };
    match PageRange::find(window, bytes) {
        Ok(pages) => {
            if let Err(cause) = &pages.file {
                without(cause);
            }
            Ok(Some(pages))
        }
        // Segments that this process could not map may be granted.
        Err(error) if error.is_fatal() => Err(error),
        Err(error) => {
            without(&error);
            Ok(None)
        }
    }
}

/// Checks that the window is the one whose segments the backend grants.
fn check_bootstrap(window: &Window, grant: &Grant) -> Result<(), AttachError> {
    let base = window.map(0, 1, true).map_err(|source| AttachError::Map {
        what: "bootstrap",
        source,
    })?;
    // SAFETY: the segment was mapped above and stays mapped.
    let memory = unsafe { WindowMemory::new(base, SEGMENT_BYTES) }?;
    let bootstrap = Bootstrap::read(&memory)?;
    if bootstrap.window_bytes != grant.window_size {
        return Err(AttachError::OtherWindow {
            found: bootstrap.window_bytes,
            granted: grant.window_size,
        });
    }
    Ok(())
}

fn map(
    control: Control,
    grant: &Grant,
    window: Window,
    reserved: Vec<(u64, u64)>,
    files: Option<Files>,
) -> Result<Session, AttachError> {
    let base = window
        .map(grant.session_segment, 1, true)
        .map_err(|source| AttachError::Map {
            what: "session segment",
            source,
        })?;
    let is_local = !window.is_shared();
    let segment = window.file_range(window.address(grant.session_segment));
    let segment = segment.filter(|_| is_local);
    let way = Way::chosen(segment)?;
    let extents = Extents::new(window);
    if grant.arena_count > 0 {
        extents
            .add_reserve(grant.arena_first)
            .map_err(|source| AttachError::Map {
                what: "arena",
                source,
            })?;
    }
    // SAFETY: the segment was mapped above and is never unmapped; only the ring crate reaches it.
    let memory = unsafe { SessionMemory::new(base, SEGMENT_BYTES) }?;
    Ok(Session {
        control,
        status: Status::new(memory.clone()),
        waits: Waits::new(memory.clone()),
        is_local,
        way,
        // SAFETY: this is the process's only producer value, and no consumer lives in this process.
        producer: unsafe { Producer::new(memory.clone()) },
        // SAFETY: a slot is polled only by the thread that took it from `free_slots`; this process never publishes
        // answers.
        slots: unsafe { AnswerSlots::new(memory.clone()) },
        fences: Fences::new(memory),
        free_slots: Slots::new(),
        sequence: AtomicU64::new(1),
        fence_stock: Mutex::new(Stock::default()),
        extents,
        files,
        reserved,
        end_logged: Once::new(),
        may_have_output: AtomicBool::new(false),
        last_output: Mutex::new(()),
        devices: Vec::new(),
        on: OnceLock::new(),
    })
}

fn describe(mut session: Session) -> Result<Session, AttachError> {
    let mut devices: Vec<Option<Device>> = Vec::new();
    loop {
        let number = u16::try_from(devices.len()).unwrap_or(u16::MAX);
        let ask = DeviceDescribe {
            ordinal: number.into(),
        };
        let described = session.ask(0, &ask, |reply| {
            (Device::new(number, &reply), reply.devices as usize)
        });
        let (mut device, count) = described.map_err(AttachError::Describe)?;
        if !session.has_pages() || !can_hold_writers() {
            // Copies from and to registered memory still work, but the device cannot reach it.
            device.lacks(attribute::HOST_REGISTER_SUPPORTED);
        }
        devices.push(Some(device));
        if devices.len() >= count.min(MOST) {
            break;
        }
    }
    let uuids: Vec<_> = devices.iter().flatten().map(|device| device.uuid).collect();
    let seen = match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(list) => visible(&list, &uuids),
        Err(_) => (0..devices.len()).collect(),
    };
    let seen = seen.into_iter().filter_map(|at| devices[at].take());
    session.devices = seen.collect();
    Ok(session)
}

fn open_window() -> Result<File, AttachError> {
    let path = trusted("WORMHOLE_WINDOW").unwrap_or_else(|| WINDOW.to_owned());
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .map_err(|source| AttachError::Window { path, source })
}

/// Reserves the ranges of the grant, so that neither the program nor its libraries are mapped there. Returns the ranges
/// for device memory.
fn reserve_bands(grant: &Grant) -> Result<Vec<(u64, u64)>, AttachError> {
    if grant.handle_base != HANDLE_BASE {
        return Err(AttachError::HandleBand {
            granted: grant.handle_base,
            own: HANDLE_BASE,
        });
    }
    let [high, low] = grant.apertures;
    let mut bands = vec![
        ("window", grant.window_base, grant.window_size),
        ("handles", grant.handle_base, HANDLE_BYTES),
        ("device memory", high.base, high.size),
    ];
    if grant.features & (FEATURE_FILES | FEATURE_FILE_MEMORY) != 0 {
        bands.push(("files", FILES.0, FILES.1));
    }
    for (index, &(what, base, bytes)) in bands.iter().enumerate() {
        if let Err(source) = band::reserve(base, bytes) {
            for &(_, base, bytes) in bands.iter().take(index) {
                // SAFETY: reserved above, and no address in it has been used.
                unsafe { band::release(base, bytes) };
            }
            return Err(AttachError::Band {
                what,
                base,
                bytes,
                source,
            });
        }
    }
    let mut reserved = vec![(high.base, high.size)];
    reserved.extend(reserve_pieces(low));
    Ok(reserved)
}

/// Size of the pieces in which the low band is reserved if it is not free as a whole.
const PIECE: u64 = 8 << 30;

/// Reserves the low band, in which the driver places pools and reserved virtual memory, as far as it is free: some
/// language runtimes keep their heap in it. Memory that the driver places in an unreserved part is freed again.
fn reserve_pieces(band: Band) -> Vec<(u64, u64)> {
    let Err(error) = band::reserve(band.base, band.size) else {
        return vec![(band.base, band.size)];
    };
    log::debug!(
        "{:#x}+{:#x} is reserved for memory pools in pieces: {error}",
        band.base,
        band.size
    );
    let mut pieces: Vec<(u64, u64)> = Vec::new();
    for offset in (0..band.size).step_by(usize::try_from(PIECE).unwrap_or(usize::MAX)) {
        let (start, bytes) = (band.base + offset, PIECE.min(band.size - offset));
        if band::reserve(start, bytes).is_err() {
            continue;
        }
        match pieces.last_mut() {
            Some((base, size)) if *base + *size == start => *size += bytes,
            _ => pieces.push((start, bytes)),
        }
    }
    pieces
}

/// Returns the variables that the driver reads at start, one per line, without those that this library handles itself:
/// the selection of devices and the launch mode.
fn environment() -> String {
    const OWN: [&str; 3] = [
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "CUDA_LAUNCH_BLOCKING",
    ];
    /// Switch of the worker's chains of launches, and the transport.
    const WORKER: [&str; 2] = ["WORMHOLE_CHAINS", wormhole_ring::transport::VARIABLE];
    const LIMIT: usize = 4096;
    let mut variables: Vec<(String, String)> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, value)| {
            (name.starts_with("CUDA_") || WORKER.contains(&name.as_str()))
                && !OWN.contains(&name.as_str())
                && !value.contains('\n')
        })
        .collect();
    variables.sort_unstable();
    let mut text = String::new();
    for (name, value) in variables {
        if text.len() + name.len() + value.len() + 2 <= LIMIT {
            text.push_str(&format!("{name}={value}\n"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::FromRawFd;

    #[test]
    fn a_band_with_something_in_it_is_kept_around_that() {
        let base = 0x4c00_0000_0000;
        let band = Band {
            base,
            size: 4 * PIECE - 4096,
        };
        band::reserve(base + PIECE + 4096, 4096).unwrap();
        let reserved = reserve_pieces(band);
        assert_eq!(
            reserved,
            [(base, PIECE), (base + 2 * PIECE, 2 * PIECE - 4096)]
        );
        for (start, bytes) in [(base, PIECE), (base + 3 * PIECE, PIECE - 4096)] {
            let taken = band::reserve(start, bytes).unwrap_err();
            assert_eq!(taken.raw_os_error(), Some(libc::EEXIST));
        }
    }

    #[test]
    fn another_window_is_distinguished_from_the_granted_one() {
        const BYTES: u64 = 4 * SEGMENT_BYTES as u64;
        let grant = Grant {
            window_base: 0x4b00_0000_0000,
            window_size: BYTES,
            ..Grant::default()
        };
        // SAFETY: the name is a string; the descriptor has no other owner.
        let file =
            unsafe { File::from_raw_fd(libc::memfd_create(c"w".as_ptr(), libc::MFD_CLOEXEC)) };
        file.set_len(BYTES).unwrap();
        band::reserve(grant.window_base, BYTES).unwrap();
        let window = Window::new(grant.window_base, BYTES, file, true);
        let error = check_bootstrap(&window, &grant).unwrap_err();
        assert!(matches!(error, AttachError::Bootstrap(_)), "{error}");

        let base = window.map(0, 1, true).unwrap();
        // SAFETY: just mapped.
        let memory = unsafe { WindowMemory::new(base, SEGMENT_BYTES) }.unwrap();
        Bootstrap::for_window(2 * BYTES).write(&memory).unwrap();
        let error = check_bootstrap(&window, &grant).unwrap_err();
        assert!(matches!(error, AttachError::OtherWindow { .. }), "{error}");
        Bootstrap::for_window(BYTES).write(&memory).unwrap();
        check_bootstrap(&window, &grant).unwrap();
    }
}
