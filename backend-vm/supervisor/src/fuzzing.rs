//! Runs the supervisor and the loops of hostile tenants in one process, for the fuzz target: the
//! input orders the messages and deaths of several tenants' launchers, guests and workers, and the
//! deaths of the tenants' processes.
//!
//! The input is a list of steps: a byte that selects the step, then the step's arguments. This
//! module plays the spawner and the scrubbers. After each step the supervisor and the loops handle
//! all pending events and their state is checked for consistency; at the end all peers leave, and
//! no state may remain.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::time::{Duration, Instant};

use event_manager::{EventManager, MutEventSubscriber, SubscriberId, SubscriberOps};
use wormhole_link::channel::{Incoming, Outgoing};
use wormhole_link::memory;
use wormhole_ring::bootstrap;
use wormhole_ring::control::{
    ArenaRequest, ArenaRun, ArenaWithin, Attach, FEATURE_FILES, FEATURE_PROCESS, Fetch, Message,
    Observe, ProcessNumber, Share, Stream, WindowRun,
};
use wormhole_ring::layout::SEGMENT_BYTES;
use wormhole_ring::session::Owner;
use wormhole_sandbox::{Ending, Limits};

use crate::descriptors::Descriptors;
use crate::forks::Forks;
use crate::scrubber::process::Queue;
use crate::signals::Signals;
use crate::spawner::message::{FORKS, Order, Report, Role};
use crate::spawner::{Abilities, Spawner};
use crate::tenant_loop::TenantLoop;
use crate::{Id, Options, Parts, Quotas, Supervisor, datagram, pair};

/// Protocol hash of all workers.
const HASH: u64 = 7;
/// Largest number of launchers at a time, and below of their control streams together.
const TENANTS: usize = 4;
const GUESTS: usize = 12;
/// Longer than any input takes.
const LONG: Duration = Duration::from_secs(3600);
/// Limit on rounds of the event loop until it has no event left.
const ROUNDS: usize = 10_000;

/// Test's end of a stream to the supervisor.
struct End {
    socket: OwnedFd,
    incoming: Incoming,
    outgoing: Outgoing,
}

impl End {
    fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            incoming: Incoming::new(true),
            outgoing: Outgoing::default(),
        }
    }

    fn pair() -> (Self, OwnedFd) {
        let (near, far) = UnixStream::pair().expect("a pair of sockets");
        (Self::new(near.into()), far.into())
    }

    /// Sends a message, unless the supervisor has closed the stream.
    fn send(&mut self, message: &Message<'_>, descriptors: Vec<OwnedFd>) {
        let _ = self.outgoing.send(&self.socket, message, descriptors);
    }

    /// Reads a message, and closes the descriptors received so far.
    fn read<T>(&mut self, heard: impl FnOnce(Message<'_>) -> T) -> Option<T> {
        let _ = self.incoming.fill(&self.socket);
        let heard = self.incoming.take().ok().flatten().map(heard);
        while self.incoming.descriptor().is_some() {}
        heard
    }

    /// Reads a launcher's message, and takes the descriptor that it brings.
    fn read_as_launcher<T>(
        &mut self,
        heard: impl FnOnce(Message<'_>) -> T,
    ) -> Option<(T, Option<OwnedFd>)> {
        let _ = self.incoming.fill(&self.socket);
        let message = self.incoming.take().ok().flatten()?;
        let brings = matches!(message, Message::Stream(_) | Message::WindowMap(_));
        let heard = heard(message);
        let descriptor = brings.then(|| self.incoming.descriptor());
        Some((heard, descriptor.flatten()))
    }

    fn write_raw(&self, bytes: &[u8]) {
        let _ = rustix::net::send(&self.socket, bytes, rustix::net::SendFlags::NOSIGNAL);
    }

    fn shut_down(&self, how: rustix::net::Shutdown) {
        let _ = rustix::net::shutdown(&self.socket, how);
    }
}

/// A worker that the played spawner has started.
struct Worker {
    ticket: u64,
    end: End,
    /// The worker's end of its log, open while the worker lives.
    _log: OwnedFd,
    was_killed: bool,
    /// Whether it has said that it has its device.
    is_ready: bool,
    /// Answers that the worker still has to send.
    owed: Vec<Owed>,
}

enum Owed {
    Assigned,
    Added(ArenaRun),
    Removed(ArenaRun),
}

/// A process that closes descriptors, executed by this one.
struct PlayedScrubber {
    ticket: u64,
    socket: OwnedFd,
    queue: Queue,
}

/// A tenant's process, executed by this one.
struct PlayedLoop {
    ticket: u64,
    state: Rc<RefCell<TenantLoop>>,
    subscriber: SubscriberId,
}

/// The supervisor and all its peers.
struct Scene {
    supervisor: Rc<RefCell<Supervisor>>,
    manager: EventManager<Rc<RefCell<dyn MutEventSubscriber>>>,
    subscriber: SubscriberId,
    spawner: OwnedFd,
    /// Orders to the spawner that were not executed.
    orders: VecDeque<Order>,
    loops: Vec<PlayedLoop>,
    scrubbers: Vec<PlayedScrubber>,
    tenants: Vec<End>,
    guests: Vec<End>,
    workers: Vec<Worker>,
    /// Tokens that workers received for shared objects.
    tokens: Vec<[u64; 2]>,
    /// User for whom no process can be forked.
    without_room: Option<u32>,
    /// Number of sessions that workers have taken.
    granted: usize,
    /// Runs that launchers were asked to map, with the launcher's index.
    shown: Vec<(usize, WindowRun)>,
}

/// Runs an input. Returns the number of sessions that workers took.
///
/// # Panics
/// The supervisor's state is inconsistent, or it leaves state behind.
pub fn play(input: &[u8]) -> usize {
    let mut scene = Scene::new();
    let mut steps = Steps(input);
    while scene.step(&mut steps).is_some() {
        scene.settle();
        scene.check();
    }
    scene.end();
    scene.granted
}

/// End of a process that serves nobody any more.
const ENDED: Ending = Ending::Exited(0);

/// Decodes a message between the supervisor and a tenant's process.
///
/// # Panics
/// A decoded report encodes to other bytes.
pub fn decode(input: &[u8]) {
    if let Some(report) = pair::Report::decode(input)
        && input.len() < pair::LONGEST_TEXT
    {
        assert_eq!(report.encode(), input);
    }
    let _ = pair::Order::decode(input);
}

/// Rest of the input, read step by step.
struct Steps<'a>(&'a [u8]);

impl Steps<'_> {
    fn next<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*bytes)
    }
}

/// Returns the element that a byte selects.
fn pick<T>(elements: &mut [T], byte: u8) -> Option<&mut T> {
    let count = elements.len();
    elements.get_mut(usize::from(byte).checked_rem(count)?)
}

/// Removes the element that a byte selects.
fn remove<T>(elements: &mut Vec<T>, byte: u8) -> Option<T> {
    let index = usize::from(byte).checked_rem(elements.len())?;
    Some(elements.remove(index))
}

