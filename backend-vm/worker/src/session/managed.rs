//! Managed memory that changes sides. It lies in a band of its own, and has a home in the arena.
//!
//! At its address the device reaches the home at first, and memory of its own after [`ManagedPlace`]. The guest decides
//! where the valid bytes are then. While it works with a part, that part is valid in the home, which the guest maps;
//! otherwise the device's memory is. [`ManagedPlace`] and [`ManagedFetch`] are refused while a stream has work, so that no
//! kernel misses what the guest writes afterwards, or changes what the guest has fetched. A guest whose kernel waits for
//! the guest fetches `concurrent`ly: the worker keeps a twin of the bytes, and the next push writes only those that differ
//! from it. A guest that breaks these rules damages its own memory.
//!
//! The guest may ask for a mirror of memory of the device ([`mirrors`]), to learn what the device has changed.
//!
//! Copies run on a stream of the worker's own, which waits for no work of the program.

mod mirrors;

use std::collections::BTreeMap;
use std::sync::Arc;

use wormhole_api::constants::event_flags::DISABLE_TIMING;
use wormhole_api::constants::stream_flags::NON_BLOCKING;
use wormhole_api::{
    CuResult, ManagedClose, ManagedFetch, ManagedIdle, ManagedOpen, ManagedPlace, ManagedPush,
    Outcome, Serve, Served,
};
use wormhole_device::{Device, RawStream};
use wormhole_link::counters::Counter;
use wormhole_lock::Mutex;
use wormhole_ring::layout::{MANAGED, MANAGED_ALIGN, SEGMENT_BYTES};

use super::addresses::Addresses;
use super::{Answer, Call, Event, Session};
use crate::devices::SessionDevice;
use crate::objects::StreamObject;
use crate::registrar::{Registrations, Task};
use crate::window::Window;

/// Greatest number of twins, which are private memory of the worker.
const TWINS: usize = 16;
/// Bytes that a comparison with a twin copies at a time.
const STEP: usize = 64;

/// Managed memory of a session.
#[derive(Debug)]
struct Managed {
    device: SessionDevice,
    home: u64,
    bytes: u64,
    /// Whether memory of the device is there.
    placed: bool,
    /// Whether the registrar is changing what is there.
    changing: bool,
    /// Address of the mirror, memory of the device that the guest does not name.
    mirror: Option<u64>,
    /// Jobs that copy hold a clone.
    users: Arc<()>,
}

/// A part of placed memory, for a job that copies.
struct Part {
    device: SessionDevice,
    /// Address of the part's home, and of its mirror.
    home: u64,
    mirror: Option<u64>,
    /// Address of the marks of a comparison with the mirror.
    marks: u64,
    /// Guard of the copy.
    users: Arc<()>,
}

/// Stream for copies between homes and placed memory, made at first use. A reset destroys it.
type CopyStream = Arc<Mutex<Option<RawStream>>>;
/// Contents of homes at their last concurrent fetch, by address.
type Twins = Arc<Mutex<BTreeMap<u64, Vec<u8>>>>;

/// Managed memory of a session, by address.
#[derive(Debug, Default)]
pub(super) struct Placements {
    window: Option<Arc<Window>>,
    all: BTreeMap<u64, Managed>,
    /// Whether the work of a destroyed stream is not known to have ended: until a reset no device is known to be idle.
    misses_work: bool,
    /// A stream of each device that waits for the work of destroyed streams.
    leaving: Vec<(SessionDevice, RawStream)>,
    stream: CopyStream,
    twins: Twins,
}

impl Placements {
    /// Notes a stream that is going to be destroyed. Its work continues.
    pub fn stream_ends(&mut self, stream: &StreamObject) {
        if stream.device.query_stream(stream.raw) == Ok(true) {
            return;
        }
        let device = &stream.device;
        let marked = self.leaving_of(device).and_then(|leaving| {
            let event = device.create_event(DISABLE_TIMING)?;
            let waits = device
                .record_event(event, stream.raw, 0)
                .and_then(|()| device.wait_event(leaving, event, 0));
            // The wait stays in force.
            device.destroy_event(event)?;
            waits
        });
        if let Err(error) = marked {
            tracing::debug!("the end of a stream's work cannot be marked: {error}");
            self.misses_work = true;
        }
    }

