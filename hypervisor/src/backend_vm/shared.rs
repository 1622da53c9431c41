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

use std::fs::{self, File};
use std::io;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::time::{Duration, Instant};

use rustix::net::sockopt::socket_peercred;
use wormhole_images::ports;
use wormhole_link::channel::Incoming;
use wormhole_link::{chain, tasks};
use wormhole_lock::{Condvar, Mutex};
use wormhole_monitor::devices::vsock::Accepted;
use wormhole_monitor::stats::VmStats;
use wormhole_monitor::{Aperture, ConnectRequest, KvmCaps, MemoryError, Refused, WindowConfig};
use wormhole_ring::control::{Attach, Message, Refusal, WindowRun};

use super::slots::{SlotTable, Taken};
use super::{
    BackendVmError, Machine, Options, Running, START_LIMIT, attend, descriptor_of, make, stream_of,
};
use crate::backend::{receive, send};
use crate::places::is_believed_user;
use crate::private;
use crate::run::confinement;
use crate::say;
use crate::wait::until_readable;

/// Time within which a launcher that connects sends its window, all of its message.
const HELLO_LIMIT: Duration = Duration::from_secs(10);
/// Most connections at a time, beside those that have a slot. Further ones wait in the kernel.
const WAITING: usize = 64;
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
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

fn in_quarantine(count: usize) -> String {
    match count {
        0 => String::new(),
        _ => format!(
            " or are in quarantine ({count}), since the end of a tenant was not acknowledged: start it anew"
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
    let vm = make(
        options,
        Machine {
            window: WindowConfig::Aperture(slots),
            window_bytes: slots.bytes,
            memory: options.vm.memory(),
            vcpus: options.vm.cpus(),
            arguments: arguments
                .chain(options.vm.limits(&options.operator).arguments())
                .collect(),
        },
        accept,
    )?;
    let aperture = vm.aperture().ok_or(BackendVmError::NoWindow)?;
    // All files are open by now.
    confinement::enter_listening()?;
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
        hello_limit: HELLO_LIMIT,
        detach_limit: DETACH_LIMIT,
        report_limit: REPORT_LIMIT,
    });
    let places = Arc::new(Places::new(
        usize::try_from(slots.count).map_or(WAITING, |slots| slots + WAITING),
    ));
    tasks::spawn("accept", move || {
        accept_tenants(&listener, &service, &places);
    })
    .map_err(BackendVmError::Thread)?;
    // The VM ends by itself, or with this process.
    Err(running.wait().unwrap_or(BackendVmError::Gone))
}

/// Listens at `path` for root and this user. Replaces a socket that no process listens on any more.
fn bind(path: &Path) -> io::Result<UnixListener> {
    let is_left = fs::symlink_metadata(path).is_ok_and(|data| data.file_type().is_socket())
        && UnixStream::connect(path).is_err();
    if is_left {
        fs::remove_file(path)?;
    }
    private::listener(path)
}

/// Places of connections. A connection has one until all of its descriptors are closed.
#[derive(Debug)]
struct Places {
    free: Mutex<usize>,
    changed: Condvar,
}

impl Places {
    fn new(count: usize) -> Self {
        Self {
            free: Mutex::new(count),
            changed: Condvar::new(),
        }
    }

    /// Waits for a free place, and takes it.
    fn take(self: &Arc<Self>) -> Taking {
        let mut free = self.free.lock();
        while *free == 0 {
            free = self.changed.wait(free);
        }
        *free -= 1;
        Taking(Arc::clone(self))
    }
}

/// A place that is taken.
#[derive(Debug)]
struct Taking(Arc<Places>);

impl Drop for Taking {
    fn drop(&mut self) {
        *self.0.free.lock() += 1;
        self.0.changed.notify_one();
    }
}