impl Scene {
    fn new() -> Self {
        let (near, far) = datagram::pair().expect("a pair of sockets");
        let options = Options {
            device: "cpu".parse().expect("a device"),
            workers: Vec::new(),
            listener: None,
            stream: None,
            trusted_tenants: true,
            without_namespaces: false,
            limits: Limits::of(Some(1 << 30), None, (1, 1), (8, 512)),
            start_limit: LONG,
            hello_limit: LONG,
            reap_limit: LONG,
            quotas: Quotas {
                sessions_per_user: 6,
                ..Quotas::default()
            },
        };
        let parts = Parts {
            spawner: Spawner::played_by(near),
            abilities: Abilities {
                has_users: true,
                hashes: vec![HASH],
                device: Ok("cpu".to_owned()),
            },
            descriptors: Descriptors::claim().expect("open files"),
            signals: Signals::new().expect("a descriptor for signals"),
            sampler: None,
            near: None,
            forks: Forks::new(),
        };
        let supervisor = Rc::new(RefCell::new(Supervisor::new(options, parts)));
        let mut manager = EventManager::new().expect("an epoll descriptor");
        let shared: Rc<RefCell<dyn MutEventSubscriber>> = supervisor.clone();
        let subscriber = manager.add_subscriber(shared);
        let mut scene = Self {
            supervisor,
            manager,
            subscriber,
            spawner: far,
            orders: VecDeque::new(),
            loops: Vec::new(),
            scrubbers: Vec::new(),
            tenants: Vec::new(),
            guests: Vec::new(),
            workers: Vec::new(),
            tokens: Vec::new(),
            without_room: None,
            granted: 0,
            shown: Vec::new(),
        };
        scene.settle();
        scene
    }

    fn step(&mut self, steps: &mut Steps<'_>) -> Option<()> {
        let [step] = steps.next()?;
        match step % 16 {
            0 => {
                let [user] = steps.next()?;
                if self.tenants.len() < TENANTS {
                    let (end, far) = End::pair();
                    self.tenants.push(end);
                    let ops = &mut self.manager.event_ops(self.subscriber).ok()?;
                    let mut supervisor = self.supervisor.borrow_mut();
                    supervisor.add_tenant(ops, far, u32::from(user % 2), true);
                }
            }
            1 => {
                let [tenant, segments, announced, limits] = steps.next()?;
                let bytes = |segments: u8| u64::from(segments % 32) * SEGMENT_BYTES as u64;
                let file = File::from(memory::anonymous_file(c"window").ok()?);
                file.set_len(bytes(segments)).ok()?;
                if limits & 0x80 == 0 {
                    memory::seal_size(&file).ok()?;
                }
                let attach = Attach {
                    window_size: bytes(announced),
                    segment_limit: u32::from(limits & 0x70) >> 4,
                    session_limit: u32::from(limits & 3),
                    static_window: u64::from(limits & 4),
                    ..Attach::default()
                };
                if let Some(tenant) = pick(&mut self.tenants, tenant) {
                    tenant.send(&Message::Attach(attach), vec![file.into()]);
                }
            }
            2 => {
                let [tenant, local] = steps.next()?;
                if self.guests.len() < GUESTS
                    && let Some(tenant) = pick(&mut self.tenants, tenant)
                {
                    let stream = Stream {
                        local: u32::from(local & 1),
                    };
                    tenant.send(&Message::Stream(stream), Vec::new());
                }
            }
            3 => self.guest_says(steps)?,
            4 => {
                let [guest] = steps.next()?;
                remove(&mut self.guests, guest);
            }
            // A launcher reports a run as mapped: a requested one, or an arbitrary one.
            5 => {
                let [which, session, first, count] = steps.next()?;
                let (tenant, run) = remove(&mut self.shown, which).unwrap_or_else(|| {
                    let run = WindowRun {
                        session: session.into(),
                        first: first.into(),
                        count: count.into(),
                    };
                    (which.into(), run)
                });
                if let Some(tenant) = self.tenants.get_mut(tenant) {
                    tenant.send(&Message::WindowMapped(run), Vec::new());
                }
            }
            6 => self.worker_says(steps)?,
            // A worker sends an answer that it owes.
            7 => {
                let [worker, which] = steps.next()?;
                let worker = pick(&mut self.workers, worker);
                if let Some(worker) = worker
                    && let Some(owed) = remove(&mut worker.owed, which)
                {
                    self.granted += usize::from(matches!(owed, Owed::Assigned));
                    let message = match owed {
                        Owed::Assigned => Message::Assigned,
                        Owed::Added(run) => Message::ArenaAdded(run),
                        Owed::Removed(run) => Message::ArenaRemoved(run),
                    };
                    worker.end.send(&message, Vec::new());
                }
            }
            8 => {
                let [worker] = steps.next()?;
                self.reap(worker.into());
            }
            9 => self.scrub(),
            10 => {
                let [which] = steps.next()?;
                if which & 0x80 != 0 {
                    let served = usize::from(which).checked_rem(self.loops.len());
                    served
                        .into_iter()
                        .for_each(|served| self.end_loop(served, ENDED));
                } else if let Some(scrubber) = remove(&mut self.scrubbers, which) {
                    self.reap_fork(scrubber.ticket, ENDED);
                }
            }
            11 => {
                let [tenant, how] = steps.next()?;
                match how % 3 {
                    0 => {
                        let tenant = usize::from(tenant).checked_rem(self.tenants.len());
                        tenant.into_iter().for_each(|tenant| self.leave(tenant));
                    }
                    how => {
                        use rustix::net::Shutdown;
                        let how = [Shutdown::Write, Shutdown::Both][usize::from(how - 1)];
                        if let Some(tenant) = pick(&mut self.tenants, tenant) {
                            tenant.shut_down(how);
                        }
                    }
                }
            }
            12 => {
                let [failures] = steps.next()?;
                self.play_spawner(failures);
            }
            13 => {
                let [whose, end, length] = steps.next()?;
                let length = usize::from(length).min(steps.0.len());
                let (bytes, rest) = steps.0.split_at(length);
                steps.0 = rest;
                let end = match whose % 3 {
                    0 => pick(&mut self.tenants, end),
                    1 => pick(&mut self.guests, end),
                    _ => pick(&mut self.workers, end).map(|worker| &mut worker.end),
                };
                end.into_iter().for_each(|end| end.write_raw(bytes));
            }
            14 => {
                let [worker] = steps.next()?;
                if let Some(worker) = pick(&mut self.workers, worker) {
                    worker.end.shut_down(rustix::net::Shutdown::Both);
                }
            }
            _ => self.supervisor.borrow_mut().dump(),
        }
        Some(())
    }

    /// Executes steps without a check of the state. Returns the tickets of the workers that are
    /// alive.
    #[cfg(test)]
    fn play(&mut self, input: &[u8]) -> Vec<u64> {
        let mut steps = Steps(input);
        while self.step(&mut steps).is_some() {
            self.settle();
        }
        self.workers.iter().map(|worker| worker.ticket).collect()
    }