    /// Returns the stream of a device that waits for the work of destroyed streams.
    fn leaving_of(&mut self, device: &SessionDevice) -> wormhole_device::Result<RawStream> {
        let known = self.leaving.iter().find(|(of, _)| of == device);
        if let Some(&(_, stream)) = known {
            return Ok(stream);
        }
        let stream = device.stream_create(NON_BLOCKING, 0)?;
        self.leaving.push((device.clone(), stream));
        Ok(stream)
    }

    /// Forgets what a reset destroys. Placed memory belongs to no context.
    pub fn reset(&mut self, addresses: &mut Addresses) {
        self.leaving.clear();
        self.misses_work = false;
        self.stream = CopyStream::default();
        let placed = self.all.iter().filter(|(_, managed)| managed.placed);
        for (&address, managed) in placed {
            let number = managed.device.number();
            addresses.device.insert_of(number, address, managed.bytes);
        }
        for managed in self.all.values_mut() {
            managed.mirror = None;
        }
    }

    /// Returns whether a range of the arena holds a part of a home.
    pub fn has_home_in(&self, start: u64, bytes: u64) -> bool {
        let overlaps = |of: &Managed| start < of.home + of.bytes && of.home < start + bytes;
        self.all.values().any(overlaps)
    }

    /// Returns memory in which nothing else is under way.
    fn at(&mut self, address: u64) -> Option<&mut Managed> {
        let managed = self.all.get_mut(&address)?;
        // A guest waits for each answer before it sends the next message about the same memory.
        (!managed.changing && Arc::strong_count(&managed.users) == 1).then_some(managed)
    }

    /// Returns a part of placed memory.
    fn part(&self, address: u64, bytes: u64) -> Option<Part> {
        let (start, managed) = self.all.range(..=address).next_back()?;
        let offset = address - start;
        let fits = bytes != 0 && bytes <= managed.bytes && offset <= managed.bytes - bytes;
        (fits && managed.placed && !managed.changing).then(|| Part {
            device: managed.device.clone(),
            home: managed.home + offset,
            mirror: managed.mirror.map(|mirror| mirror + offset),
            marks: managed.mirror.unwrap_or(0) + managed.bytes,
            users: Arc::clone(&managed.users),
        })
    }
}

/// Copies on the stream for copies, and waits.
fn copy(
    device: &dyn Device,
    stream: &CopyStream,
    to: u64,
    from: u64,
    bytes: u64,
) -> wormhole_device::Result<()> {
    let stream = on(device, stream)?;
    device.mem_copy(to, from, bytes, stream)?;
    device.synchronize_stream(stream)
}

/// Brings the mirror of a part up to date, if there is one.
fn remember(
    device: &dyn Device,
    stream: &CopyStream,
    mirror: Option<u64>,
    address: u64,
    bytes: u64,
) -> wormhole_device::Result<()> {
    mirror.map_or(Ok(()), |mirror| {
        copy(device, stream, mirror, address, bytes)
    })
}

fn on(device: &dyn Device, stream: &CopyStream) -> wormhole_device::Result<RawStream> {
    let mut stream = stream.lock();
    match *stream {
        Some(made) => Ok(made),
        None => {
            let made = device.stream_create(NON_BLOCKING, 0)?;
            *stream = Some(made);
            Ok(made)
        }
    }
}

/// Copies bytes out of a home, which the guest may be writing.
fn read_home(address: u64, bytes: &mut [u8]) {
    let home = std::ptr::with_exposed_provenance::<u8>(usize::try_from(address).unwrap_or(0));
    // SAFETY: callers pass parts of homes, which stay mapped while there is a `Managed` of them. The C library's function
    // is used because the guest may write there.
    unsafe { libc::memcpy(bytes.as_mut_ptr().cast(), home.cast(), bytes.len()) };
}

/// Maps a home at its address, and registers it there.
fn open(
    registrations: &mut Registrations,
    window: &Window,
    (address, home, bytes): (u64, u64, u64),
) -> Result<(), CuResult> {
    window.map_again(address, home, bytes).map_err(|error| {
        tracing::warn!("arena cannot be mapped at another address: {error}");
        CuResult::OUT_OF_MEMORY
    })?;
    // SAFETY: just mapped, and unmapped only after its registration has ended.
    unsafe { registrations.add(address, bytes) }
        .inspect_err(|_| Window::unmap_again(address, bytes))
}

