//! Runs vCPUs: dispatches exits to the buses, counts exits, stops the vCPU threads.

use std::cell::Cell;
use std::os::unix::thread::JoinHandleExt;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvm_ioctls::{VcpuExit, VcpuFd};
use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::bus::{Buses, Effect};
use crate::confinement::Confinement;
use crate::exit_reason::{ExitReason, Registers};
use crate::snapshot::{AfterSnapshot, Request, SnapshotError, VcpuState};
use crate::vm::VmError;

/// Error from starting a VM's threads.
#[derive(Debug, thiserror::Error)]
pub enum ThreadError {
    /// The handler of the signal that interrupts KVM_RUN cannot be installed.
    #[error("cannot set up the signal that stops vCPUs")]
    Signal(#[source] vmm_sys_util::errno::Error),
    /// The thread cannot be created.
    #[error("cannot start a thread for {name}")]
    Spawn {
        /// Name of the thread.
        name: String,
        /// Underlying error.
        source: std::io::Error,
    },
}

/// Reason for which a vCPU thread ended by itself.
#[derive(Debug, Clone)]
pub(crate) enum End {
    /// A write to a device ended the guest or the vCPU's payload.
    Write(Effect),
    Shutdown,
    Internal {
        suberror: u32,
    },
    EntryFailed {
        reason: u64,
        cpu: u32,
    },
    Unexpected {
        exit: String,
    },
    RunFailed {
        error: String,
    },
}

#[derive(Debug, Clone)]
pub(crate) struct VcpuEnd {
    pub vcpu: u8,
    pub end: End,
    pub registers: Registers,
}

impl VcpuEnd {
    /// Returns the exit reason of an end that means the same for every kind of VM, `None` for [`End::Write`].
    pub fn failure(&self) -> Option<ExitReason> {
        let Self {
            vcpu, registers, ..
        } = *self;
        Some(match &self.end {
            End::Write(_) => return None,
            End::Shutdown => ExitReason::TripleFault { vcpu, registers },
            End::Internal { suberror } => ExitReason::InternalError {
                vcpu,
                suberror: *suberror,
                registers,
            },
            End::EntryFailed { reason, cpu } => ExitReason::EntryFailed {
                vcpu,
                reason: *reason,
                cpu: *cpu,
            },
            End::Unexpected { exit } => ExitReason::UnexpectedExit {
                vcpu,
                exit: exit.clone(),
            },
            End::RunFailed { error } => ExitReason::RunFailed {
                vcpu,
                error: error.clone(),
            },
        })
    }
}

#[derive(Debug)]
pub(crate) enum Event {
    Ended(VcpuEnd),
    Save(Request),
    Stop,
}

/// Stops a VM from any thread.
#[derive(Debug, Clone)]
pub struct StopHandle(Sender<Event>);

impl StopHandle {
    pub(crate) fn new(events: Sender<Event>) -> Self {
        Self(events)
    }

    /// Stops the VM: its `run` returns [`ExitReason::Stopped`]. Has no effect on a VM that has ended.
    pub fn stop(&self) {
        // The receiver is dropped once the VM has ended.
        if self.0.send(Event::Stop).is_err() {
            tracing::trace!("stopping a VM that has ended");
        }
    }
}

/// Exits to the monitor by reason, over all vCPUs. [`crate::stats`] also counts exits that KVM handles
/// itself; on some KVMs its statistic `io_exits` stays 0, and only these counts include I/O exits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ExitCounts {
    /// Port reads and writes.
    pub io: u64,
    /// Reads and writes of memory that no memslot backs.
    pub mmio: u64,
    /// HLT (only without an in-kernel interrupt controller).
    pub halt: u64,
    /// Signals to the vCPU thread.
    pub interrupted: u64,
    /// All other exits.
    pub other: u64,
}

impl ExitCounts {
    /// Returns the sum of all counts.
    pub fn total(&self) -> u64 {
        self.io + self.mmio + self.halt + self.interrupted + self.other
    }
}

/// Live counts of exits, shared between threads.
#[derive(Debug, Default)]
pub struct ExitCounters {
    io: AtomicU64,
    mmio: AtomicU64,
    halt: AtomicU64,
    interrupted: AtomicU64,
    other: AtomicU64,
}