    fn guest_says(&mut self, steps: &mut Steps<'_>) -> Option<()> {
        let [guest, kind, id, first, count] = steps.next()?;
        let message = match kind % 10 {
            0..=2 => Message::Hello {
                bootstrap_version: bootstrap::VERSION + u32::from(id == 0xff),
                protocol_hash: HASH + u64::from(first == 0xff),
                features: u64::from(count) & (FEATURE_FILES | FEATURE_PROCESS),
                environment: if id & 1 == 0 {
                    ""
                } else {
                    "CUDA_CACHE_MAXSIZE=1\n"
                },
            },
            3 => Message::Observe(Observe {
                bootstrap_version: bootstrap::VERSION,
                device: u32::from(first & 3),
            }),
            4 => Message::ArenaRequest(ArenaRequest {
                id: id.into(),
                segments: u32::from(count & 15),
            }),
            5 => Message::ArenaWithin(ArenaWithin {
                id: id.into(),
                segments: u32::from(count & 15),
                first: u32::from(first & 31),
                end: u32::from(first >> 5) << 3,
            }),
            6 => Message::ArenaReturn(ArenaRun {
                id: id.into(),
                first: u32::from(first & 31),
                count: u32::from(count & 15),
            }),
            7 => Message::Doorbell,
            8 => Message::Process(ProcessNumber {
                pid: id.into(),
                ..ProcessNumber::default()
            }),
            _ if id & 1 == 0 => Message::Mapped,
            _ => Message::Unmappable,
        };
        if let Some(guest) = pick(&mut self.guests, guest) {
            guest.send(&message, Vec::new());
        }
        Some(())
    }

    fn worker_says(&mut self, steps: &mut Steps<'_>) -> Option<()> {
        let [worker, kind, id, first, count] = steps.next()?;
        let run = ArenaRun {
            id: id.into(),
            first: u32::from(first & 31),
            count: u32::from(count & 15),
        };
        let token = pick(&mut self.tokens, first).copied();
        let fetch = Fetch {
            id: id.into(),
            what: u32::from(count & 3),
            token: token.unwrap_or_default(),
        };
        let mut descriptors = Vec::new();
        let message = match kind % 12 {
            0..=2 => Message::Ready {
                protocol_hash: HASH,
                device: "name=stub\n",
            },
            3 => Message::Refused {
                code: 1,
                reason: "no device",
            },
            4 => Message::Assigned,
            5 => Message::ArenaAdded(run),
            6 => Message::ArenaRemoved(run),
            7 => Message::ArenaRefused(run),
            8 | 9 => {
                let file = File::from(memory::anonymous_file(c"shared").ok()?);
                file.set_len(4096).ok()?;
                if id & 1 == 0 {
                    memory::seal_size(&file).ok()?;
                }
                if count & 8 == 0 {
                    descriptors.push(file.into());
                }
                Message::Share(Share {
                    id: id.into(),
                    what: u32::from(count & 3),
                    descriptor: u32::from(count >> 2 & 1),
                    words: u32::from(count >> 4 & 1),
                    ..Share::default()
                })
            }
            10 => Message::Fetch(fetch),
            _ => Message::Unshare(fetch),
        };
        if let Some(worker) = pick(&mut self.workers, worker) {
            worker.is_ready |= matches!(message, Message::Ready { .. });
            worker.end.send(&message, descriptors);
        }
        Some(())
    }

    /// Receives the orders sent to the spawner. Forks the processes of tenants, and assigns workers, at once. Returns whether
    /// it has assigned one.
    ///
    /// # Panics
    /// A worker without its device is to come into a tenant's cgroup, whose other workers could hold up its start.
    fn receive_orders(&mut self) -> bool {
        let mut answered = false;
        while let Ok(Some((bytes, _))) = datagram::receive(&self.spawner, false) {
            let order = Order::decode(&bytes).expect("an order");
            if let Order::Assign { ticket, .. } = order {
                let worker = self.workers.iter().find(|one| one.ticket == ticket);
                assert!(worker.is_none_or(|one| one.is_ready));
                self.report(&Report::Assigned { ticket }, &[]);
                answered = true;
                continue;
            }
            let Order::Fork {
                ticket,
                role: Role::Tenant { user, .. },
            } = order
            else {
                self.orders.push_back(order);
                continue;
            };
            if self.without_room == Some(user) {
                let reason = "memory is short".to_owned();
                self.report(&Report::NotForked { ticket, reason }, &[]);
                continue;
            }
            let (near, far) = pair::sockets().expect("a pair of sockets");
            let descriptors = self.supervisor.borrow().descriptors;
            let state = TenantLoop::new(far, descriptors);
            let state = Rc::new(RefCell::new(state));
            let shared: Rc<RefCell<dyn MutEventSubscriber>> = state.clone();
            let subscriber = self.manager.add_subscriber(shared);
            self.loops.push(PlayedLoop {
                ticket,
                state,
                subscriber,
            });
            self.report(&Report::Forked { ticket, pid: 1 }, &[near]);
        }
        answered
    }

    /// Executes the orders sent to the spawner. The bits of `failures` select the starts that fail.
    fn play_spawner(&mut self, failures: u8) {
        let mut fails = failures;
        self.receive_orders();
        while let Some(order) = self.orders.pop_front() {
            match order {
                Order::Start { ticket, .. } if fails & 1 == 1 => {
                    let reason = "no process".to_owned();
                    self.report(&Report::Failed { ticket, reason }, &[]);
                }
                Order::Start { ticket, .. } => {
                    let (end, far) = End::pair();
                    let (log, writer) = datagram::pair().expect("a pair of sockets");
                    let pid = i32::try_from(ticket).unwrap_or(0) + 1000;
                    let report = Report::Started { ticket, pid };
                    self.report(&report, &[far, log]);
                    self.workers.push(Worker {
                        ticket,
                        end,
                        _log: writer,
                        was_killed: false,
                        is_ready: false,
                        owed: Vec::new(),
                    });
                }
                Order::Kill { ticket } => {
                    let mut workers = self.workers.iter_mut();
                    if let Some(worker) = workers.find(|worker| worker.ticket == ticket) {
                        worker.was_killed = true;
                    }
                    let killed = self.loops.iter().position(|one| one.ticket == ticket);
                    killed
                        .into_iter()
                        .for_each(|killed| self.end_loop(killed, ENDED));
                }
                // Answered as it is received.
                Order::Assign { .. } => {}
                Order::Remove { tenant } => self.report(&Report::Removed { tenant }, &[]),
                Order::Fork { ticket, .. } if fails & 1 == 1 => {
                    let reason = "no process".to_owned();
                    self.report(&Report::NotForked { ticket, reason }, &[]);
                }
                Order::Fork { ticket, .. } => {
                    let (near, far) = datagram::pair().expect("a pair of sockets");
                    let pid = i32::try_from(ticket - FORKS).expect("few processes") + 1;
                    self.report(&Report::Forked { ticket, pid }, &[far]);
                    self.scrubbers.push(PlayedScrubber {
                        ticket,
                        socket: near,
                        queue: Queue::default(),
                    });
                }
            }
            fails >>= 1;
        }
    }

    /// Ends a tenant's process.
    fn end_loop(&mut self, index: usize, ending: Ending) {
        let PlayedLoop {
            ticket,
            state,
            subscriber,
        } = self.loops.remove(index);
        self.manager
            .remove_subscriber(subscriber)
            .expect("the loop's subscriber");
        // Its descriptors are closed before the spawner reports its end.
        drop(state);
        self.reap_fork(ticket, ending);
    }

    fn reap_fork(&self, ticket: u64, ending: Ending) {
        let report = Report::Ended {
            ticket,
            ending,
            out_of_memory: false,
        };
        self.report(&report, &[]);
    }

    fn report(&self, report: &Report, descriptors: &[OwnedFd]) {
        datagram::send(&self.spawner, &report.encode(), descriptors, false)
            .expect("the supervisor reads reports");
    }