/// Memory at an address after an attempt to put memory of the device there.
enum Placed {
    Device,
    /// The home again, after this error.
    Home(CuResult),
    /// The home, memory of the device, or none: this error left it open.
    Lost(CuResult),
}

/// Puts memory of the device with the home's contents in the home's place.
fn place(
    registrations: &mut Registrations,
    window: &Window,
    device: &dyn Device,
    stream: &CopyStream,
    (address, home, bytes): (u64, u64, u64),
) -> Placed {
    if let Err(error) = registrations.remove(address) {
        return Placed::Lost(error);
    }
    Window::unmap_again(address, bytes);
    let on_device = device.place(address, bytes);
    let copied = on_device.and_then(|()| copy(device, stream, address, home, bytes));
    let Err(error) = copied else {
        return Placed::Device;
    };
    let displaced = on_device.map_or(Ok(()), |()| device.displace(address, bytes));
    match displaced.and_then(|()| open(registrations, window, (address, home, bytes))) {
        Ok(()) => Placed::Home(error),
        Err(error) => Placed::Lost(error),
    }
}

impl Session {
    /// Sets the window in which the arena lies.
    pub(crate) fn place_in(&mut self, window: Arc<Window>) {
        self.placements.window = Some(window);
    }

    /// Fails with `CUDA_ERROR_NOT_READY` while a device has work of this session.
    pub(super) fn all_idle(&self, of: &SessionDevice) -> Result<(), CuResult> {
        if self.placements.misses_work {
            return Err(CuResult::NOT_READY);
        }
        let legacy = self.objects.legacy().iter();
        let streams = legacy.chain(self.objects.streams.values());
        let streams = streams.map(|stream| (&stream.device, stream.raw));
        let leaving = self.placements.leaving.iter();
        let leaving = leaving.map(|(device, stream)| (device, *stream));
        for (device, stream) in streams.chain(leaving) {
            if device == of {
                self.finished(device.query_stream(stream))?;
            }
        }
        Ok(())
    }

    /// Has the registrar change the memory at an address, once no job uses addresses. `finish` runs on the executor and
    /// returns the answer.
    pub(super) fn change<T: Send + Sync + 'static, R>(
        &mut self,
        call: &Call,
        task: impl FnOnce(&mut Registrations) -> T + Send + Sync + 'static,
        finish: impl FnOnce(&mut Self, T) -> Result<(), CuResult> + Send + Sync + 'static,
    ) -> Outcome<R> {
        let slot = call.slot.ok_or(CuResult::INVALID_VALUE)?;
        let (notifier, sequence) = (self.notifier.clone(), call.sequence);
        self.reset.job_begun();
        let task = Task::new(move |registrations| {
            let done = task(registrations);
            notifier.send(Event::Finished {
                slot,
                sequence,
                finish: Box::new(move |session| match finish(session, done) {
                    Ok(()) => Answer::done(),
                    Err(error) => Answer::failed(session.failed(error)),
                }),
            });
        });
        self.addresses.once_unused(task, &self.registrar);
        Ok(Served::Deferred)
    }

    /// Frees memory of a device, or an address range, that descriptions may name. While a job gives the device addresses of
    /// a description, memory of the worker's own must not come there: the free then waits for the job.
    pub(super) fn free<R>(
        &mut self,
        call: &Call,
        device: SessionDevice,
        free: impl FnOnce(&dyn Device) -> wormhole_device::Result<()> + Send + Sync + 'static,
    ) -> Outcome<R> {
        self.free_and_finish(call, device, free, |_, freed| freed)
    }

    /// As [`free`](Self::free). `finish` runs on the executor and returns the answer.
    pub(super) fn free_and_finish<R>(
        &mut self,
        call: &Call,
        device: SessionDevice,
        free: impl FnOnce(&dyn Device) -> wormhole_device::Result<()> + Send + Sync + 'static,
        finish: impl FnOnce(&mut Self, wormhole_device::Result<()>) -> Result<(), CuResult>
        + Send
        + Sync
        + 'static,
    ) -> Outcome<R> {
        if self.addresses.has_users() {
            return self.change(call, move |_| free(&*device), finish);
        }
        self.defer(call, device, move |device: &dyn Device| {
            let freed = free(device);
            Box::new(move |session: &mut Self| {
                let finished = finish(session, freed);
                Answer::of(session.done(finished))
            })
        })
    }
}

