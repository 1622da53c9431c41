//! A backend VM that serves several tenants, whose windows attach to it and detach from it while it runs.
//!
//! The VM has an [aperture](wormhole_monitor::Aperture) with a slot for each window. A relay in the VM waits for the tenant
//! of each slot on a stream of its own, which is the slot's offer. Attaching maps the tenant's memory in the slot, then
//! sends the message on by the stream. When a tenant leaves, the relay gets a [`WindowUnmap`](Message::WindowUnmap). It ends
//! the tenant at the supervisor, waits until all of its workers have ended and no process of the VM refers to the slot's
//! device, and sends the same message back, the acknowledgement. Then the memory is removed from the slot, and both streams
//! are closed: the relay may offer the slot again, and the launcher has its window for itself.
//!
//! Without that message in time the memory is removed as well, since the host's page tables decide what the VM reaches, and
//! the slot has no tenant any more.

use std::fs::File;
use std::io;
use std::net::Shutdown;
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::sockopt::set_socket_oobinline;
use wormhole_images::ports;
use wormhole_link::channel::Incoming;
use wormhole_link::made;
use wormhole_link::users::{Own, peer_of};
use wormhole_link::{chain, raise_descriptor_limit, tasks, usage};
use wormhole_lock::{Condvar, Mutex};
use wormhole_monitor::devices::vsock::Accepted;
use wormhole_monitor::stats::VmStats;
use wormhole_monitor::{Aperture, ConnectRequest, KvmCaps, MemoryError, Refused, WindowConfig};
use wormhole_ring::control::{Attach, Message, Refusal, WindowRun};

use super::slots::{SlotTable, Taken};
use super::usage::{Relay, Usages};
use super::{
    BackendVmError, Machine, Options, Running, SEND_LIMIT, START_LIMIT, attend, descriptor_of,
    make, stream_of,
};
use crate::backend::{receive, send};
use crate::carrying::Places;
use crate::run::confinement;
use crate::say;
use crate::wait::until_readable;
use crate::{listener, private};

/// Time within which a launcher that connects sends its window, all of its message.
const HELLO_LIMIT: Duration = Duration::from_secs(10);
/// Most connections of one user at a time, beside as many as the VM has slots. Further ones of that user are closed.
const WAITING: usize = 64;
/// Part of this process's open files that the connections of one user take at most while they wait to be closed.
const CLOSING: u64 = 8;
/// Open files of a process whose limit is unknown.
const FEW_FILES: u64 = 1024;
/// Time within which a launcher that leaves reads the reports of its sessions.
const REPORT_LIMIT: Duration = Duration::from_secs(20);
/// Time within which the VM acknowledges the end of a tenant: longer than its supervisor waits for workers.
const DETACH_LIMIT: Duration = Duration::from_secs(90);
/// Pause after a failed accept.
const RETRY: Duration = Duration::from_millis(10);