    /// Ends a worker's process.
    fn reap(&mut self, worker: usize) {
        let Some(index) = worker.checked_rem(self.workers.len()) else {
            return;
        };
        let worker = self.workers.remove(index);
        let report = Report::Ended {
            ticket: worker.ticket,
            ending: if worker.was_killed {
                Ending::Signalled(libc::SIGKILL)
            } else {
                Ending::Exited(1)
            },
            out_of_memory: false,
        };
        // Its end of the stream is closed before the spawner reports its end.
        drop(worker);
        self.report(&report, &[]);
    }

    /// Disconnects a launcher.
    fn leave(&mut self, tenant: usize) {
        self.tenants.remove(tenant);
        self.shown.retain(|(of, _)| *of != tenant);
        for (of, _) in &mut self.shown {
            *of -= usize::from(*of > tenant);
        }
    }

    /// Executes all orders sent to the scrubbers.
    fn scrub(&mut self) {
        let mut ended = Vec::new();
        self.scrubbers.retain_mut(|scrubber| {
            let lives = scrubber.queue.serve_all(&scrubber.socket);
            if !lives {
                ended.push(scrubber.ticket);
            }
            lives
        });
        for ticket in ended {
            self.reap_fork(ticket, ENDED);
        }
    }

    /// Runs the event loop until it is idle, and reads the supervisor's messages.
    fn settle(&mut self) {
        let mut rounds = 0;
        loop {
            while self.manager.run_with_timeout(0).expect("the event loop") > 0 {
                rounds += 1;
                assert!(rounds < ROUNDS, "the event loop never rests");
            }
            let loops = self.loops.len();
            let answered = self.receive_orders();
            let is_done = |one: &PlayedLoop| one.state.borrow().is_done();
            let done = self.loops.iter().position(is_done);
            match done {
                Some(done) => self.end_loop(done, ENDED),
                None if self.loops.len() == loops && !answered => break,
                None => {}
            }
        }
        for worker in &mut self.workers {
            while let Some(owed) = worker.end.read(|message| match message {
                Message::Assign(_) => Some(Owed::Assigned),
                Message::ArenaAdd(run) => Some(Owed::Added(run)),
                Message::ArenaRemove(run) => Some(Owed::Removed(run)),
                Message::Shared(shared) if shared.result == 0 => {
                    self.tokens.push(shared.token);
                    None
                }
                _ => None,
            }) {
                worker.owed.extend(owed);
            }
        }
        for (index, tenant) in self.tenants.iter_mut().enumerate() {
            while let Some((run, descriptor)) = tenant.read_as_launcher(|message| match message {
                Message::WindowMap(run) => Some(run),
                _ => None,
            }) {
                match (run, descriptor) {
                    (Some(run), _) => self.shown.push((index, run)),
                    (None, stream) => self.guests.extend(stream.map(End::new)),
                }
            }
        }
        for guest in &mut self.guests {
            while guest.read(|_| ()).is_some() {}
        }
    }

    /// Checks that the tables of the supervisor and of the loops agree with each other.
    fn check(&self) {
        for served in &self.loops {
            let served = served.state.borrow();
            check(&served);
            let supervisor = self.supervisor.borrow();
            for id in served.tenants.keys() {
                let known = &supervisor.tenants[id].sessions;
                assert!(known.iter().eq(served.sessions.keys()), "{known:?}");
            }
        }
    }

    /// Disconnects all peers, and checks that no state remains.
    fn end(&mut self) {
        self.tenants.clear();
        self.guests.clear();
        // Each may wait for another: a worker for its start, a session for its memory.
        for _ in 0..64 {
            self.settle();
            self.play_spawner(0);
            while let Some(killed) = self.workers.iter().position(|worker| worker.was_killed) {
                self.reap(killed);
            }
            self.settle();
            self.scrub();
            for served in &self.loops {
                let mut served = served.state.borrow_mut();
                served.scrubber.try_again(Instant::now() + LONG);
            }
            self.check();
        }
        let supervisor = self.supervisor.borrow();
        assert!(supervisor.tenants.is_empty(), "tenants are left");
        for served in &self.loops {
            assert!(served.state.borrow().tenants.is_empty(), "a loop is left");
        }
        assert_eq!(supervisor.served(), 0);
    }
}