impl Serve<ManagedIdle> for Session {
    fn serve(&mut self, call: &Call, _: &ManagedIdle) -> Outcome<()> {
        self.all_idle(&self.here(call)).map(Served::Done)
    }
}

impl Serve<ManagedOpen> for Session {
    fn serve(&mut self, call: &Call, message: &ManagedOpen) -> Outcome<()> {
        let (address, home, bytes) = (message.address.0, message.home.0, message.bytes);
        let Some(window) = self.placements.window.clone() else {
            return Err(CuResult::NOT_SUPPORTED);
        };
        let (base, size) = MANAGED;
        let in_band = address >= base && bytes <= size && address - base <= size - bytes;
        let whole = address.is_multiple_of(MANAGED_ALIGN)
            && [home, bytes]
                .iter()
                .all(|value| value.is_multiple_of(SEGMENT_BYTES as u64));
        let before = self.placements.all.range(..address.saturating_add(bytes));
        let taken = before
            .last()
            .is_some_and(|(start, managed)| start + managed.bytes > address);
        if !in_band || !whole || bytes == 0 || taken {
            return Err(self.addresses.refused());
        }
        self.addresses.arena(home, bytes)?;
        // A home is registered with the driver at each address that shows it.
        if self.placements.has_home_in(home, bytes) {
            return Err(self.addresses.refused());
        }
        let managed = Managed {
            device: self.here(call),
            home,
            bytes,
            placed: false,
            changing: true,
            mirror: None,
            users: Arc::default(),
        };
        let opened = self.change(
            call,
            move |registrations| open(registrations, &window, (address, home, bytes)),
            move |session, opened| match (opened, session.placements.all.get_mut(&address)) {
                (Ok(()), Some(managed)) => {
                    managed.changing = false;
                    session.addresses.managed.insert(address, bytes);
                    Ok(())
                }
                _ => {
                    session.placements.all.remove(&address);
                    opened
                }
            },
        );
        if opened.is_ok() {
            self.placements.all.insert(address, managed);
        }
        opened
    }
}

impl Serve<ManagedClose> for Session {
    fn serve(&mut self, call: &Call, message: &ManagedClose) -> Outcome<()> {
        let address = message.address.0;
        let Some(managed) = self.placements.at(address) else {
            return Err(self.addresses.refused());
        };
        managed.changing = true;
        let (device, bytes, placed) = (managed.device.clone(), managed.bytes, managed.placed);
        let mirror = managed.mirror;
        let devices = self.devices.clone();
        let closed = self.change(
            call,
            move |registrations| {
                if placed {
                    let freed = mirror.map_or(Ok(()), |mirror| device.mem_free(mirror));
                    return devices.displace(&device, address, bytes).and(freed);
                }
                registrations.remove(address)?;
                Window::unmap_again(address, bytes);
                Ok(())
            },
            // If the device keeps it, it stays until the session ends, and so does its home.
            move |session, closed| closed.map(|()| _ = session.placements.all.remove(&address)),
        );
        if closed.is_ok() {
            self.addresses.managed.remove(address);
            if placed {
                self.addresses.device.remove(address);
            }
            if let Some(mirror) = mirror {
                self.addresses.device.remove(mirror);
            }
            self.placements
                .twins
                .lock()
                .retain(|twin, _| !(address..address + bytes).contains(twin));
        }
        closed
    }
}

impl Serve<ManagedPlace> for Session {
    fn serve(&mut self, call: &Call, message: &ManagedPlace) -> Outcome<()> {
        let address = message.address.0;
        let found = self.placements.window.clone();
        let managed = self.placements.at(address);
        let (Some(window), Some(managed)) = (found, managed.filter(|managed| !managed.placed))
        else {
            return Err(self.addresses.refused());
        };
        let (device, home, bytes) = (managed.device.clone(), managed.home, managed.bytes);
        self.all_idle(&self.here(call))?;
        let number = device.number();
        let stream = Arc::clone(&self.placements.stream);
        let before = self.addresses.managed.find(address);
        let placed = self.change(
            call,
            move |registrations| {
                let range = (address, home, bytes);
                place(registrations, &window, &*device, &stream, range)
            },
            move |session, placed| {
                if let Some(managed) = session.placements.all.get_mut(&address) {
                    // Lost memory stays as it is until the session ends, and so does its home.
                    managed.changing = matches!(placed, Placed::Lost(_));
                    managed.placed = matches!(placed, Placed::Device);
                }
                match placed {
                    Placed::Device => {
                        session.addresses.device.insert_of(number, address, bytes);
                        session.counters.add(Counter::BytesToDevice, bytes);
                        Ok(())
                    }
                    Placed::Home(error) => {
                        // Graphs that name it find the same home there.
                        if let Some(before) = before {
                            session.addresses.managed.put_back(before);
                        }
                        Err(error)
                    }
                    Placed::Lost(error) => {
                        tracing::warn!("managed memory at {address:#x} is lost");
                        Err(error)
                    }
                }
            },
        );
        if placed.is_ok() {
            if let Some(managed) = self.placements.all.get_mut(&address) {
                managed.changing = true;
            }
            self.addresses.managed.remove(address);
        }
        placed
    }
}