/// Gives each connection a thread, which closes what the connection brings: a close that never ends keeps a thread and a
/// place, and delays nothing else.
fn accept_tenants(listener: &UnixListener, service: &Arc<Service>, places: &Arc<Places>) {
    loop {
        let place = places.take();
        let Ok((stream, _)) = listener.accept() else {
            // No descriptor is free, or the launcher has closed the connection.
            std::thread::sleep(RETRY);
            continue;
        };
        let service = Arc::clone(service);
        let served = tasks::spawn("tenant", move || {
            // Root can connect as well, and give the socket's file another mode.
            if socket_peercred(&stream).is_ok_and(|peer| is_believed_user(peer.uid)) {
                service.serve(stream);
            } else {
                drop(stream);
            }
            drop(place);
        });
        if let Err(error) = served {
            say::line(format_args!("backend VM: a tenant is not served: {error}"));
        }
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
        Self {
            stream,
            incoming: Incoming::new(true),
            foreign: None,
        }
    }

    /// Receives the first message, and the window that belongs to it.
    fn attach(&mut self, window: &mut Option<OwnedFd>, limit: Duration) -> Option<Attach> {
        self.wait(Some(Instant::now() + limit))?;
        let message = self.incoming.take().ok()??;
        let Message::Attach(attach) = message else {
            return None;
        };
        *window = self.incoming.descriptor();
        self.foreign = self.incoming.descriptor();
        self.foreign.is_none().then_some(attach)
    }

    /// Receives a message that takes no descriptor. Without one, the launcher has ended or broken the protocol.
    fn next(&mut self, end: Option<Instant>) -> Option<Message<'_>> {
        self.wait(end)?;
        self.foreign = self.incoming.descriptor();
        if self.foreign.is_some() {
            return None;
        }
        self.incoming.take().ok()?
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
    hello_limit: Duration,
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
        if let Some(attach) = orders.attach(&mut window, self.hello_limit)
            && let Some(window) = &window
        {
            match self.attach(&attach, window) {
                Ok((slot, relay)) => self.pass(slot, &attach, relay, tenant, &mut orders),
                Err(error) => {
                    let refused = Message::Refused {
                        code: Refusal::Protocol as u32,
                        reason: &chain(&error),
                    };
                    // Its launcher may be gone.
                    let _ = send(&tenant, &refused, &[]);
                }
            }
        }
        orders.end();
        drop(window);
    }

    /// Maps a tenant's window in a slot.
    fn attach(&self, attach: &Attach, window: &OwnedFd) -> Result<(u32, UnixStream), Unattached> {
        if attach.static_window == 0 {
            return Err(Unattached::NotStatic);
        }
        let (slot, relay) = self.desk.take(START_LIMIT)?;
        match self.memory.attach(slot, window, attach.window_size) {
            Ok(()) => Ok((slot, relay)),
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

    /// Passes messages between a launcher and the relay of its slot, until one of them ends. Empties the slot.
    fn pass(
        &self,
        slot: u32,
        attach: &Attach,
        relay: UnixStream,
        tenant: Arc<UnixStream>,
        orders: &mut Orders,
    ) {
        let relay = Arc::new(relay);
        let (acknowledged, acknowledgement) = sync_channel(1);
        let answers = {
            let (tenant, relay, desk) = (
                Arc::clone(&tenant),
                Arc::clone(&relay),
                Arc::clone(&self.desk),
            );
            let stats = self.stats.clone();
            move || {
                let figures = stats.as_ref().and_then(figures);
                let is_over = pass_answers(&relay, &tenant, || desk.control_of(slot), figures);
                // Ends the other direction as well, if it has not ended.
                let _ = tenant.shutdown(Shutdown::Read);
                let _ = acknowledged.send(is_over);
            }
        };
        let passing = match send(&relay, &Message::Attach(*attach), &[]) {
            Ok(()) => tasks::spawn("answers", answers).map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        if let Err(error) = &passing {
            say::line(format_args!("backend VM: a tenant is not served: {error}"));
        }
        // A message that is none, or not a launcher's, ends the tenant, as its launcher's end does.
        while passing.is_ok()
            && let Some(message) = orders.next(None)
            && !matches!(message, Message::WindowUnmap(_))
            && send(&relay, &message, &[]).is_ok()
        {}
        self.desk.leave(slot);
        // Fails if the VM has ended, which is no acknowledgement.
        let _ = send(&relay, &Message::WindowUnmap(WindowRun::default()), &[]);
        let is_over = acknowledgement
            .recv_timeout(self.report_limit)
            .or_else(|_| {
                // A launcher that does not read must not hold up its own end.
                let _ = tenant.shutdown(Shutdown::Both);
                acknowledgement.recv_timeout(self.detach_limit)
            })
            .unwrap_or(false);
        let emptied = self.memory.detach(slot);
        if let Err(error) = &emptied {
            say::line(format_args!("backend VM: slot {slot}: {}", chain(error)));
        }
        if !is_over || emptied.is_err() {
            say::line(format_args!(
                "backend VM: slot {slot} is in quarantine: the VM has not acknowledged the end of its tenant"
            ));
        }
        self.desk.end(slot, is_over && emptied.is_ok());
        let _ = relay.shutdown(Shutdown::Both);
        let _ = tenant.shutdown(Shutdown::Both);
    }
}

/// Returns the figures of a VM's processor. A VM with several has no single file of them.
fn figures(stats: &VmStats) -> Option<&File> {
    match stats.vcpus() {
        [vcpu] => Some(vcpu.file()),
        _ => None,
    }
}

/// Passes the relay's messages to the launcher, with the descriptors that belong to them. Returns whether the relay has
/// acknowledged the end of the tenant.
fn pass_answers(
    relay: &UnixStream,
    tenant: &UnixStream,
    control: impl Fn() -> Option<UnixStream>,
    figures: Option<&File>,
) -> bool {
    let mut body = Vec::new();
    while let Ok(Some((message, _))) = receive(relay, &mut body) {
        if matches!(message, Message::WindowUnmap(_)) {
            return true;
        }
        let stream = stream_of(&message, &control);
        let descriptor = descriptor_of(&message, stream.as_ref(), figures);
        // A launcher that is gone needs no answers, but the relay's last one counts.
        let _ = send(tenant, &message, descriptor.as_slice());
    }
    false
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::PermissionsExt;
    use std::thread::JoinHandle;

    use rustix::net::sockopt::set_socket_linger;
    use wormhole_ring::control::Stream;

    use super::*;

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

    /// A service without a VM.
    fn service(count: u32, limit: Duration) -> (Arc<Service>, Arc<Noted>) {
        let noted = Arc::new(Noted::default());
        let service = Service {
            desk: Arc::new(Desk::new(count)),
            memory: Box::new(Arc::clone(&noted)),
            stats: None,
            hello_limit: LONG,
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
        let attach = Attach {
            window_size,
            static_window: 1,
            ..Attach::default()
        };
        let window = tempfile::tempfile().unwrap();
        send(&launcher, &Message::Attach(attach), &[window.as_raw_fd()]).unwrap();
        let service = Arc::clone(service);
        (launcher, std::thread::spawn(move || service.serve(tenant)))
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
    fn a_tenant_whose_end_is_not_acknowledged_leaves_a_slot_that_is_not_used_again() {
        let limit = Duration::from_millis(20);
        for has_ended in [false, true] {
            let (service, noted) = service(2, limit);
            let relay = offer(&service, 0);
            let (launcher, served) = launch(&service, 4096);
            assert_eq!(name(&relay), Some("Attach"));
            let kept = (!has_ended).then_some(relay);
            drop(launcher);
            served.join().unwrap();
            // The tenant's memory is out of the VM's reach all the same.
            let events = [(0, "attached"), (0, "detached")];
            assert_eq!(*noted.0.lock(), events);
            drop(kept);
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

    /// A socket whose close takes longer than any test: its data is never acknowledged.
    fn lingering() -> (TcpStream, TcpListener) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        stream.set_nonblocking(true).unwrap();
        while (&stream).write(&[0; 1 << 16]).is_ok() {}
        set_socket_linger(&stream, Some(Duration::from_secs(1 << 12))).unwrap();
        stream.set_nonblocking(false).unwrap();
        (stream, listener)
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
        assert_eq!(name(&relay), Some("WindowUnmap"), "the tenant is ended");
        send(&relay, &OVER, &[]).unwrap();
        assert_eq!(name(&launcher), None, "it sees its end");
        let again = offer(&service, 0);
        let (_other, _) = launch(&service, 4096);
        assert_eq!(name(&again), Some("Attach"), "the slot has another tenant");
        // Resets the connection, and so ends the closes.
        drop(listener);
        served.join().unwrap();
        closing.join().unwrap();
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
    fn connections_beyond_the_places_wait() {
        let places = Arc::new(Places::new(2));
        let (first, _second) = (places.take(), places.take());
        let waiting = std::thread::spawn({
            let places = Arc::clone(&places);
            move || drop(places.take())
        });
        assert_eq!(*places.free.lock(), 0);
        assert!(!waiting.is_finished());
        drop(first);
        waiting.join().unwrap();
        assert_eq!(*places.free.lock(), 1);
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