/// Checks that a loop's tables agree with each other.
fn check(supervisor: &TenantLoop) {
    let mut owned: BTreeMap<Id, u32> = BTreeMap::new();
    let mut numbers = BTreeSet::new();
    for session in supervisor.sessions.values() {
        assert!(numbers.insert((session.tenant, session.id.index)));
        let tenant = supervisor.tenants.get(&session.tenant);
        let tenant = tenant.expect("the tenant of a session");
        let window = tenant.window.as_ref().expect("the window of a session");
        let extents = session.extents.iter();
        let arena = extents.map(|(first, extent)| (*first, extent.count));
        let own = (session.segment.first, session.segment.count);
        for (first, count) in arena.chain([own]) {
            *owned.entry(session.tenant).or_default() += count;
            for segment in first..first + count {
                let owner = window.segments.owner(segment);
                assert_eq!(owner, Some(Owner::Granted(session.id)), "{segment}");
            }
        }
    }
    for returning in supervisor.returning.values() {
        let count: u32 = returning.runs.iter().map(|run| run.count).sum();
        *owned.entry(returning.tenant).or_default() += count;
    }
    for (id, tenant) in &supervisor.tenants {
        let of = |other: Id| usize::from(other == *id);
        let guests = supervisor.guests.values().map(|guest| of(guest.tenant));
        assert_eq!(tenant.guests, guests.sum::<usize>());
        let sessions = supervisor.sessions.values().map(|one| of(one.tenant));
        assert_eq!(tenant.sessions, sessions.sum::<usize>());
        // The window of a launcher that has left is never granted again.
        if let Some(window) = tenant.window.as_ref().filter(|_| tenant.is_attached()) {
            let owned = owned.get(id).copied().unwrap_or(0);
            assert_eq!(window.segments.held(), owned);
        }
    }
    for (id, guest) in &supervisor.guests {
        if let Some(session) = guest.session {
            let session = supervisor.sessions.get(&session);
            assert_eq!(session.and_then(|session| session.guest), Some(*id));
        }
    }
    for session in supervisor.shares.sessions() {
        assert!(supervisor.sessions.contains_key(&session));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use event_manager::SubscriberOps;
    use proptest::prelude::*;
    use wormhole_sandbox::Ending;

    use wormhole_api::CuResult;

    use super::{
        ENDED, Fetch, HASH, Instant, LONG, Message, Order, Role, Scene, Share, Steps, datagram,
        memory,
    };
    use crate::alone::alone;
    use crate::descriptors::UNDERWAY;
    use crate::pair::{self, Report};
    use crate::process_logs::Owner;

    /// Returns the named inputs in the fuzz target's corpus.
    fn seeds() -> Vec<Vec<u8>> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/supervisor");
        let files = std::fs::read_dir(folder).unwrap();
        let mut paths: Vec<_> = files.map(|file| file.unwrap().path()).collect();
        paths.retain(|path| path.is_file());
        paths.sort();
        let seeds = paths.iter().map(|path| std::fs::read(path).unwrap());
        seeds.collect()
    }

    /// Returns concatenated seeds with some bytes changed and random bytes between them.
    fn inputs() -> impl Strategy<Value = Vec<u8>> {
        let change = (any::<prop::sample::Index>(), any::<u8>());
        let changes = prop::collection::vec(change, 0..4);
        let seed = (prop::sample::select(seeds()), changes).prop_map(|(mut seed, changes)| {
            for (index, byte) in changes {
                let at = index.index(seed.len());
                seed[at] = byte;
            }
            seed
        });
        let piece = prop_oneof![3 => seed, 1 => prop::collection::vec(any::<u8>(), 0..40)];
        prop::collection::vec(piece, 1..8).prop_map(|pieces| pieces.concat())
    }

    #[test]
    fn a_spare_that_dies_before_its_session_has_it_is_replaced() {
        let _alone = alone();
        let mut scene = Scene::new();
        let mut play = |input: &[u8]| scene.play(input);
        let start = [12, 0];
        assert_eq!(play(&start), [0]);
        let ready = [6, 0, 0, 0, 0, 0];
        let (launcher, attach) = ([0, 0], [1, 0, 31, 31, 0]);
        let (scrub, stream, hello) = ([9], [2, 0, 1], [3, 0, 0, 0, 0, 0]);
        let inputs = [
            &ready[..],
            &launcher,
            &attach,
            &start,
            &scrub,
            &stream,
            &hello,
            &start,
        ];
        assert_eq!(play(&inputs.concat()), [0], "the session has the spare");
        play(&scrub);
        let (guest_leaves, worker_ends) = ([4, 0], [8, 0]);
        let inputs = [guest_leaves, start, worker_ends, start];
        assert_eq!(play(&inputs.concat()), [1]);
    }

    /// Returns a scene with two tenants that have attached. The first one has a session with worker
    /// 0.
    fn two_tenants() -> Scene {
        let mut scene = Scene::new();
        let (start, ready, assigned) = ([12, 0], [6, 0, 0, 0, 0, 0], [7, 0, 0]);
        let (launcher, stream, hello) = ([0, 0], [2, 0, 1], [3, 0, 0, 0, 0, 0]);
        let [first, second] = [0, 1].map(|tenant| [1, tenant, 31, 31, 0]);
        let scrub = [9];
        let inputs = [
            &start[..],
            &ready,
            &launcher,
            &first,
            &launcher,
            &second,
            &start,
            &scrub,
            &stream,
            &hello,
            &assigned,
        ];
        scene.play(&inputs.concat());
        let sessions: Vec<usize> = scene
            .loops
            .iter()
            .map(|one| one.state.borrow().sessions.len())
            .collect();
        assert_eq!(sessions, [1, 0]);
        scene
    }

    /// Has the second tenant's process send reports. Returns whether it was killed for them, and the
    /// first tenant's was not.
    fn is_killed_for(reports: &[Report]) -> bool {
        let mut scene = two_tenants();
        let tickets: Vec<u64> = scene.loops.iter().map(|one| one.ticket).collect();
        let second = scene.loops[1].state.borrow().supervisor.clone();
        for report in reports {
            second.report(report);
            scene.settle();
        }
        scene.play_spawner(0);
        scene.settle();
        assert!(!scene.workers[0].was_killed, "the first tenant's worker");
        let left: Vec<u64> = scene.loops.iter().map(|one| one.ticket).collect();
        assert_eq!(left[0], tickets[0]);
        left != tickets
    }

    #[test]
    fn a_tenants_process_that_wants_more_than_is_its_own_is_killed() {
        let _alone = alone();
        assert!(!is_killed_for(&[Report::Figures, Report::Scrubber]));
        // A worker that has been reaped may be killed again.
        assert!(!is_killed_for(&[Report::Kill { ticket: 1000 }]));
        assert!(is_killed_for(&[Report::Kill { ticket: 0 }]));
        assert!(is_killed_for(&vec![Report::Scrubber; 20]));
        // It has attached before.
        assert!(is_killed_for(&[Report::Attached { lines: 0 }]));
        let want = |session, hash| Report::Want {
            session,
            hash,
            environment: String::new(),
        };
        assert!(!is_killed_for(&[want(1, HASH), want(2, HASH)]));
        assert!(is_killed_for(&[want(1, HASH), want(1, HASH)]));
        assert!(is_killed_for(&[want(1, HASH + 1)]));
        let many: Vec<Report> = (0..200).map(|session| want(session, HASH)).collect();
        assert!(is_killed_for(&many));
    }

    /// Stops the process of a tenant, and receives its orders so far.
    fn stop(scene: &mut Scene, tenant: usize) -> pair::SupervisorLink {
        let stopped = &scene.loops[tenant];
        let subscriber = stopped.subscriber;
        let supervisor = stopped.state.borrow().supervisor.clone();
        scene.manager.remove_subscriber(subscriber).unwrap();
        while supervisor.next().unwrap().is_some() {}
        supervisor
    }

    #[test]
    fn a_tenants_process_that_reads_nothing_is_killed_for_what_it_asks() {
        let _alone = alone();
        let want = |session| Report::Want {
            session,
            hash: HASH,
            environment: String::new(),
        };
        let over = |session| Report::Over { session };
        let inputs: [&dyn Fn(u32) -> Vec<Report>; 2] = [&|_| vec![Report::Figures], &|session| {
            vec![want(session), over(session)]
        }];
        for input in inputs {
            let mut scene = two_tenants();
            let second = stop(&mut scene, 1);
            let ticket = scene.loops[1].ticket;
            // The user may have 6 sessions: others are refused.
            for session in 100..107 {
                second.report(&want(session));
            }
            for round in 0..4000 {
                input(1000 + round)
                    .iter()
                    .for_each(|report| second.report(report));
                scene.settle();
            }
            let killed = scene.orders.iter();
            let killed = killed.filter(|order| **order == Order::Kill { ticket });
            assert_eq!(killed.count(), 1);
            assert_eq!(scene.supervisor.borrow().served(), 2, "it has not ended");
        }
    }

    /// Counts lines that are written.
    #[derive(Clone, Debug, Default)]
    struct Lines(Arc<AtomicUsize>);

    impl std::io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            let lines = bytes.iter().filter(|byte| **byte == b'\n').count();
            self.0.fetch_add(lines, Ordering::Relaxed);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// Returns the number of lines in the log of a scene in which user 0 has spent the lines that its tenants share, and
    /// may have one tenant.
    fn lines_of(play: impl FnOnce(&mut Scene)) -> usize {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone());
        tracing::subscriber::with_default(subscriber.finish(), || {
            let mut scene = Scene::new();
            scene.play(&[12, 0]);
            {
                let mut supervisor = scene.supervisor.borrow_mut();
                supervisor.quotas.tenants_per_user = 1;
                let all = vec![b'x'; 1 << 20];
                supervisor.pass_on(Owner { tenant: 0, user: 0 }, &all);
            }
            play(&mut scene);
        });
        lines.0.load(Ordering::Relaxed)
    }

    #[test]
    fn tenants_whose_processes_end_in_a_loop_do_not_fill_the_log() {
        const ENDS: usize = 300;
        let _alone = alone();
        let lines = lines_of(|scene| {
            for _ in 0..ENDS {
                scene.tenants.clear();
                scene.play(&[0, 0]);
                let last = scene.loops.len() - 1;
                scene.end_loop(last, Ending::Signalled(libc::SIGKILL));
                scene.settle();
                // Its place is free again.
                scene.play_spawner(0);
                scene.settle();
            }
        });
        // One tenant's part, and a few lines each second.
        assert!((10..ENDS - 100).contains(&lines), "{lines}");
    }

    #[test]
    fn a_user_without_room_for_a_process_does_not_fill_the_log() {
        const FAILURES: usize = 300;
        let _alone = alone();
        let lines = lines_of(|scene| {
            scene.without_room = Some(0);
            scene.play(&[0, 0]);
            for _ in 0..FAILURES {
                let later = Instant::now() + LONG;
                scene.supervisor.borrow_mut().forks.resume(later);
                // The process of another user's tenant is forked beside it, and ends.
                scene.tenants.truncate(1);
                scene.play(&[0, 1]);
                let last = scene.loops.len() - 1;
                scene.end_loop(last, ENDED);
                scene.settle();
                scene.play_spawner(0);
                scene.settle();
            }
        });
        // One tenant's part, and a few lines each second.
        assert!((10..FAILURES - 100).contains(&lines), "{lines}");
    }

    #[test]
    fn workers_without_a_cgroup_do_not_fill_the_log() {
        const FAILURES: usize = 300;
        let _alone = alone();
        let lines = lines_of(|scene| {
            let (ready, launcher) = ([6, 0, 0, 0, 0, 0], [0, 0]);
            let (attach, start, scrub) = ([1, 0, 31, 31, 0], [12, 0], [9]);
            let (stream, hello) = ([2, 0, 1], [3, 0, 0, 0, 0, 0]);
            let inputs = [
                &ready[..],
                &launcher,
                &attach,
                &start,
                &scrub,
                &stream,
                &hello,
            ];
            let tickets = scene.play(&inputs.concat());
            for _ in 0..FAILURES {
                let ticket = tickets[0];
                let reason = "memory is short".to_owned();
                scene.report(&super::Report::NotAssigned { ticket, reason }, &[]);
                scene.settle();
            }
        });
        assert!((10..FAILURES - 100).contains(&lines), "{lines}");
    }

    /// Connects as a user. Returns the tickets and users of the processes for tenants that are ordered then.
    fn connect(scene: &mut Scene, user: u8) -> Vec<(u64, u32)> {
        scene.step(&mut Steps(&[0, user])).unwrap();
        let mut ordered = Vec::new();
        while let Ok(Some((bytes, _))) = datagram::receive(&scene.spawner, false) {
            if let Order::Fork { ticket, role } = Order::decode(&bytes).unwrap()
                && let Role::Tenant { user, .. } = role
            {
                ordered.push((ticket, user));
            }
        }
        ordered
    }

    #[test]
    fn a_user_without_room_for_a_process_keeps_no_other_user_waiting() {
        let _alone = alone();
        let mut scene = Scene::new();
        let ordered = connect(&mut scene, 0);
        let [(ticket, 0)] = ordered[..] else {
            panic!("{ordered:?}");
        };
        let reason = "memory is short".to_owned();
        scene.report(&super::Report::NotForked { ticket, reason }, &[]);
        while scene.manager.run_with_timeout(0).unwrap() > 0 {}
        assert!(scene.supervisor.borrow().forks.deadline().is_some());
        let ordered = connect(&mut scene, 1);
        assert!(matches!(ordered[..], [(_, 1)]), "{ordered:?}");
    }

    #[test]
    fn a_connection_over_the_limit_waits_for_the_end_of_another_tenant_and_not_for_ever() {
        let _alone = alone();
        let mut scene = Scene::new();
        scene.supervisor.borrow_mut().quotas.tenants_per_user = 1;
        scene.play(&[0, 0]);
        let connections: Vec<super::End> = (0..6)
            .map(|_| {
                let (end, far) = super::End::pair();
                let ops = &mut scene.manager.event_ops(scene.subscriber).unwrap();
                scene.supervisor.borrow_mut().admit(ops, far, 0);
                end
            })
            .collect();
        let meet_deadlines = |scene: &mut Scene, now| {
            let ops = &mut scene.manager.event_ops(scene.subscriber).unwrap();
            let mut supervisor = scene.supervisor.borrow_mut();
            supervisor.admit_postponed(ops, now);
            supervisor.acceptor.postponed(Some(0))
        };
        assert_eq!(meet_deadlines(&mut scene, Instant::now()), 4);
        let refused = scene.supervisor.borrow().refusals.here();
        assert_eq!(refused, 2, "more than may wait");
        scene.tenants.clear();
        scene.settle();
        scene.play_spawner(0);
        scene.settle();
        assert_eq!(meet_deadlines(&mut scene, Instant::now()), 3);
        assert_eq!(scene.supervisor.borrow().tenants_of(0), 1);
        assert!(scene.supervisor.borrow().acceptor.deadline().is_some());
        assert_eq!(meet_deadlines(&mut scene, Instant::now() + LONG), 0);
        assert_eq!(scene.supervisor.borrow().tenants_of(0), 1);
        drop(connections);
    }

    #[test]
    fn a_worker_that_fetches_and_reads_nothing_has_few_descriptors_in_flight() {
        const WHAT: u32 = 1;
        let _alone = alone();
        let mut scene = two_tenants();
        let run = |scene: &mut Scene| while scene.manager.run_with_timeout(0).unwrap() > 0 {};
        let file = memory::anonymous_file(c"shared").unwrap();
        memory::seal_size(&file).unwrap();
        let share = Share {
            what: WHAT,
            descriptor: 1,
            ..Share::default()
        };
        let worker = &mut scene.workers[0].end;
        worker.send(&Message::Share(share), vec![file]);
        run(&mut scene);
        let shared = scene.workers[0].end.read(|message| match message {
            Message::Shared(shared) => (shared.result, shared.token),
            other => panic!("{}", other.name()),
        });
        let Some((0, token)) = shared else {
            panic!("{shared:?}");
        };
        let fetch = |scene: &mut Scene, count| {
            for id in 0..count {
                let what = WHAT;
                let fetch = Message::Fetch(Fetch { id, what, token });
                scene.workers[0].end.send(&fetch, Vec::new());
            }
            run(scene);
            let mut results = Vec::new();
            while let Some(result) = scene.workers[0].end.read(|message| match message {
                Message::Fetched(fetched) => fetched.result,
                other => panic!("{}", other.name()),
            }) {
                results.push(result);
            }
            results
        };
        let results = fetch(&mut scene, 100);
        assert_eq!(results.len(), 100);
        let (given, refused) = results.split_at(UNDERWAY);
        assert!(given.iter().all(|result| *result == 0), "{given:?}");
        let full = CuResult::OUT_OF_MEMORY.0;
        assert!(refused.iter().all(|result| *result == full), "{refused:?}");
        // It has read them.
        assert_eq!(fetch(&mut scene, 1), [0]);
    }

    #[test]
    fn a_tenants_sessions_send_its_neighbours_nothing() {
        let _alone = alone();
        let mut scene = two_tenants();
        let second = stop(&mut scene, 1);
        let stream = [2, 0, 1];
        for _ in 0..3 {
            // A guest comes and leaves, and its worker ends.
            let inputs = [
                &stream[..],
                &[3, 1, 0, 0, 0, 0],
                &[12, 0],
                &[6, 1, 0, 0, 0, 0],
                &[7, 1, 0],
                &[4, 1],
                &[12, 0],
                &[8, 1],
            ];
            scene.play(&inputs.concat());
        }
        let next = second.next().unwrap();
        assert!(next.is_none(), "{next:?}");
    }

    #[test]
    fn a_session_counts_until_its_worker_has_ended_whatever_its_tenant_says() {
        let _alone = alone();
        let mut scene = two_tenants();
        let first = scene.loops[0].state.borrow().supervisor.clone();
        let session = *scene.loops[0]
            .state
            .borrow()
            .sessions
            .keys()
            .next()
            .unwrap();
        first.report(&Report::Over { session });
        scene.settle();
        scene.play_spawner(0);
        assert!(scene.workers[0].was_killed, "its worker is left");
        let mut supervisor = scene.supervisor.borrow_mut();
        let (id, tenant) = supervisor.tenants.first_key_value().unwrap();
        assert_eq!(tenant.sessions.len(), 0);
        assert_eq!(supervisor.sessions_of(*id, tenant), 1);
        // It counts for the user too.
        let other = *supervisor.tenants.last_key_value().unwrap().0;
        assert_eq!(supervisor.too_many_sessions(other), None);
        supervisor.quotas.sessions_per_user = 1;
        assert!(supervisor.too_many_sessions(other).is_some());
    }

    #[test]
    fn a_tenant_is_a_neighbour_until_its_workers_have_ended() {
        let _alone = alone();
        let mut scene = two_tenants();
        let has_neighbours = |scene: &Scene| scene.supervisor.borrow().history.has_neighbours();
        assert!(has_neighbours(&scene));
        let first = scene.loops[0].state.borrow().supervisor.clone();
        // It has attached before, so its process is killed, and its worker with it.
        first.report(&Report::Attached { lines: 0 });
        scene.settle();
        scene.play_spawner(0);
        scene.settle();
        scene.scrub();
        scene.settle();
        assert_eq!(scene.loops.len(), 1);
        assert!(scene.workers[0].was_killed && has_neighbours(&scene));
        scene.reap(0);
        scene.settle();
        assert!(!has_neighbours(&scene));
    }

    #[test]
    fn a_tenant_is_served_once_the_workers_of_others_know_of_it() {
        let _alone = alone();
        let (start, ready, assigned) = ([12, 0], [6, 0, 0, 0, 0, 0], [7, 0, 0]);
        let (launcher, stream, hello, scrub) = ([0, 0], [2, 0, 1], [3, 0, 0, 0, 0, 0], [9]);
        let [first, second] = [0, 1].map(|tenant| [1, tenant, 31, 31, 0]);
        let with_session = [
            &start[..],
            &ready,
            &launcher,
            &first,
            &start,
            &scrub,
            &stream,
            &hello,
            &assigned,
        ];
        for answers in [true, false] {
            let mut scene = Scene::new();
            scene.play(&with_session.concat());
            let stalled = stop(&mut scene, 0);
            scene.play(&[&launcher[..], &start, &second, &start, &scrub].concat());
            let waits = |scene: &Scene| {
                let supervisor = scene.supervisor.borrow();
                let (_, newcomer) = supervisor.tenants.last_key_value().unwrap();
                assert!(newcomer.has_window);
                newcomer.awaits_device
            };
            // Another worker gets its device meanwhile.
            let another = u8::try_from(scene.workers.len() - 1).unwrap();
            scene.play(&[6, another, 0, 0, 0, 0]);
            assert!(another > 0 && waits(&scene));
            if answers {
                stalled.report(&Report::Told);
                scene.settle();
            } else {
                let ops = &mut scene.manager.event_ops(scene.subscriber).unwrap();
                let mut supervisor = scene.supervisor.borrow_mut();
                assert!(supervisor.end_untold(ops, Instant::now()).is_some());
                assert_eq!(supervisor.end_untold(ops, Instant::now() + LONG), None);
            }
            assert!(!waits(&scene));
            scene.receive_orders();
            let ticket = scene.loops[0].ticket;
            let is_killed = scene.orders.contains(&Order::Kill { ticket });
            assert_eq!(is_killed, !answers);
        }
    }

    #[test]
    fn beside_neighbours_no_environment_sets_a_part_of_the_whole_device() {
        const PART: &str = "CUDA_DEVICE_DEFAULT_PERSISTING_L2_CACHE_PERCENTAGE_LIMIT=50";
        const CHANNELS: &str = "CUDA_DEVICE_MAX_CONNECTIONS=32";
        const OTHER: &str = "CUDA_MODULE_LOADING=EAGER";
        let _alone = alone();
        let (launcher, attach, start, scrub) = ([0, 0], [1, 0, 31, 31, 0], [12, 0], [9]);
        let one = || {
            let mut one = Scene::new();
            one.play(&[&launcher[..], &attach, &start, &scrub].concat());
            one
        };
        let environment = |mut scene: Scene| {
            // The first of two has a worker starting already.
            let last = scene.loops.last().unwrap();
            let process = last.state.borrow().supervisor.clone();
            process.report(&Report::Want {
                session: 100,
                hash: HASH,
                environment: [PART, CHANNELS, OTHER].join("\n"),
            });
            scene.settle();
            scene.receive_orders();
            scene.orders.into_iter().find_map(|order| match order {
                Order::Start { environment, .. } if !environment.is_empty() => Some(environment),
                _ => None,
            })
        };
        assert_eq!(
            environment(one()).unwrap(),
            [PART, CHANNELS, OTHER].join("\n")
        );
        let open = one();
        open.supervisor.borrow_mut().has_strangers = true;
        assert_eq!(environment(open).unwrap(), [PART, OTHER].join("\n"));
        assert_eq!(environment(two_tenants()).unwrap(), OTHER);
    }

    #[test]
    fn a_tenant_that_has_left_holds_memory_and_no_descriptors() {
        let _alone = alone();
        let mut scene = two_tenants();
        let counts = |scene: &Scene| {
            let supervisor = scene.supervisor.borrow();
            let user = supervisor.tenants.values().next().unwrap().user;
            let holders = [supervisor.holders(None), supervisor.holders(Some(user))];
            (supervisor.tenants_of(user), holders)
        };
        assert_eq!(counts(&scene), (2, [2, 2]));
        scene.leave(1);
        scene.settle();
        scene.scrub();
        scene.settle();
        // The spawner has not reported that the memory is free.
        scene.receive_orders();
        let mut orders = scene.orders.iter();
        assert!(orders.any(|order| matches!(order, Order::Remove { .. })));
        assert_eq!(counts(&scene), (2, [1, 1]));
    }

    #[test]
    fn a_process_without_a_window_that_wants_figures_is_killed() {
        let _alone = alone();
        let mut scene = Scene::new();
        let launcher = [0, 0];
        scene.play(&launcher);
        let ticket = scene.loops[0].ticket;
        let first = scene.loops[0].state.borrow().supervisor.clone();
        first.report(&Report::Figures);
        scene.settle();
        assert!(scene.orders.contains(&Order::Kill { ticket }));
    }

    #[test]
    fn a_queued_spare_is_requested_again_if_its_session_ends_before_its_start() {
        let _alone = alone();
        let mut scene = Scene::new();
        let mut play = |input: &[u8]| scene.play(input);
        let start = [12, 0];
        play(&start);
        let ready = |worker| [6, worker, 0, 0, 0, 0];
        let (launcher, attach) = ([0, 0], [1, 0, 31, 31, 0]);
        let (scrub, stream) = ([9], [2, 0, 1]);
        let hello = |guest, environment| [3, guest, 0, environment, 0, 0];
        let inputs = [&ready(0)[..], &launcher, &attach, &start, &scrub];
        play(&inputs.concat());
        // The first session takes the spare, the second one needs a worker of its own.
        let inputs = [&stream[..], &hello(0, 0), &stream, &hello(1, 1)];
        play(&inputs.concat());
        // The next spare waits behind that worker, and the third session claims it.
        let assigned = [7, 0, 0];
        let inputs = [&assigned[..], &stream, &hello(2, 0)];
        assert_eq!(play(&inputs.concat()), [0]);
        let third_leaves = [4, 2];
        let inputs = [&scrub[..], &third_leaves, &start];
        assert_eq!(play(&inputs.concat()), [0, 1]);
        assert_eq!(play(&[&ready(1)[..], &start].concat()), [0, 1, 2]);
    }

    /// Attached tenants whose processes and workers the test plays.
    struct Played {
        scene: Scene,
        tenants: Vec<pair::SupervisorLink>,
        /// Tickets of the workers that have been ready.
        ready: BTreeSet<u64>,
    }

    impl Played {
        /// Attaches a tenant of each user, and waits for the spares.
        fn new(users: &[u8]) -> Self {
            let mut scene = Scene::new();
            scene.supervisor.borrow_mut().quotas.sessions_per_user = 100;
            let (start, scrub) = ([12, 0], [9]);
            for (tenant, user) in (0..).zip(users) {
                let (launcher, attach) = ([0, *user], [1, tenant, 31, 31, 0]);
                scene.play(&[&launcher[..], &attach, &start, &scrub].concat());
            }
            let tenants = (0..users.len()).map(|tenant| stop(&mut scene, tenant));
            let tenants = tenants.collect();
            let ready = BTreeSet::new();
            let mut played = Self {
                scene,
                tenants,
                ready,
            };
            // The second spare starts after the first.
            played.start();
            played.start();
            played
        }

        /// Has a tenant begin sessions. Returns those of its sessions that have got a worker since the last call.
        fn begin(&mut self, tenant: usize, sessions: std::ops::Range<u32>) -> Vec<u32> {
            for session in sessions {
                self.tenants[tenant].report(&Report::Want {
                    session,
                    hash: HASH,
                    environment: String::new(),
                });
            }
            self.scene.settle();
            let spares = self.spares();
            assert!(spares <= 2, "{spares} spares");
            let mut served = Vec::new();
            while let Some((order, _)) = self.tenants[tenant].next().unwrap() {
                if let pair::Order::Worker { session, .. } = order {
                    served.push(session);
                }
            }
            served
        }

        /// Has a tenant report sessions as taken by their guests, and then as over.
        fn end(&mut self, tenant: usize, sessions: &[u32]) {
            for session in sessions.iter().copied() {
                self.tenants[tenant].report(&Report::Taken { session });
                self.scene.settle();
                self.tenants[tenant].report(&Report::Over { session });
            }
            self.scene.settle();
        }

        /// Reaps the workers that were killed, and starts those whose turn it is, each with its device.
        fn start(&mut self) {
            self.scene.play_spawner(0);
            self.scene.settle();
            let killed = |worker: &super::Worker| worker.was_killed;
            while let Some(killed) = self.scene.workers.iter().position(killed) {
                self.scene.reap(killed);
                self.scene.settle();
            }
            self.scene.play_spawner(0);
            self.scene.settle();
            for worker in &mut self.scene.workers {
                if self.ready.insert(worker.ticket) {
                    let ready = Message::Ready {
                        protocol_hash: HASH,
                        device: "name=stub\n",
                    };
                    worker.is_ready = true;
                    worker.end.send(&ready, Vec::new());
                }
            }
            self.scene.settle();
        }

        /// Returns the number of workers that run or start without a session.
        fn spares(&self) -> usize {
            let supervisor = self.scene.supervisor.borrow();
            let workers = supervisor.workers.values();
            let running = workers.filter(|worker| worker.session.is_none()).count();
            running + supervisor.pool.starts.spares(HASH).count()
        }
    }

    /// Has hostile tenants of another user begin more and more sessions. Tenant 0 must have a worker for each of its own
    /// at once.
    fn hold_against(hostile: usize) {
        const ROUNDS: u32 = 8;
        let _alone = alone();
        let users = [&[0][..], &vec![1; hostile]].concat();
        let mut played = Played::new(&users);
        let mut running = vec![Vec::new(); users.len()];
        let mut count = 0;
        for round in 0..ROUNDS {
            for (tenant, running) in running.iter_mut().enumerate().skip(1) {
                // The sessions of the round before end.
                played.end(tenant, running);
                let next = 2 * round;
                *running = played.begin(tenant, next..next + 2);
                count += running.len();
            }
            // It begins its first session amid the attack.
            if round >= ROUNDS / 2 {
                assert_eq!(played.begin(0, round..round + 1), [round]);
                played.end(0, &[round]);
            }
            played.start();
        }
        assert!(count > 4, "there was no attack");
    }

    #[test]
    fn a_tenant_that_begins_sessions_without_pause_leaves_another_its_spare() {
        hold_against(1);
    }

    #[test]
    fn a_user_whose_tenants_all_begin_sessions_leaves_another_its_spare() {
        hold_against(3);
    }

    #[test]
    fn a_user_that_has_taken_a_spare_takes_no_other_before_it_is_replaced() {
        let _alone = alone();
        let mut played = Played::new(&[0, 1, 1]);
        assert_eq!(played.begin(1, 0..1), [0]);
        assert!(played.begin(1, 1..2).is_empty());
        assert!(played.begin(2, 0..1).is_empty());
        assert_eq!(played.begin(0, 0..1), [0]);
    }

    #[test]
    fn the_spare_of_an_idle_tenant_serves_others() {
        let _alone = alone();
        let mut played = Played::new(&[0, 1, 0]);
        for tenant in [0, 1] {
            assert_eq!(played.begin(tenant, 0..1), [0]);
            played.end(tenant, &[0]);
            played.start();
        }
        // Both spares are those of tenants 0 and 1 now.
        assert_eq!(played.begin(2, 0..1), [0]);
        played.end(2, &[0]);
        played.start();
        assert_eq!(played.begin(2, 1..2), [1]);
    }

    #[test]
    fn a_backend_with_one_tenant_has_one_spare() {
        let _alone = alone();
        let counts = [&[0][..], &[0, 1], &[0, 1, 0]].map(|users| Played::new(users).spares());
        assert_eq!(counts, [1, 2, 2]);
    }

    #[test]
    fn the_seeds_reach_a_session() {
        let _alone = alone();
        assert!(seeds().iter().any(|seed| super::play(seed) > 0));
    }

    proptest! {
        #[test]
        fn whatever_tenants_and_workers_do_the_books_are_right_and_nothing_is_left(
            input in inputs(),
        ) {
            let _alone = alone();
            super::play(&input);
        }
    }
}