/// Reason why a tenant gets no slot.
#[derive(Debug, thiserror::Error)]
enum Unattached {
    #[error(
        "a backend VM takes static windows alone: choose it by the name that `wormhole backend start` gave it"
    )]
    NotStatic,
    #[error("all {slots} slots of the backend VM have a window{}", in_quarantine(*.quarantined))]
    Full { slots: usize, quarantined: usize },
    #[error("no slot of the backend VM has become free within {} s", START_LIMIT.as_secs())]
    Late,
    #[error(
        "the backend VM's process has no descriptor left for a tenant: try later, or start it with a higher limit (`ulimit -Hn`)"
    )]
    Descriptor(#[source] io::Error),
    #[error("the backend VM's process cannot start a thread for a tenant: try later")]
    Thread(#[source] io::Error),
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

fn in_quarantine(count: usize) -> String {
    match count {
        0 => String::new(),
        _ => format!(
            " or are in quarantine ({count}) until the VM acknowledges the end of a tenant: try later or start it anew"
        ),
    }
}

/// Serves tenants that connect to the socket at `path` until the VM ends.
pub fn run(options: &Options, path: &Path) -> Result<(), BackendVmError> {
    match wormhole_monitor::probe() {
        KvmCaps::Linux => {}
        KvmCaps::Denied { why } | KvmCaps::Missing { why } | KvmCaps::PayloadOnly { why } => {
            return Err(BackendVmError::Kvm(why));
        }
    }
    let listener = bind(path).map_err(|source| BackendVmError::Listen {
        path: path.to_owned(),
        source,
    })?;
    let slots = options.vm.slots();
    let desk = Arc::new(Desk::new(slots.count));
    let (output, outputs) = channel();
    let accept = acceptor(Arc::clone(&desk), output);
    let arguments = ["relay", "--shared", "--device", &options.device.device];
    let arguments = arguments.map(str::to_owned).into_iter();
    // Each interrupt of a device takes a descriptor. The call is one that a confined process does not have.
    let files = raise_descriptor_limit().map_or(FEW_FILES, |files| files.unwrap_or(u64::MAX));
    let vm = make(
        options,
        Machine {
            window: WindowConfig::Aperture(slots),
            window_bytes: slots.bytes,
            memory: options.vm.memory(),
            vcpus: options.vm.cpus(),
            passed_through: options.vm.pci.clone(),
            arguments: arguments
                .chain(options.vm.limits(&options.operator).arguments())
                .collect(),
        },
        accept,
    )?;
    let aperture = vm.aperture().ok_or(BackendVmError::NoWindow)?;
    // It needs system calls that a confined process does not have.
    let own = Own::get();
    // All files are open by now.
    confinement::enter_listening(!options.vm.pci.is_empty())?;
    let (stop, stats) = (vm.stop_handle(), vm.stats());
    let attendant = tasks::spawn("output", move || attend(&outputs));
    let ended = tasks::spawn("vm", move || vm.run());
    let running = Running {
        stop,
        threads: Some((
            ended.map_err(BackendVmError::Thread)?,
            attendant.map_err(BackendVmError::Thread)?,
        )),
    };
    let service = Arc::new(Service {
        desk,
        memory: Box::new(aperture),
        stats: Some(stats),
        usages: Arc::default(),
        hello_limit: HELLO_LIMIT,
        send_limit: SEND_LIMIT,
        detach_limit: DETACH_LIMIT,
        report_limit: REPORT_LIMIT,
    });
    let most = usize::try_from(slots.count).map_or(WAITING, |slots| slots + WAITING);
    let users = Users::new(most, own, files).map_err(BackendVmError::Thread)?;
    tasks::spawn("accept", move || {
        accept_tenants(&listener, &service, &users);
    })
    .map_err(BackendVmError::Thread)?;
    // The VM ends by itself, or with this process.
    Err(running.wait().unwrap_or(BackendVmError::Gone))
}

/// Listens at `path` for root and this user. Replaces a socket that no process listens on any more.
fn bind(path: &Path) -> io::Result<UnixListener> {
    if let Ok((left, _)) = made::Place::of(path)?.made()
        && listener::is_left(path)
    {
        left.remove();
    }
    private::listener(path)
}

/// Users of connections: root and the VM's user, who have places of their own each, and all others, who have none.
#[derive(Debug)]
struct Users {
    process: Own,
    root: User,
    own: User,
    others: User,
}

impl Users {
    /// `files` is the number of files that this process may open.
    fn new(most: usize, process: Own, files: u64) -> io::Result<Self> {
        let user = |most| User::new(most, files / CLOSING);
        Ok(Self {
            process,
            root: user(most)?,
            own: user(most)?,
            others: user(0)?,
        })
    }

    /// Returns the user of a connection. The socket is open to root and this user, but root can give it another mode.
    fn of(&self, stream: &UnixStream) -> &User {
        match peer_of(stream) {
            Ok(peer) if peer.user == 0 => &self.root,
            Ok(peer) if self.process.believes(peer.user) => &self.own,
            _ => &self.others,
        }
    }
}

/// A user's places for connections, and the thread that closes the user's further connections.
#[derive(Debug)]
struct User {
    free: Arc<AtomicUsize>,
    closing: Sender<(UnixStream, Option<Place>)>,
    /// Number of connections that the thread has not closed.
    unclosed: Arc<AtomicU64>,
    most_unclosed: u64,
}

impl User {
    fn new(most: usize, most_unclosed: u64) -> io::Result<Self> {
        let (closing, closed) = channel::<(UnixStream, Option<Place>)>();
        let unclosed = Arc::new(AtomicU64::new(0));
        let left = Arc::clone(&unclosed);
        tasks::spawn("close", move || {
            for (stream, place) in closed {
                drop(stream);
                drop(place);
                left.fetch_sub(1, Ordering::Relaxed);
            }
        })?;
        Ok(Self {
            free: Arc::new(AtomicUsize::new(most)),
            closing,
            unclosed,
            most_unclosed,
        })
    }

    /// Takes a place, if one is free.
    fn take(&self) -> Option<Place> {
        let less = |free: usize| free.checked_sub(1);
        let taken = self
            .free
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        taken.ok().map(|_| Place(Arc::clone(&self.free)))
    }

    /// Closes a connection, on the user's thread: it may bring descriptors whose close never ends. Its place is free then.
    /// Waits only if those before it take the user's part of the open files.
    fn close(&self, stream: UnixStream, place: Option<Place>) {
        while self.unclosed.load(Ordering::Relaxed) >= self.most_unclosed {
            std::thread::sleep(RETRY);
        }
        self.unclosed.fetch_add(1, Ordering::Relaxed);
        // The thread lives as long as this.
        let _ = self.closing.send((stream, place));
    }
}

/// A place that is taken. A connection has it until all of its descriptors are closed.
#[derive(Debug)]
struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Gives each connection a thread, which closes what the connection brings: a close that never ends keeps a thread and a
/// place of its user, and delays no other user.
fn accept_tenants(listener: &UnixListener, service: &Arc<Service>, users: &Users) {
    loop {
        let Ok((stream, _)) = listener.accept() else {
            // No descriptor is free, or the launcher has closed the connection.
            std::thread::sleep(RETRY);
            continue;
        };
        let user = users.of(&stream);
        let place = user.take();
        if place.is_none() {
            user.close(stream, None);
            continue;
        }
        let service = Arc::clone(service);
        // Without a thread the closure is dropped here, so it has no connection before it runs.
        let (give, given) = channel::<(UnixStream, Option<Place>)>();
        let served = tasks::spawn("tenant", move || {
            if let Ok((stream, place)) = given.recv() {
                service.serve(stream);
                drop(place);
            }
        });
        begin(user, served, &give, (stream, place));
    }
}

/// Gives a connection to the thread that was started for it. Without one, it is closed by its user's thread.
fn begin(
    user: &User,
    served: io::Result<JoinHandle<()>>,
    give: &Sender<(UnixStream, Option<Place>)>,
    connection: (UnixStream, Option<Place>),
) {
    let left = match served {
        Ok(_) => give.send(connection).err().map(|unsent| unsent.0),
        Err(error) => {
            say::line(format_args!("backend VM: a tenant is not served: {error}"));
            Some(connection)
        }
    };
    if let Some((stream, place)) = left {
        user.close(stream, place);
    }
}

/// Streams that the VM opens for slots.
#[derive(Debug)]
struct Desk {
    slots: Mutex<SlotTable<UnixStream>>,
    changed: Condvar,
    /// The next control stream of each slot's tenant.
    control: Vec<(SyncSender<UnixStream>, Mutex<Receiver<UnixStream>>)>,
}

impl Desk {
    fn new(count: u32) -> Self {
        let control = (0..count).map(|_| {
            let (sender, receiver) = sync_channel(1);
            (sender, Mutex::new(receiver))
        });
        Self {
            slots: Mutex::new(SlotTable::new(count)),
            changed: Condvar::new(),
            control: control.collect(),
        }
    }

    /// Takes a connection of the VM for a slot.
    fn connect(&self, port: u32, stream: UnixStream) -> Result<(), Refused> {
        let count = u32::try_from(self.control.len()).unwrap_or(0);
        let slot = |first: u32| port.checked_sub(first).filter(|slot| *slot < count);
        if let Some(slot) = slot(ports::SLOT_CONTROL) {
            let control = usize::try_from(slot)
                .ok()
                .and_then(|at| self.control.get(at));
            let (sender, _) = control.ok_or(Refused)?;
            return sender.try_send(stream).map_err(|_| Refused);
        }
        let slot = slot(ports::SLOT).ok_or(Refused)?;
        let is_offered = self.slots.lock().offer(slot, stream);
        self.changed.notify_all();
        is_offered.then_some(()).ok_or(Refused)
    }

    /// Takes a slot for a tenant. Waits for one that may become free without the end of another tenant.
    fn take(&self, limit: Duration) -> Result<(u32, UnixStream), Unattached> {
        let end = Instant::now() + limit;
        let mut slots = self.slots.lock();
        loop {
            match slots.take() {
                Taken::Slot(slot, relay) => return Ok((slot, relay)),
                Taken::None { quarantined } => {
                    return Err(Unattached::Full {
                        slots: self.control.len(),
                        quarantined,
                    });
                }
                Taken::Later => {}
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Unattached::Late);
            }
            slots = self.changed.wait_timeout(slots, left);
        }
    }

    fn leave(&self, slot: u32) {
        self.slots.lock().leave(slot);
        self.changed.notify_all();
    }

    fn end(&self, slot: u32, is_acknowledged: bool) {
        // A stream that came too late is not the next tenant's.
        while self.control_of(slot).is_some() {}
        self.slots.lock().end(slot, is_acknowledged);
        self.changed.notify_all();
    }

    /// Returns the control stream that has arrived for a slot's tenant.
    fn control_of(&self, slot: u32) -> Option<UnixStream> {
        let (_, receiver) = self.control.get(usize::try_from(slot).ok()?)?;
        receiver.lock().try_recv().ok()
    }
}

/// Returns the acceptor of the VM's connections. Each output is opened once.
fn acceptor(
    desk: Arc<Desk>,
    output: Sender<(u32, UnixStream)>,
) -> impl FnMut(ConnectRequest) -> Result<Accepted, Refused> + Send {
    let mut open = vec![ports::STDOUT, ports::STDERR, ports::REPORT];
    move |request| {
        let (theirs, ours) = UnixStream::pair().map_err(|_| Refused)?;
        match open.iter().position(|port| *port == request.port) {
            Some(at) => {
                let port = open.swap_remove(at);
                output.send((port, ours)).map_err(|_| Refused)?;
            }
            None => desk.connect(request.port, ours)?,
        }
        Ok(theirs.into())
    }
}

/// Memory of the VM's slots.
trait SlotMemory: Send + Sync {
    /// Maps the first `bytes` of a file in a slot.
    fn attach(&self, slot: u32, file: &OwnedFd, bytes: u64) -> Result<(), MemoryError>;

    /// Puts zero pages in the place of what is mapped in a slot.
    fn detach(&self, slot: u32) -> Result<(), MemoryError>;
}

impl SlotMemory for Aperture {
    fn attach(&self, slot: u32, file: &OwnedFd, bytes: u64) -> Result<(), MemoryError> {
        Aperture::attach(self, slot, file, bytes)
    }

    fn detach(&self, slot: u32) -> Result<(), MemoryError> {
        Aperture::detach(self, slot)
    }
}

/// First message of a connection.
enum First {
    /// The message of a launcher.
    Attach(Attach),
    /// The message of a client of `wormhole stats`.
    AskUsage,
}

/// Messages of a launcher. All descriptors that come with them are received: the kernel would close others while it reads,
/// and wait for that. They stay here until the owner drops this.
struct Orders {
    stream: Arc<UnixStream>,
    incoming: Incoming,
    /// A descriptor that no message takes.
    foreign: Option<OwnedFd>,
}

impl Orders {
    fn new(stream: Arc<UnixStream>) -> Self {
        // A byte out of band is skipped by a read otherwise, and its descriptors are closed in the read.
        let _ = set_socket_oobinline(&*stream, true);
        Self {
            stream,
            incoming: Incoming::new(true),
            foreign: None,
        }
    }

    /// Receives the first message, and the window that belongs to it.
    fn first(&mut self, window: &mut Option<OwnedFd>, limit: Duration) -> Option<First> {
        self.wait(Some(Instant::now() + limit))?;
        let first = match self.incoming.take().ok()?? {
            Message::Attach(attach) => First::Attach(attach),
            Message::AskUsage => First::AskUsage,
            _ => return None,
        };
        *window = self.incoming.descriptor();
        let is_lost = self.incoming.was_lost();
        (self.brings_none() && !is_lost).then_some(first)
    }

    /// Receives a message that takes no descriptor. Without one, the launcher has ended or broken the protocol.
    fn next(&mut self, end: Option<Instant>) -> Option<Message<'_>> {
        self.wait(end)?;
        match self.brings_none() {
            true => self.incoming.take().ok()?,
            false => None,
        }
    }

    /// Returns whether no further descriptor has come, nor one for which this process had no room.
    fn brings_none(&mut self) -> bool {
        self.foreign = self.incoming.descriptor();
        self.foreign.is_none() && !self.incoming.was_lost()
    }

    /// Waits until a message is there, as a whole.
    fn wait(&mut self, end: Option<Instant>) -> Option<()> {
        while !self.incoming.is_ready().ok()? {
            if !until_readable(&*self.stream, end).ok()? {
                return None;
            }
            self.incoming.fill(&*self.stream).ok()?;
        }
        Some(())
    }

    /// Ends the connection, for the launcher to see, before anything is closed.
    fn end(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// Serves tenants.
struct Service {
    desk: Arc<Desk>,
    memory: Box<dyn SlotMemory>,
    /// Statistics of the VM.
    stats: Option<VmStats>,
    usages: Arc<Usages>,
    hello_limit: Duration,
    send_limit: Duration,
    detach_limit: Duration,
    report_limit: Duration,
}

impl Service {
    /// Serves a tenant until it leaves. Descriptors that it brought are closed at the end, when its slot is free: the close
    /// of one may never end.
    fn serve(&self, tenant: UnixStream) {
        let tenant = Arc::new(tenant);
        let mut orders = Orders::new(Arc::clone(&tenant));
        let mut window = None;
        let mut quarantine = None;
        let streams = Arc::new(Places::of_one_among(self.desk.control.len()));
        match (orders.first(&mut window, self.hello_limit), &window) {
            (Some(First::Attach(attach)), Some(window)) => match self.attach(&attach, window) {
                Ok(attached) => {
                    quarantine = self.pass(attached, &attach, tenant, &mut orders, &streams);
                }
                Err(error) => {
                    let refused = Message::Refused {
                        code: Refusal::Protocol as u32,
                        reason: &chain(&error),
                    };
                    // Its launcher may be gone.
                    let _ = send(&tenant, &refused, &[]);
                }
            },
            (Some(First::AskUsage), None) => self.answer(&tenant, &mut orders),
            _ => {}
        }
        orders.end();
        streams.end();
        drop(window);
        if let Some(quarantine) = quarantine {
            self.wait_for_late_end(&quarantine);
        }
        streams.clear();
    }

    /// Waits until the VM acknowledges the end of a tenant after all, and gives its slot back. Waits until the VM ends if it does
    /// not. The place of the tenant's connection stays taken, so that a user's tenants in quarantine are counted.
    fn wait_for_late_end(&self, quarantine: &Quarantine) {
        let Quarantine {
            slot,
            relay,
            acknowledgement,
        } = quarantine;
        if acknowledgement.recv() == Ok(true) {
            // The tenant's workers have written to the empty slot until now.
            match self.memory.detach(*slot) {
                Ok(()) => {
                    self.desk.end(*slot, true);
                    say::line(format_args!(
                        "backend VM: slot {slot} leaves quarantine: the VM has acknowledged the end of its tenant"
                    ));
                }
                Err(error) => {
                    say::line(format_args!("backend VM: slot {slot}: {}", chain(&error)));
                }
            }
        }
        let _ = relay.stream().shutdown(Shutdown::Both);
    }

    /// Maps a tenant's window in a slot, once there is all that the tenant needs of this process.
    fn attach(&self, attach: &Attach, window: &OwnedFd) -> Result<Attached, Unattached> {
        if attach.static_window == 0 {
            return Err(Unattached::NotStatic);
        }
        let (patience, waits) = UnixStream::pair().map_err(Unattached::Descriptor)?;
        let (answers, given) = channel::<Answers>();
        let answer = move || {
            if let Ok(answers) = given.recv() {
                answers();
            }
        };
        tasks::spawn("answers", answer).map_err(Unattached::Thread)?;
        let (slot, relay) = self.desk.take(START_LIMIT)?;
        match self.memory.attach(slot, window, attach.window_size) {
            Ok(()) => Ok(Attached {
                slot,
                relay,
                patience,
                waits,
                answers,
            }),
            Err(error) => {
                // The VM has not heard of this tenant.
                let is_empty = self.memory.detach(slot).is_ok();
                self.desk.end(slot, is_empty);
                let _ = is_empty && self.desk.slots.lock().offer(slot, relay);
                self.desk.changed.notify_all();
                Err(error.into())
            }
        }
    }

    /// Answers a client's questions until it ends.
    fn answer(&self, client: &UnixStream, orders: &mut Orders) {
        loop {
            let usages = self.usages.ask();
            // Numbers by name: nothing that cannot be written.
            let text = serde_json::to_string(&usages).unwrap_or_default();
            let sent = usage::parts(&text).try_for_each(|(more, tenants)| {
                send(client, &Message::Usage { more, tenants }, &[])
            });
            if sent.is_err() || !matches!(orders.next(None), Some(Message::AskUsage)) {
                return;
            }
        }
    }

    /// Returns what passes the relay's answers on to the launcher, until the relay has ended.
    fn answers(
        &self,
        slot: u32,
        relay: &Arc<Relay>,
        launcher: Launcher,
        acknowledged: SyncSender<bool>,
        streams: &Arc<Places>,
    ) -> Answers {
        let (relay, desk, usages) = (
            Arc::clone(relay),
            Arc::clone(&self.desk),
            Arc::clone(&self.usages),
        );
        let stats = self.stats.clone();
        let streams = Arc::clone(streams);
        Box::new(move || {
            let figures = stats.as_ref().and_then(figures);
            let control = || carried(desk.control_of(slot)?, &streams);
            let takes = |message: &Message<'_>| match message {
                // Its launcher takes no question before this, nor does the relay before the window.
                Message::Attached => {
                    usages.enter(slot, &launcher.stream, &relay);
                    false
                }
                Message::Usage { more, tenants } => {
                    usages.answered(slot, *more, tenants);
                    true
                }
                _ => false,
            };
            let is_over = pass_answers(relay.stream(), &launcher, control, figures, takes);
            usages.leave(slot);
            // Ends the other direction as well, if it has not ended.
            let _ = launcher.stream.shutdown(Shutdown::Read);
            let _ = acknowledged.send(is_over);
        })
    }

    /// Passes messages between a launcher and the relay of its slot, until one of them ends. Empties the slot. Returns its
    /// quarantine if the VM may still acknowledge the tenant's end.
    fn pass(
        &self,
        attached: Attached,
        attach: &Attach,
        tenant: Arc<UnixStream>,
        orders: &mut Orders,
        streams: &Arc<Places>,
    ) -> Option<Quarantine> {
        let Attached {
            slot,
            relay,
            patience,
            waits,
            answers,
        } = attached;
        let relay = Arc::new(Relay::new(relay));
        let launcher = Launcher {
            stream: Arc::clone(&tenant),
            waits,
        };
        let (acknowledged, acknowledgement) = sync_channel(1);
        // The thread waits for it.
        let _ = answers.send(self.answers(slot, &relay, launcher, acknowledged, streams));
        let begun = relay.send(&Message::Attach(*attach), self.send_limit);
        if let Err(error) = &begun {
            say::line(format_args!(
                "backend VM: a tenant is not served: {}",
                chain(error)
            ));
        }
        // Bytes that are no message of a launcher end the tenant, as its launcher's end does. So does a message that the VM
        // does not take: it could keep a window from being removed otherwise.
        while begun.is_ok()
            && let Some(message) = orders.next(None)
            && !matches!(message, Message::WindowUnmap(_) | Message::AskUsage)
            && relay.send(&message, self.send_limit).is_ok()
        {}
        self.desk.leave(slot);
        let end = Instant::now();
        let left = |limit: Duration| limit.saturating_sub(end.elapsed());
        // Fails if the VM has ended or takes no message, which is no acknowledgement.
        let over = Message::WindowUnmap(WindowRun::default());
        let _ = relay.send(&over, self.send_limit);
        let is_over = acknowledgement
            .recv_timeout(left(self.report_limit))
            .or_else(|_| {
                // A launcher that does not read must not hold up its own end.
                drop(patience);
                acknowledgement.recv_timeout(left(self.report_limit + self.detach_limit))
            })
            .unwrap_or(false);
        let emptied = self.memory.detach(slot);
        if let Err(error) = &emptied {
            say::line(format_args!("backend VM: slot {slot}: {}", chain(error)));
            if matches!(error, MemoryError::Reach(_)) {
                // The tenant would get memory back that a device still reaches. With this process the kernel ends that.
                say::line(format_args!(
                    "backend VM: the VM ends, since a device still reaches a tenant's memory"
                ));
                std::process::exit(1);
            }
        }
        if !is_over || emptied.is_err() {
            say::line(format_args!(
                "backend VM: slot {slot} is in quarantine: the VM has not acknowledged the end of its tenant"
            ));
        }
        self.desk.end(slot, is_over && emptied.is_ok());
        let _ = tenant.shutdown(Shutdown::Both);
        if !is_over && emptied.is_ok() {
            self.usages.leave(slot);
            return Some(Quarantine {
                slot,
                relay,
                acknowledgement,
            });
        }
        let _ = relay.stream().shutdown(Shutdown::Both);
        None
    }
}

/// Returns the launcher's end of a control stream, from which the tenant's own threads carry to the VM's device. `None` if the
/// tenant has too many.
fn carried(stream: UnixStream, streams: &Places) -> Option<UnixStream> {
    let (theirs, ours) = UnixStream::pair().ok()?;
    streams.carry(stream, || Ok(ours)).ok()?;
    Some(theirs)
}

/// Passes a relay's answers on.
type Answers = Box<dyn FnOnce() + Send>;

/// A slot with a tenant's window. The VM has not heard of the tenant.
struct Attached {
    slot: u32,
    relay: UnixStream,
    /// Dropped when a launcher that does not read is not waited for any more.
    patience: UnixStream,
    /// The other end.
    waits: UnixStream,
    /// To the thread that passes the relay's answers on.
    answers: Sender<Answers>,
}

/// A launcher to which the relay's answers are sent.
struct Launcher {
    stream: Arc<UnixStream>,
    /// Ends when the launcher is not waited for any more. The end of its own stream would say that the window is removed.
    waits: UnixStream,
}

impl Launcher {
    /// Sends an answer, once the stream has room for it. A launcher that is gone, or not waited for any more, needs none.
    fn send(&self, answer: &Message<'_>, descriptors: &[RawFd]) {
        let mut events = [
            PollFd::new(&*self.stream, PollFlags::OUT),
            PollFd::new(&self.waits, PollFlags::IN),
        ];
        while poll(&mut events, None) == Err(Errno::INTR) {}
        // No one else sends on the stream meanwhile.
        if events[0].revents().contains(PollFlags::OUT) {
            let _ = send(&self.stream, answer, descriptors);
        }
    }
}

/// An empty slot whose tenant's end the VM has not acknowledged in time.
struct Quarantine {
    slot: u32,
    relay: Arc<Relay>,
    /// Brings whether the VM has acknowledged the end, once its stream brings nothing further.
    acknowledgement: Receiver<bool>,
}

/// Returns the figures of a VM's processor. A VM with several has no single file of them.
fn figures(stats: &VmStats) -> Option<&File> {
    match stats.vcpus() {
        [vcpu] => Some(vcpu.file()),
        _ => None,
    }
}

/// Passes the relay's messages to the launcher, with the descriptors that belong to them, but those that `takes` keeps. Returns whether the relay has
/// acknowledged the end of the tenant.
fn pass_answers(
    relay: &UnixStream,
    launcher: &Launcher,
    control: impl Fn() -> Option<UnixStream>,
    figures: Option<&File>,
    takes: impl Fn(&Message<'_>) -> bool,
) -> bool {
    let mut body = Vec::new();
    while let Ok(Some((message, _))) = receive(relay, &mut body) {
        if matches!(message, Message::WindowUnmap(_)) {
            return true;
        }
        if takes(&message) {
            continue;
        }
        let stream = stream_of(&message, &control);
        let descriptor = descriptor_of(&message, stream.as_ref(), figures);
        // Whether it takes them or not, the relay's last message counts.
        launcher.send(&message, descriptor.as_slice());
    }
    false
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::{AsFd, AsRawFd};
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    use wormhole_link::usage::{TenantUsage, Usage};
    use wormhole_ring::control::Stream;

    use super::*;
    use crate::carrying::tests::lingering;

    /// Slots whose tenants are noted.
    #[derive(Debug, Default)]
    struct Noted(Mutex<Vec<(u32, &'static str)>>);

    impl SlotMemory for Arc<Noted> {
        fn attach(&self, slot: u32, _: &OwnedFd, bytes: u64) -> Result<(), MemoryError> {
            if bytes > 4096 {
                return Err(MemoryError::Larger { bytes, slot: 4096 });
            }
            self.0.lock().push((slot, "attached"));
            Ok(())
        }

        fn detach(&self, slot: u32) -> Result<(), MemoryError> {
            self.0.lock().push((slot, "detached"));
            Ok(())
        }
    }

    const LONG: Duration = Duration::from_secs(60);
    /// Number of open files.
    const LIMIT: u64 = 1024;

    /// A service without a VM.
    fn service(count: u32, limit: Duration) -> (Arc<Service>, Arc<Noted>) {
        let noted = Arc::new(Noted::default());
        let service = Service {
            desk: Arc::new(Desk::new(count)),
            memory: Box::new(Arc::clone(&noted)),
            stats: None,
            usages: Arc::default(),
            hello_limit: LONG,
            send_limit: limit,
            detach_limit: limit,
            report_limit: limit,
        };
        (Arc::new(service), noted)
    }

    /// Offers a slot, and returns the relay's end of its stream.
    fn offer(service: &Service, slot: u32) -> UnixStream {
        let (relay, ours) = UnixStream::pair().unwrap();
        service.desk.connect(ports::SLOT + slot, ours).unwrap();
        relay
    }

    /// Connects a launcher that attaches a window of this size.
    fn launch(service: &Arc<Service>, window_size: u64) -> (UnixStream, JoinHandle<()>) {
        let (launcher, tenant) = UnixStream::pair().unwrap();
        attach(&launcher, window_size);
        let service = Arc::clone(service);
        (launcher, std::thread::spawn(move || service.serve(tenant)))
    }

    /// Sends a launcher's first message.
    fn attach(launcher: &UnixStream, window_size: u64) {
        let attach = Attach {
            window_size,
            static_window: 1,
            ..Attach::default()
        };
        let window = tempfile::tempfile().unwrap();
        send(launcher, &Message::Attach(attach), &[window.as_raw_fd()]).unwrap();
    }

    /// Returns the name of the next message, and its file.
    fn next(stream: &UnixStream) -> Option<(&'static str, Option<File>)> {
        let mut body = Vec::new();
        let received = receive(stream, &mut body).unwrap();
        received.map(|(message, file)| (message.name(), file))
    }

    fn name(stream: &UnixStream) -> Option<&'static str> {
        next(stream).map(|(name, _)| name)
    }

    const OVER: Message<'static> = Message::WindowUnmap(WindowRun {
        session: 0,
        first: 0,
        count: 0,
    });

    #[test]
    fn a_tenant_gets_its_control_streams_and_leaves_when_the_vm_has_acknowledged() {
        let (service, noted) = service(1, LONG);
        for _ in 0..10 {
            let relay = offer(&service, 0);
            let (launcher, served) = launch(&service, 4096);
            assert_eq!(name(&relay), Some("Attach"));
            assert_eq!(*noted.0.lock(), [(0, "attached")]);
            send(&relay, &Message::Attached, &[]).unwrap();
            assert_eq!(name(&launcher), Some("Attached"));
            let asked = Message::Stream(Stream { local: 0 });
            send(&launcher, &asked, &[]).unwrap();
            assert_eq!(name(&relay), Some("Stream"));
            let (mut guest, control) = UnixStream::pair().unwrap();
            service.desk.connect(ports::SLOT_CONTROL, control).unwrap();
            send(&relay, &asked, &[]).unwrap();
            let (_, stream) = next(&launcher).unwrap();
            UnixStream::from(OwnedFd::from(stream.unwrap()))
                .write_all(b"hello")
                .unwrap();
            let mut said = String::new();
            guest.read_to_string(&mut said).unwrap();
            assert_eq!(said, "hello");
            launcher.shutdown(Shutdown::Write).unwrap();
            assert_eq!(name(&relay), Some("WindowUnmap"));
            // A stream that the next tenant must not get.
            let (_, late) = UnixStream::pair().unwrap();
            service.desk.connect(ports::SLOT_CONTROL, late).unwrap();
            send(&relay, &Message::SessionReport("{}"), &[]).unwrap();
            assert_eq!(name(&launcher), Some("SessionReport"));
            assert_eq!(*noted.0.lock(), [(0, "attached")], "not acknowledged");
            send(&relay, &OVER, &[]).unwrap();
            assert_eq!(name(&launcher), None);
            served.join().unwrap();
            let events = std::mem::take(&mut *noted.0.lock());
            assert_eq!(events, [(0, "attached"), (0, "detached")]);
            assert!(service.desk.control_of(0).is_none());
            assert_eq!(name(&relay), None, "it may offer the slot again");
        }
    }

    #[test]
    fn a_slot_is_not_used_again_until_the_end_of_its_tenant_is_acknowledged() {
        let limit = Duration::from_millis(20);
        for has_ended in [false, true] {
            let (service, noted) = service(2, limit);
            let first = offer(&service, 0);
            let (launcher, first_served) = launch(&service, 4096);
            assert_eq!(name(&first), Some("Attach"));
            let first = (!has_ended).then_some(first);
            drop(launcher);
            while service.desk.slots.lock().quarantined() == 0 {
                std::thread::yield_now();
            }
            // The tenant's memory is out of the VM's reach all the same.
            let events = [(0, "attached"), (0, "detached")];
            assert_eq!(*noted.0.lock(), events);
            let (_, ours) = UnixStream::pair().unwrap();
            assert!(service.desk.connect(ports::SLOT, ours).is_err());
            let relay = offer(&service, 1);
            let (other, served) = launch(&service, 4096);
            assert_eq!(name(&relay), Some("Attach"));
            let (refused, _) = launch(&service, 4096);
            let mut body = Vec::new();
            let (message, _) = receive(&refused, &mut body).unwrap().unwrap();
            assert!(
                matches!(message, Message::Refused { reason, .. } if reason.contains("quarantine (1)")),
                "{message:?}"
            );
            drop(other);
            assert_eq!(name(&relay), Some("WindowUnmap"));
            send(&relay, &OVER, &[]).unwrap();
            served.join().unwrap();
            if let Some(late) = &first {
                assert_eq!(name(late), Some("WindowUnmap"), "the request");
                send(late, &OVER, &[]).unwrap();
                assert_eq!(name(late), None, "it may offer the slot again");
                let emptied = noted
                    .0
                    .lock()
                    .iter()
                    .filter(|event| **event == (0, "detached"))
                    .count();
                assert_eq!(
                    emptied, 2,
                    "once more, without what the tenant has written meanwhile"
                );
            }
            first_served.join().unwrap();
            let slots = service.desk.slots.lock().quarantined();
            assert_eq!(slots, usize::from(has_ended));
            if !has_ended {
                let again = offer(&service, 0);
                let (_launcher, _) = launch(&service, 4096);
                assert_eq!(name(&again), Some("Attach"), "the slot has another tenant");
            }
        }
    }

    #[test]
    fn a_launcher_that_reads_nothing_does_not_keep_its_slot() {
        let (service, _) = service(1, LONG);
        let mut service = Arc::into_inner(service).unwrap();
        service.report_limit = Duration::from_millis(20);
        let service = Arc::new(service);
        let relay = offer(&service, 0);
        let (launcher, served) = launch(&service, 4096);
        assert_eq!(name(&relay), Some("Attach"));
        launcher.shutdown(Shutdown::Write).unwrap();
        let text = "x".repeat(1 << 10);
        let relaying = std::thread::spawn(move || {
            // More than the socket holds.
            for _ in 0..1024 {
                send(&relay, &Message::SessionReport(&text), &[]).unwrap();
            }
            send(&relay, &OVER, &[]).unwrap();
            relay
        });
        served.join().unwrap();
        relaying.join().unwrap();
        let slots = service.desk.slots.lock();
        assert_eq!(slots.quarantined(), 0);
    }

    #[test]
    fn a_launcher_sees_no_end_before_its_window_is_removed() {
        let (service, noted) = service(1, Duration::from_millis(100));
        let relay = offer(&service, 0);
        let (launcher, served) = launch(&service, 4096);
        assert_eq!(name(&relay), Some("Attach"));
        launcher.shutdown(Shutdown::Write).unwrap();
        assert_eq!(name(&launcher), None);
        // It is not waited for after the first half of the time, and the VM not after the second.
        assert_eq!(*noted.0.lock(), [(0, "attached"), (0, "detached")]);
        drop(relay);
        served.join().unwrap();
    }

    #[test]
    fn a_vm_that_takes_no_message_does_not_keep_a_window() {
        let (service, noted) = service(1, Duration::from_millis(20));
        let relay = offer(&service, 0);
        let (launcher, served) = launch(&service, 4096);
        let asked = Message::Stream(Stream { local: 0 });
        // Until the streams take no more, and then until the tenant is ended.
        while send(&launcher, &asked, &[]).is_ok() {}
        assert_eq!(*noted.0.lock(), [(0, "attached"), (0, "detached")]);
        assert_eq!(service.desk.slots.lock().quarantined(), 1);
        drop(relay);
        served.join().unwrap();
    }

    #[test]
    fn a_launcher_that_acknowledges_for_the_vm_is_ended() {
        let (service, noted) = service(1, LONG);
        let relay = offer(&service, 0);
        let (launcher, served) = launch(&service, 4096);
        assert_eq!(name(&relay), Some("Attach"));
        send(&launcher, &OVER, &[]).unwrap();
        assert_eq!(name(&relay), Some("WindowUnmap"), "the request");
        assert_eq!(*noted.0.lock(), [(0, "attached")]);
        send(&relay, &OVER, &[]).unwrap();
        served.join().unwrap();
        assert_eq!(*noted.0.lock(), [(0, "attached"), (0, "detached")]);
    }

    #[test]
    fn a_window_that_no_slot_takes_is_refused_and_the_slot_stays_free() {
        let (service, _) = service(1, LONG);
        let relay = offer(&service, 0);
        let (launcher, tenant) = UnixStream::pair().unwrap();
        let window = tempfile::tempfile().unwrap();
        let attach = Message::Attach(Attach::default());
        send(&launcher, &attach, &[window.as_raw_fd()]).unwrap();
        service.serve(tenant);
        let (larger, served) = launch(&service, 8192);
        served.join().unwrap();
        let mut body = Vec::new();
        for (launcher, word) in [(launcher, "static"), (larger, "larger than a slot")] {
            let (message, _) = receive(&launcher, &mut body).unwrap().unwrap();
            assert!(
                matches!(message, Message::Refused { reason, .. } if reason.contains(word)),
                "{message:?}"
            );
        }
        let (launcher, served) = launch(&service, 4096);
        assert_eq!(name(&relay), Some("Attach"));
        drop(launcher);
        assert_eq!(name(&relay), Some("WindowUnmap"));
        send(&relay, &OVER, &[]).unwrap();
        served.join().unwrap();
    }

    /// Sends a byte out of band, with a descriptor.
    fn send_out_of_band(stream: &UnixStream, descriptor: &impl AsFd) {
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = [descriptor.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
        let byte = [io::IoSlice::new(&[0])];
        sendmsg(stream, &byte, &mut control, SendFlags::OOB).unwrap();
    }

    /// Plays the relay to the end of its tenant, and asserts that the slot has another one then.
    fn ends_and_leaves_its_slot(service: &Arc<Service>, relay: &UnixStream, launcher: &UnixStream) {
        assert_eq!(name(relay), Some("WindowUnmap"), "the tenant is ended");
        send(relay, &OVER, &[]).unwrap();
        assert_eq!(name(launcher), None, "it sees its end");
        let again = offer(service, 0);
        let (_other, _) = launch(service, 4096);
        assert_eq!(name(&again), Some("Attach"), "the slot has another tenant");
    }

    #[test]
    fn a_descriptor_that_is_never_closed_keeps_no_slot_of_a_backend_vm() {
        let (service, _) = service(1, LONG);
        let relay = offer(&service, 0);
        let (launcher, served) = launch(&service, 4096);
        assert_eq!(name(&relay), Some("Attach"));
        let (foreign, listener) = lingering();
        let asked = Message::Stream(Stream { local: 0 });
        send(&launcher, &asked, &[foreign.as_raw_fd()]).unwrap();
        // This process's own copy closes as slowly.
        let closing = std::thread::spawn(move || drop(foreign));
        ends_and_leaves_its_slot(&service, &relay, &launcher);
        // Resets the connection, and so ends the closes.
        drop(listener);
        served.join().unwrap();
        closing.join().unwrap();
    }

    #[test]
    fn a_byte_out_of_band_and_its_descriptor_keep_no_slot_of_a_backend_vm() {
        let (service, _) = service(1, LONG);
        let relay = offer(&service, 0);
        let (launcher, tenant) = UnixStream::pair().unwrap();
        attach(&launcher, 4096);
        let (foreign, listener) = lingering();
        send_out_of_band(&launcher, &foreign);
        // Only the connection has it now.
        drop(foreign);
        launcher.shutdown(Shutdown::Write).unwrap();
        let own = Arc::clone(&service);
        let served = std::thread::spawn(move || own.serve(tenant));
        assert_eq!(name(&relay), Some("Attach"));
        ends_and_leaves_its_slot(&service, &relay, &launcher);
        drop(listener);
        served.join().unwrap();
    }

    #[test]
    fn a_client_is_answered_by_the_tenants_of_the_slots() {
        let (service, _) = service(2, LONG);
        let relay = offer(&service, 1);
        let (launcher, served) = launch(&service, 4096);
        assert_eq!(name(&relay), Some("Attach"));
        // A question before the window is attached would come to a relay or a launcher that takes none.
        assert_eq!(service.usages.ask(), []);
        send(&relay, &Message::Attached, &[]).unwrap();
        assert_eq!(name(&launcher), Some("Attached"));
        let (client, tenant) = UnixStream::pair().unwrap();
        let asked = Arc::clone(&service);
        let answering = std::thread::spawn(move || asked.serve(tenant));
        let mut body = Vec::new();
        for requests in [1, 2] {
            send(&client, &Message::AskUsage, &[]).unwrap();
            // It is asked again when its last answer is old.
            assert_eq!(name(&relay), Some("AskUsage"));
            let usage = Usage {
                requests,
                ..Usage::default()
            };
            let tenants = &serde_json::to_string(&usage).unwrap();
            send(&relay, &Message::Usage { more: 0, tenants }, &[]).unwrap();
            let (answer, _) = receive(&client, &mut body).unwrap().unwrap();
            let Message::Usage { more: 0, tenants } = answer else {
                panic!("{answer:?}");
            };
            let usages: Vec<TenantUsage> = serde_json::from_str(tenants).unwrap();
            assert_eq!(
                (usages.len(), usages[0].tenant, usages[0].usage),
                (1, 1, usage)
            );
            std::thread::sleep(super::super::usage::FRESH);
        }
        drop(client);
        answering.join().unwrap();
        // The launcher hears nothing of it, and may not ask.
        send(&launcher, &Message::AskUsage, &[]).unwrap();
        assert_eq!(name(&relay), Some("WindowUnmap"));
        send(&relay, &OVER, &[]).unwrap();
        assert_eq!(name(&launcher), None);
        served.join().unwrap();
    }

    /// Lets a test of this module run in a process of its own, whose limits it changes. Returns false in that process.
    fn passed_in_own_process(test: &str) -> bool {
        const IS_OWN: &str = "WORMHOLE_TEST_IS_OWN";
        if std::env::var_os(IS_OWN).is_some() {
            return false;
        }
        let mut own = std::process::Command::new(std::env::current_exe().unwrap());
        let test = format!("backend_vm::shared::tests::{test}");
        own.args(["--exact", &test]).env(IS_OWN, "");
        let output = own.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        let has_passed = output.status.success() && said.contains("1 passed");
        assert!(has_passed, "{said}");
        true
    }

    /// Leaves this process room for so many further descriptors.
    fn has_room_for(count: u64) {
        let limit = getrlimit(Resource::Nofile);
        let current = limit.maximum;
        setrlimit(Resource::Nofile, Rlimit { current, ..limit }).unwrap();
        let next = File::open("/dev/null").unwrap();
        let next = u64::try_from(next.as_raw_fd()).unwrap();
        let current = Some(next + count);
        setrlimit(Resource::Nofile, Rlimit { current, ..limit }).unwrap();
    }

    #[test]
    fn a_tenant_that_this_process_has_no_descriptor_for_leaves_its_slot_free() {
        if passed_in_own_process(
            "a_tenant_that_this_process_has_no_descriptor_for_leaves_its_slot_free",
        ) {
            return;
        }
        let (service, noted) = service(1, LONG);
        let relay = offer(&service, 0);
        let (launcher, tenant) = UnixStream::pair().unwrap();
        let window = tempfile::tempfile().unwrap();
        let attach = Message::Attach(Attach {
            window_size: 4096,
            static_window: 1,
            ..Attach::default()
        });
        send(&launcher, &attach, &[window.as_raw_fd()]).unwrap();
        // The window alone.
        has_room_for(1);
        service.serve(tenant);
        has_room_for(32);
        let mut body = Vec::new();
        let (message, _) = receive(&launcher, &mut body).unwrap().unwrap();
        assert!(
            matches!(message, Message::Refused { reason, .. } if reason.contains("descriptor")),
            "{message:?}"
        );
        assert!(noted.0.lock().is_empty());
        let (_launcher, _) = launch(&service, 4096);
        assert_eq!(name(&relay), Some("Attach"));
    }

    #[test]
    fn a_launcher_brings_one_descriptor() {
        let (service, noted) = service(1, LONG);
        let relay = offer(&service, 0);
        let (launcher, tenant) = UnixStream::pair().unwrap();
        let window = tempfile::tempfile().unwrap();
        let attach = Message::Attach(Attach {
            window_size: 4096,
            static_window: 1,
            ..Attach::default()
        });
        send(&launcher, &attach, &[window.as_raw_fd(); 2]).unwrap();
        service.serve(tenant);
        assert!(noted.0.lock().is_empty());
        assert_eq!(name(&launcher), None);
        drop(relay);
    }

    #[test]
    fn a_descriptor_that_this_process_has_no_room_for_ends_its_launcher() {
        if passed_in_own_process("a_descriptor_that_this_process_has_no_room_for_ends_its_launcher")
        {
            return;
        }
        let file = tempfile::tempfile().unwrap();
        let attach = Message::Attach(Attach::default());
        for count in [0, 1, 2] {
            let (launcher, tenant) = UnixStream::pair().unwrap();
            let mut orders = Orders::new(Arc::new(tenant));
            let mut window = None;
            // A foreign descriptor is one as well if it does not come.
            let brings = if count == 2 { 1 } else { 2 };
            send(&launcher, &attach, &[file.as_raw_fd(); 2][..brings]).unwrap();
            has_room_for(count);
            let first = orders.first(&mut window, LONG);
            assert_eq!(window.is_some(), count > 0, "{count}");
            assert_eq!(first.is_some(), count == 2, "{count}");
            has_room_for(8);
        }
        let (launcher, tenant) = UnixStream::pair().unwrap();
        let mut orders = Orders::new(Arc::new(tenant));
        let asked = Message::Stream(Stream { local: 0 });
        send(&launcher, &asked, &[]).unwrap();
        assert!(orders.next(None).is_some());
        send(&launcher, &asked, &[file.as_raw_fd()]).unwrap();
        has_room_for(0);
        assert!(orders.next(None).is_none());
    }

    #[test]
    fn a_launcher_that_sends_its_window_byte_by_byte_has_no_more_time() {
        let (service, _) = service(1, LONG);
        let mut service = Arc::into_inner(service).unwrap();
        service.hello_limit = Duration::from_millis(50);
        let (launcher, tenant) = UnixStream::pair().unwrap();
        let served = std::thread::spawn(move || service.serve(tenant));
        let text = "x".repeat(1000);
        let message = Message::SessionReport(&text).to_vec().unwrap();
        let is_cut_off = message.iter().any(|byte| {
            std::thread::sleep(Duration::from_millis(1));
            (&launcher).write_all(&[*byte]).is_err()
        });
        assert!(is_cut_off, "each byte has had the whole limit");
        served.join().unwrap();
    }

    #[test]
    fn a_user_takes_no_place_of_another() {
        let users = Users::new(2, Own::get(), LIMIT).unwrap();
        let mut taken = vec![users.own.take(), users.own.take()];
        assert!(taken.iter().all(Option::is_some));
        assert!(users.own.take().is_none());
        assert!(users.others.take().is_none());
        taken.extend([users.root.take(), users.root.take()]);
        assert!(taken.iter().all(Option::is_some));
        assert!(users.root.take().is_none());
        taken.remove(0);
        assert!(users.own.take().is_some() && users.root.take().is_none());
    }

    #[test]
    fn a_confined_process_of_an_ordinary_user_knows_its_own_connections() {
        const IS_OWN: &str = "WORMHOLE_TEST_IS_CONFINED";
        if std::env::var_os(IS_OWN).is_some() {
            let (stream, _other) = UnixStream::pair().unwrap();
            let process = Own::get();
            confinement::enter_listening(false).unwrap();
            let users = Users::new(1, process, LIMIT).unwrap();
            let is_own = std::ptr::eq(users.of(&stream), &raw const users.own);
            std::process::exit(if is_own { 0 } else { 1 });
        }
        let test = "backend_vm::shared::tests::a_confined_process_of_an_ordinary_user_knows_its_own_connections";
        // This file, although its folders can be closed to the other user.
        let mut confined = std::process::Command::new("/proc/self/exe");
        confined.args(["--exact", test]).env(IS_OWN, "");
        if rustix::process::geteuid().is_root() {
            confined.uid(1000).current_dir("/");
        }
        let output = confined.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {said}", output.status);
    }

    #[test]
    fn connections_beyond_a_users_places_are_closed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = bind(&path).unwrap();
        let (service, _) = service(0, LONG);
        let users = Users::new(1, Own::get(), LIMIT).unwrap();
        let user = if rustix::process::geteuid().is_root() {
            &users.root
        } else {
            &users.own
        };
        let free = Arc::clone(&user.free);
        std::thread::spawn(move || accept_tenants(&listener, &service, &users));
        let first = UnixStream::connect(&path).unwrap();
        let mut second = UnixStream::connect(&path).unwrap();
        assert_eq!(second.read(&mut [0]).unwrap(), 0, "it is closed");
        assert_eq!(free.load(Ordering::Relaxed), 0);
        first.set_nonblocking(true).unwrap();
        assert!((&first).read(&mut [0]).is_err(), "it is waited for");
        drop(first);
        // The place is free some time after the end.
        while free.load(Ordering::Relaxed) == 0 {
            std::thread::yield_now();
        }
        let (third, attach) = (
            UnixStream::connect(&path).unwrap(),
            Message::Attach(Attach::default()),
        );
        let window = tempfile::tempfile().unwrap();
        send(&third, &attach, &[window.as_raw_fd()]).unwrap();
        assert_eq!(name(&third), Some("Refused"), "its window is not static");
    }

    /// Returns a connection whose close does not end before the other values are dropped.
    fn endless() -> (UnixStream, (TcpStream, TcpListener)) {
        let (foreign, listener) = lingering();
        let (near, far) = UnixStream::pair().unwrap();
        let attach = Message::Attach(Attach::default());
        send(&far, &attach, &[foreign.as_raw_fd()]).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        drop(foreign);
        (near, (accepted, listener))
    }

    #[test]
    fn connections_that_wait_to_be_closed_delay_no_other_user() {
        let users = Users::new(1, Own::get(), LIMIT).unwrap();
        let (first, far) = endless();
        let (done, is_done) = channel();
        std::thread::spawn(move || {
            users.others.close(first, None);
            let mut ends = Vec::new();
            for _ in 0..100 {
                let (near, end) = UnixStream::pair().unwrap();
                users.others.close(near, None);
                ends.push(end);
            }
            done.send(users).unwrap();
        });
        let users = is_done.recv_timeout(LONG).expect("it waits for the others");
        assert_eq!(users.others.unclosed.load(Ordering::Relaxed), 101);
        drop(far);
        while users.others.unclosed.load(Ordering::Relaxed) > 0 {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_connection_without_a_thread_is_closed_by_the_thread_of_its_user() {
        let users = Users::new(1, Own::get(), LIMIT).unwrap();
        let (first, far) = endless();
        let (done, is_done) = channel();
        std::thread::spawn(move || {
            let place = users.own.take();
            let (give, _) = channel();
            let refused = Err(io::ErrorKind::WouldBlock.into());
            begin(&users.own, refused, &give, (first, place));
            done.send(users).unwrap();
        });
        let users = is_done.recv_timeout(LONG).expect("the close is waited for");
        assert!(
            users.own.take().is_none(),
            "its place is free before the close"
        );
        drop(far);
        while users.own.take().is_none() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn the_vm_opens_no_other_streams() {
        let (output, outputs) = channel();
        let mut accept = acceptor(Arc::new(Desk::new(2)), output);
        let request = |port| ConnectRequest { port, peer_port: 1 };
        let mut theirs = Vec::new();
        for port in [
            ports::STDOUT,
            ports::STDERR,
            ports::REPORT,
            ports::SLOT,
            ports::SLOT + 1,
            ports::SLOT_CONTROL + 1,
        ] {
            theirs.push(accept(request(port)).unwrap());
            assert_eq!(accept(request(port)).unwrap_err(), Refused, "{port}");
        }
        assert_eq!(outputs.try_iter().count(), 3);
        for port in [
            ports::SLOT + 2,
            ports::SLOT_CONTROL + 2,
            ports::SLOT - 1,
            ports::CONTROL,
            ports::TENANT,
            0,
            u32::MAX,
        ] {
            assert_eq!(accept(request(port)).unwrap_err(), Refused, "{port}");
        }
    }

    #[test]
    fn a_socket_is_for_its_user_and_replaces_one_that_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        drop(bind(&path).unwrap());
        let _listener = bind(&path).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(bind(&path).is_err(), "it has a listener");
        UnixStream::connect(&path).unwrap();
    }
}