impl ExitCounters {
    /// Returns the current counts.
    pub fn read(&self) -> ExitCounts {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ExitCounts {
            io: load(&self.io),
            mmio: load(&self.mmio),
            halt: load(&self.halt),
            interrupted: load(&self.interrupted),
            other: load(&self.other),
        }
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

thread_local! {
    /// `immediate_exit` of the vCPU that this thread runs; null on other threads.
    static IMMEDIATE_EXIT: Cell<*mut u8> = const { Cell::new(ptr::null_mut()) };
}

/// Returns the signal that interrupts KVM_RUN.
fn kick_signal() -> libc::c_int {
    vmm_sys_util::signal::SIGRTMIN()
}

extern "C" fn on_kick(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // A const-initialised thread-local without a destructor is safe to access in a signal handler.
    let flag = IMMEDIATE_EXIT.get();
    if !flag.is_null() {
        // SAFETY: the thread set the pointer to its own vCPU's mapped `kvm_run` and clears it
        // before the vCPU is dropped; the handler runs on that thread.
        unsafe { flag.write_volatile(1) };
    }
}

fn register_kick() -> Result<(), ThreadError> {
    static REGISTERED: OnceLock<Result<(), vmm_sys_util::errno::Error>> = OnceLock::new();
    REGISTERED
        .get_or_init(|| vmm_sys_util::signal::register_signal_handler(kick_signal(), on_kick))
        .map_err(ThreadError::Signal)
}

/// The vCPU threads of a VM.
#[derive(Debug)]
pub(crate) struct VcpuThreads {
    threads: Vec<(JoinHandle<()>, Sender<Pausing>)>,
    stop: Arc<AtomicBool>,
}

/// Request of a vCPU's state: the MSRs to save, and the sink of the state.
type SaveVcpu = (Arc<[u32]>, Sender<Result<VcpuState, SnapshotError>>);

/// Work of a vCPU thread while its vCPU does not run. The thread looks for it when it is kicked.
#[derive(Debug)]
struct Pausing {
    /// The thread sends once its vCPU stands.
    stands: Sender<()>,
    /// The vCPU runs again when the other end is dropped.
    save: Receiver<SaveVcpu>,
}

/// vCPUs that stand. They run again when the value is dropped.
#[derive(Debug)]
pub(crate) struct PausedVcpus(Vec<Sender<SaveVcpu>>);

impl PausedVcpus {
    /// Returns the state of each vCPU. `msrs` are those that KVM saves.
    pub fn save(&self, msrs: &[u32]) -> Result<Vec<VcpuState>, SnapshotError> {
        let msrs: Arc<[u32]> = msrs.into();
        let states = self.0.iter().map(|vcpu| {
            let (sender, state) = channel();
            let ended = |_| SnapshotError::Ended;
            vcpu.send((Arc::clone(&msrs), sender))
                .map_err(|_| SnapshotError::Ended)?;
            state.recv().map_err(ended)?
        });
        states.collect()
    }
}

impl VcpuThreads {
    /// Starts one thread per vCPU, each bound to the host processor that `pins` names for it, if any.
    pub fn start(
        vcpus: Vec<VcpuFd>,
        pins: &[usize],
        buses: &Arc<Buses>,
        counters: &Arc<ExitCounters>,
        events: &Sender<Event>,
        confinement: Confinement,
    ) -> Result<Self, VmError> {
        register_kick()?;
        let mut started = Self {
            threads: Vec::new(),
            stop: Arc::new(AtomicBool::new(false)),
        };
        for (id, fd) in (0u8..).zip(vcpus) {
            let name = format!("vcpu{id}");
            let thread = VcpuThread {
                id,
                fd,
                pin: pins.get(usize::from(id)).copied(),
                buses: Arc::clone(buses),
                counters: Arc::clone(counters),
                stop: Arc::clone(&started.stop),
                confinement: confinement.clone(),
            };
            let events = events.clone();
            let (pause, pausing) = channel();
            let handle = std::thread::Builder::new()
                .name(name.clone())
                .spawn(move || {
                    if let Some(end) = thread.run(&pausing) {
                        // The receiver is gone if the VM is being stopped.
                        if events.send(Event::Ended(end)).is_err() {
                            tracing::trace!("a vCPU ended after its VM");
                        }
                    }
                })
                .map_err(|source| ThreadError::Spawn { name, source })?;
            started.threads.push((handle, pause));
        }
        Ok(started)
    }

    /// Lets all vCPUs stand, between two instructions.
    pub fn pause(&self) -> Result<PausedVcpus, SnapshotError> {
        let mut paused = Vec::new();
        let mut standing = Vec::new();
        for (thread, pausing) in &self.threads {
            let (stands, stood) = channel();
            let (saving, save) = channel();
            pausing
                .send(Pausing { stands, save })
                .map_err(|_| SnapshotError::Ended)?;
            kick(thread);
            paused.push(saving);
            standing.push(stood);
        }
        for stood in standing {
            stood.recv().map_err(|_| SnapshotError::Ended)?;
        }
        Ok(PausedVcpus(paused))
    }

    /// Lets no vCPU run again once it is interrupted or stands.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
    }

    /// Waits until `judge` returns an exit reason for a vCPU's end, the VM is stopped, or the timeout expires. `save` serves
    /// requests for snapshots meanwhile.
    pub fn wait(
        &self,
        events: &Receiver<Event>,
        timeout: Option<Duration>,
        mut save: impl FnMut(Request) -> AfterSnapshot,
        mut judge: impl FnMut(VcpuEnd) -> Option<ExitReason>,
    ) -> ExitReason {
        // A deadline that no clock reaches is none.
        let deadline = timeout.and_then(|after| Instant::now().checked_add(after));
        loop {
            let event = match deadline {
                None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(end) => events.recv_timeout(end.saturating_duration_since(Instant::now())),
            };
            match event {
                Ok(Event::Stop) | Err(RecvTimeoutError::Disconnected) => {
                    return ExitReason::Stopped;
                }
                Ok(Event::Save(request)) => match save(request) {
                    AfterSnapshot::Continue => {}
                    AfterSnapshot::Stop => return ExitReason::Stopped,
                },
                Ok(Event::Ended(end)) => {
                    if let Some(outcome) = judge(end) {
                        return outcome;
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    return ExitReason::TimedOut {
                        after: timeout.unwrap_or_default(),
                    };
                }
            }
        }
    }
}

impl Drop for VcpuThreads {
    /// Interrupts every vCPU and joins its thread.
    fn drop(&mut self) {
        self.stop();
        for (thread, _) in self.threads.drain(..) {
            kick(&thread);
            if thread.join().is_err() {
                tracing::error!("a vCPU thread panicked");
            }
        }
    }
}

/// Interrupts the vCPU of a thread.
fn kick(thread: &JoinHandle<()>) {
    // SAFETY: the handle of a thread that is not joined yet, so its pthread_t is valid; the signal has a handler.
    unsafe { libc::pthread_kill(thread.as_pthread_t(), kick_signal()) };
}

struct VcpuThread {
    id: u8,
    fd: VcpuFd,
    /// Host processor on which the thread stays.
    pin: Option<usize>,
    buses: Arc<Buses>,
    counters: Arc<ExitCounters>,
    stop: Arc<AtomicBool>,
    confinement: Confinement,
}

impl VcpuThread {
    /// Runs the vCPU until the guest ends; `None` if the VM was stopped.
    fn run(mut self, pausing: &Receiver<Pausing>) -> Option<VcpuEnd> {
        if let Err(error) = vmm_sys_util::signal::unblock_signal(kick_signal()) {
            tracing::debug!(?error, "cannot unblock the signal that stops a vCPU");
        }
        let end = match self.prepare() {
            Ok(()) => {
                IMMEDIATE_EXIT.set(&raw mut self.fd.get_kvm_run().immediate_exit);
                let end = self.run_until_end(pausing);
                IMMEDIATE_EXIT.set(ptr::null_mut());
                end?
            }
            Err(error) => End::RunFailed { error },
        };
        Some(VcpuEnd {
            vcpu: self.id,
            registers: self.registers(),
            end,
        })
    }

    /// Binds the calling thread to its host processor, and confines it. Returns an error's text.
    fn prepare(&self) -> Result<(), String> {
        if let Some(processor) = self.pin {
            bind_to(processor).map_err(|error| {
                format!("its thread cannot be bound to processor {processor}: {error}")
            })?;
        }
        self.confinement
            .enter()
            .map_err(|error| format!("its thread cannot be confined: {error}"))
    }

    fn run_until_end(&mut self, pausing: &Receiver<Pausing>) -> Option<End> {
        // A request comes with an interruption, which KVM reports when it has finished the access before. One that came before
        // the first run found nothing to interrupt.
        let mut interrupted = true;
        while !self.stop.load(Ordering::SeqCst) {
            if interrupted && let Ok(pausing) = pausing.try_recv() {
                self.pause(&pausing);
                // The VM may have been stopped meanwhile.
                continue;
            }
            interrupted = match self.step() {
                Ok(interrupted) => interrupted,
                Err(end) => return Some(end),
            };
        }
        None
    }

    /// Runs the vCPU up to its next exit, and handles that. Returns whether the vCPU was interrupted instead.
    fn step(&mut self) -> Result<bool, End> {
        let end = match self.fd.run() {
            Ok(exit) => handle(exit, &self.buses, &self.counters),
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {
                count(&self.counters.interrupted);
                self.fd.set_kvm_immediate_exit(0);
                return Ok(true);
            }
            Err(error) => Some(End::RunFailed {
                error: error.to_string(),
            }),
        };
        match end {
            Some(End::Internal { .. }) => {
                // SAFETY: the exit reason says that this member of the union is the valid one.
                let internal = unsafe { self.fd.get_kvm_run().__bindgen_anon_1.internal };
                Err(End::Internal {
                    suberror: internal.suberror,
                })
            }
            Some(end) => Err(end),
            None => Ok(false),
        }
    }

    /// Stands until the other end is dropped, and returns the vCPU's state when asked.
    fn pause(&self, pausing: &Pausing) {
        // The other end is gone if another vCPU has ended meanwhile.
        if pausing.stands.send(()).is_err() {
            return;
        }
        while let Ok((msrs, sink)) = pausing.save.recv() {
            let _ = sink.send(VcpuState::save(&self.fd, &msrs));
        }
        if self.stop.load(Ordering::SeqCst) {
            return;
        }
        // Otherwise the guest's watchdogs take the time for a lockup.
        match self.fd.kvmclock_ctrl() {
            // The guest does not use kvmclock.
            Err(error) if error.errno() == libc::EINVAL => {}
            Err(error) => {
                tracing::debug!(%error, "a guest does not learn that its processor stood");
            }
            Ok(()) => {}
        }
    }

    fn registers(&self) -> Registers {
        let regs = self.fd.get_regs().unwrap_or_default();
        let sregs = self.fd.get_sregs().unwrap_or_default();
        Registers {
            rip: regs.rip,
            rsp: regs.rsp,
            cr2: sregs.cr2,
            cr3: sregs.cr3,
            cs: sregs.cs.selector,
        }
    }
}

/// Binds the calling thread to one processor of the host.
fn bind_to(processor: usize) -> Result<(), Errno> {
    if processor >= CpuSet::MAX_CPU {
        return Err(Errno::INVAL);
    }
    let mut only = CpuSet::new();
    only.set(processor);
    sched_setaffinity(None, &only)
}

fn handle(exit: VcpuExit<'_>, buses: &Buses, counters: &ExitCounters) -> Option<End> {
    match exit {
        VcpuExit::IoIn(port, data) => {
            count(&counters.io);
            buses.ports.read(port.into(), data);
            None
        }
        VcpuExit::IoOut(port, data) => {
            count(&counters.io);
            end_of(buses.ports.write(port.into(), data))
        }
        VcpuExit::MmioRead(address, data) => {
            count(&counters.mmio);
            buses.memory.read(address, data);
            None
        }
        VcpuExit::MmioWrite(address, data) => {
            count(&counters.mmio);
            end_of(buses.memory.write(address, data))
        }
        VcpuExit::Shutdown => {
            count(&counters.other);
            Some(End::Shutdown)
        }
        VcpuExit::InternalError => {
            count(&counters.other);
            Some(End::Internal { suberror: 0 })
        }
        VcpuExit::FailEntry(reason, cpu) => {
            count(&counters.other);
            Some(End::EntryFailed { reason, cpu })
        }
        VcpuExit::Intr | VcpuExit::IrqWindowOpen => {
            count(&counters.interrupted);
            None
        }
        VcpuExit::Hlt => {
            count(&counters.halt);
            Some(End::Unexpected {
                exit: "HLT without an interrupt controller".to_owned(),
            })
        }
        other => {
            count(&counters.other);
            Some(End::Unexpected {
                exit: format!("{other:?}"),
            })
        }
    }
}

fn end_of(effect: Effect) -> Option<End> {
    (effect != Effect::Continue).then_some(End::Write(effect))
}