impl Serve<ManagedFetch> for Session {
    fn serve(&mut self, call: &Call, message: &ManagedFetch) -> Outcome<()> {
        let (address, bytes) = (message.address.0, message.bytes);
        let concurrent = message.concurrent != 0;
        let Some(part) = self.placements.part(address, bytes) else {
            return Err(self.addresses.refused());
        };
        if !concurrent {
            self.all_idle(&self.here(call))?;
        }
        let twins = Arc::clone(&self.placements.twins);
        if concurrent {
            let mut twins = twins.lock();
            let is_full = twins.len() >= TWINS && !twins.contains_key(&address);
            if bytes > SEGMENT_BYTES as u64 || is_full {
                return Err(CuResult::OUT_OF_MEMORY);
            }
            // The place is the job's from here on. No push takes a twin of no bytes for one.
            twins.insert(address, Vec::new());
        }
        self.counters.add(Counter::BytesToHost, bytes);
        let stream = Arc::clone(&self.placements.stream);
        let (home, mirror, users) = (part.home, part.mirror, part.users);
        self.order(call, part.device, move |device| {
            let copied = copy(device, &stream, home, address, bytes)
                .and_then(|()| remember(device, &stream, mirror, address, bytes));
            let mut twins = twins.lock();
            twins.remove(&address);
            copied?;
            if concurrent {
                let mut twin = vec![0; usize::try_from(bytes).unwrap_or(0)];
                read_home(home, &mut twin);
                twins.insert(address, twin);
            }
            drop(users);
            Ok(())
        })
    }
}

impl Serve<ManagedPush> for Session {
    fn serve(&mut self, call: &Call, message: &ManagedPush) -> Outcome<()> {
        let (address, bytes) = (message.address.0, message.bytes);
        let Some(part) = self.placements.part(address, bytes) else {
            return Err(self.addresses.refused());
        };
        self.counters.add(Counter::BytesToDevice, bytes);
        let stream = Arc::clone(&self.placements.stream);
        let twin = self.placements.twins.lock().remove(&address);
        let twin = twin.filter(|twin| twin.len() as u64 == bytes);
        let (home, mirror, users) = (part.home, part.mirror, part.users);
        self.order(call, part.device, move |device| {
            let pushed = match twin {
                None => copy(device, &stream, address, home, bytes)
                    .and_then(|()| remember(device, &stream, mirror, address, bytes)),
                Some(twin) => {
                    let stream = on(device, &stream)?;
                    changes(home, &twin)
                        .into_iter()
                        .try_for_each(|(offset, data)| {
                            device.write(address + offset, &data, stream)
                        })
                        .and_then(|()| device.synchronize_stream(stream))
                }
            };
            drop(users);
            pushed
        })
    }
}

/// Returns the bytes of a home that differ from its twin, as offsets and contents.
fn changes(home: u64, twin: &[u8]) -> Vec<(u64, Vec<u8>)> {
    let mut found: Vec<(u64, Vec<u8>)> = Vec::new();
    let mut buffer = [0; STEP];
    for (index, before) in twin.chunks(STEP).enumerate() {
        let offset = index * STEP;
        let now = &mut buffer[..before.len()];
        read_home(home + offset as u64, now);
        if now == before {
            continue;
        }
        for (position, (now, before)) in now.iter().zip(before).enumerate() {
            let at = (offset + position) as u64;
            match found.last_mut() {
                _ if now == before => {}
                Some((start, data)) if *start + data.len() as u64 == at => data.push(*now),
                _ => found.push((at, vec![*now])),
            }
        }
    }
    found
}
