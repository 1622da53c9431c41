//! Creates and runs a VM that boots Linux.

use std::fmt;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use kvm_bindings::CpuId;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use wormhole_lock::Mutex;

use crate::aperture::{Aperture, WindowConfig};
use crate::boot::{self, BootError, BootSource};
use crate::bus::{BusError, Buses, Effect};
use crate::chipset::{self, Chipset};
use crate::confinement::{Confinement, ConfinementError};
use crate::cpu::{self, CpuError};
use crate::device_thread::DeviceThread;
use crate::devices::balloon::{Balloon, BalloonWorker};
use crate::devices::block::{Block, BlockWorker, DiskImage};
use crate::devices::console::{Console, ConsoleInput, ConsoleWorker};
use crate::devices::fs::{Fs, FsWorker, Tag};
use crate::devices::net::{HostEnd, MacAddress, Net, NetWorker};
use crate::devices::pci::{MAX_FUNCTIONS, NoBarSpace, PciFull};
use crate::devices::power::{self, ExitStatusPort, I8042Ports, PanicPort, Pm1Ports, PowerButton};
use crate::devices::rng::{Rng, RngWorker};
use crate::devices::serial::{self, ConsoleTail, IrqTrigger, SerialPort, Tee};
use crate::devices::vfio::{DeviceAddress, Passthrough, PassthroughError, allow_locking};
use crate::devices::vsock::{Mux, Vsock, VsockAcceptor, VsockWorker};
use crate::disabled_exits::DisabledExits;
use crate::exit_accounting::{self, ExitAccounting};
use crate::exit_reason::{ExitReason, Report};
use crate::irq::IrqError;
use crate::memory::{self, FileMemory, Layout, MemoryError, Range, Window};
use crate::snapshot::{self, Machine, Memory, Snapshot, SnapshotError, SnapshotHandle};
use crate::stats::{Stats, StatsError, VmStats};
use crate::sync::Ending;
use crate::vcpu::{End, Event, ExitCounters, StopHandle, ThreadError, VcpuEnd, VcpuThreads};

/// Maximum number of vCPUs. APIC ids have 8 bits.
pub const MAX_VCPUS: u8 = 64;

/// Maximum number of disks. Each has one letter in the guest: `/dev/vda` to `/dev/vdx`.
pub const MAX_DISKS: usize = 24;

/// Maximum number of network interfaces.
pub const MAX_NETWORKS: usize = 3;

/// Devices that every VM can have: vsock, entropy, console, balloon.
const OTHER_DEVICES: usize = 4;

/// Maximum number of disks, networks and file systems together.
pub const MAX_DEVICES: usize = MAX_FUNCTIONS - OTHER_DEVICES;

/// Error from creating or running a VM.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// KVM refused a request.
    #[error("KVM refuses {what}")]
    Kvm {
        /// The request.
        what: &'static str,
        /// Error from KVM.
        source: kvm_ioctls::Error,
    },
    /// The number of vCPUs is out of range.
    #[error("a VM cannot have {0} vCPUs: between 1 and {MAX_VCPUS} are possible")]
    Vcpus(u8),
    /// The number of host processors is neither 0 nor that of the vCPUs.
    #[error("a VM with {vcpus} vCPUs cannot be bound to {pins} processors: name one for each vCPU")]
    Pins {
        /// Number of host processors.
        pins: usize,
        /// Number of vCPUs.
        vcpus: usize,
    },
    /// KVM cannot disable the requested exits.
    #[error(
        "KVM cannot disable the exits {wanted:#x} (KVM_CAP_X86_DISABLE_EXITS offers {offered:#x})"
    )]
    DisableExits {
        /// Requested exits, as KVM_X86_DISABLE_EXITS_* bits.
        wanted: u64,
        /// Exits that KVM can disable, as the same bits.
        offered: u64,
    },
    /// Guest memory cannot be set up.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The kernel or the initramfs cannot be loaded.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// A processor cannot be set up.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// A device's ports or memory cannot be claimed.
    #[error(transparent)]
    Bus(#[from] BusError),
    /// The PCI bus is full.
    #[error(transparent)]
    Pci(#[from] PciFull),
    /// A BAR cannot be allocated.
    #[error(transparent)]
    Bar(#[from] NoBarSpace),
    /// A device of the host cannot be passed through.
    #[error(transparent)]
    Passthrough(#[from] PassthroughError),
    /// An interrupt cannot be set up.
    #[error(transparent)]
    Irq(#[from] IrqError),
    /// A thread cannot be started.
    #[error(transparent)]
    Thread(#[from] ThreadError),
    /// A thread cannot be confined.
    #[error("the threads that serve the guest cannot be confined")]
    Confinement(#[from] ConfinementError),
    /// KVM's statistics cannot be opened.
    #[error(transparent)]
    Stats(#[from] StatsError),
    /// A payload cannot be loaded.
    #[error(transparent)]
    Payload(#[from] crate::payload::PayloadError),
    /// The VM cannot go on from a snapshot.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// An eventfd of a device's queue cannot be created.
    #[error("cannot make an eventfd for a queue")]
    EventFd(#[source] std::io::Error),
    /// The pipe of the console's input cannot be created.
    #[error("cannot make a pipe for the console's input")]
    Pipe(#[source] std::io::Error),
    /// A device thread's event loop cannot be created or used.
    #[error("cannot make the devices' event loop")]
    EventLoop(#[source] event_manager::Error),
}

/// Configuration of a guest's vsock device.
pub struct VsockConfig {
    /// The guest's context id, at least 3.
    pub guest_cid: u32,
    /// Handler of the guest's connections.
    pub acceptor: Box<dyn VsockAcceptor>,
}

impl fmt::Debug for VsockConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VsockConfig")
            .field("guest_cid", &self.guest_cid)
            .finish_non_exhaustive()
    }
}

/// Configuration of a network interface.
#[derive(Debug)]
pub struct NetConfig {
    /// The host's end.
    pub end: Box<dyn HostEnd>,
    /// Hardware address of the guest's end.
    pub mac: MacAddress,
}

/// Configuration of a file system.
#[derive(Debug)]
pub struct FsConfig {
    /// Name in the guest.
    pub tag: Tag,
    /// Socket of packets (SOCK_SEQPACKET) of the server, each a FUSE message.
    pub server: OwnedFd,
}

/// Start of a guest.
#[derive(Debug)]
pub enum Start {
    /// At the entry point of a kernel.
    Boot(BootSource),
    /// At the instruction at which it was saved. The rest of the configuration must be that of the VM that was saved.
    Restore(Box<Snapshot>),
}

/// Configuration of a VM.
pub struct VmConfig {
    /// Kernel, initramfs and command line, or a snapshot.
    pub start: Start,
    /// RAM in MiB, without the window.
    pub memory_mib: u64,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// The window, or the aperture of several.
    pub window: Option<WindowConfig>,
    /// Memory of a file system in which the guest's processes share memory: a memfd like that of a window.
    pub file_memory: Option<OwnedFd>,
    /// The vsock device, if any.
    pub vsock: Option<VsockConfig>,
    /// File systems of the host.
    pub file_systems: Vec<FsConfig>,
    /// Disks, in the order in which the guest numbers them.
    pub disks: Vec<DiskImage>,
    /// Network interfaces, in the order in which the guest numbers them.
    pub networks: Vec<NetConfig>,
    /// Devices of the host that are passed through. All of the RAM is allocated then, and of a window only what is
    /// attached to an aperture is reached by them.
    pub passed_through: Vec<DeviceAddress>,
    /// Allocates RAM before the guest starts, and each part of the window when it is shown.
    pub prefault: bool,
    /// Sink of the output of the guest's serial port and of its virtio console. It must not block: it is written on a vCPU
    /// thread and on a device thread, and takes what it has room for. A sink that blocks, blocks the guest and its
    /// shutdown.
    pub console: Box<dyn Write + Send>,
    /// Watchdog timeout, after which the VM is stopped.
    pub timeout: Option<Duration>,
    /// VM exits to disable.
    pub disabled_exits: DisabledExits,
    /// The host processor on which each vCPU stays; none if the host's scheduler chooses.
    pub pins: Vec<usize>,
    /// Statistics of the vCPU of the VM that serves this one, whose exits are counted beside this one's.
    pub server: Option<Arc<Stats>>,
}

impl fmt::Debug for VmConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VmConfig")
            .field("start", &self.start)
            .field("memory_mib", &self.memory_mib)
            .field("vcpus", &self.vcpus)
            .field("window", &self.window)
            .field("file_memory", &self.file_memory)
            .field("vsock", &self.vsock)
            .field("file_systems", &self.file_systems)
            .field("disks", &self.disks)
            .field("networks", &self.networks)
            .field("passed_through", &self.passed_through)
            .field("prefault", &self.prefault)
            .field("timeout", &self.timeout)
            .field("disabled_exits", &self.disabled_exits)
            .field("pins", &self.pins)
            .field("server", &self.server)
            .finish_non_exhaustive()
    }
}

/// Prepares the confinement of one kind of thread.
type ConfinementOf = fn() -> Result<Confinement, ConfinementError>;

/// A VM that is ready to run.
#[derive(Debug)]
pub struct Vm {
    vcpus: Vec<VcpuFd>,
    pins: Vec<usize>,
    buses: Arc<Buses>,
    exit_status: Arc<Mutex<ExitStatusPort>>,
    button: PowerButton,
    accounting: Arc<Mutex<ExitAccounting>>,
    tail: ConsoleTail,
    input: Option<ConsoleInput>,
    stats: VmStats,
    counters: Arc<ExitCounters>,
    events: (Sender<Event>, Receiver<Event>),
    window_range: Option<Range>,
    timeout: Option<Duration>,
    ending: Ending,
    reclaimed: Arc<AtomicU64>,
    // Everything below is dropped after the vCPUs, which use it.
    device_threads: Vec<(DeviceThread, ConfinementOf)>,
    machine: Machine,
    is_restored: bool,
    window: Option<Window>,
    aperture: Option<Aperture>,
}

impl Vm {
    /// Creates the VM and loads the guest.
    pub fn new(config: VmConfig) -> Result<Self, VmError> {
        if !(1..=MAX_VCPUS).contains(&config.vcpus) {
            return Err(VmError::Vcpus(config.vcpus));
        }
        check_pins(&config.pins, config.vcpus.into())?;
        let kvm = Kvm::new().map_err(kvm_error("/dev/kvm"))?;
        let vm = Arc::new(kvm.create_vm().map_err(kvm_error("a VM"))?);
        chipset::create_chips(&vm)?;
        config.disabled_exits.apply(&vm)?;
        let passed_through = Passthrough::open(&vm, &config.passed_through)?;

        let (window, aperture) = match config.window {
            None => (None, None),
            Some(WindowConfig::Whole(memfd)) => {
                let window = Window::new(memfd)?.prefaulted(config.prefault);
                (Some(window), None)
            }
            Some(WindowConfig::Aperture(slots)) => {
                let aperture = Aperture::new(slots)?;
                (Some(aperture.window().clone()), Some(aperture))
            }
        };
        let file_memory = config.file_memory.map(FileMemory::new).transpose()?;
        let supported = cpu::supported_cpuid(&kvm)?;
        let processor = cpu::cpuid_of(&supported, 0);
        let processor = match &config.start {
            Start::Restore(snapshot) => snapshot.processor(&processor)?,
            Start::Boot(_) => processor,
        };
        let layout = Layout::new(config.memory_mib, window.as_ref().map(Window::len))?;
        let layout = match &aperture {
            Some(aperture) => layout.divided(aperture.slots()),
            None => layout,
        };
        let layout = layout.with_file_memory(file_memory.as_ref().map(FileMemory::len));
        let layout = match &passed_through {
            Some(devices) => {
                let (align, bytes) = devices.wide_bars();
                layout.with_wide_bars(align, bytes)
            }
            None => layout,
        };
        layout.check_address_bits(cpu::address_bits(&processor))?;
        let ram = memory::map_ram(&layout.ram)?;
        if config.prefault {
            memory::populate(&ram)?;
        }
        memory::add_ram_memslots(&vm, &ram)?;
        if let (Some(window), Some(range)) = (&window, layout.window) {
            window.add_memslot(&vm, range.start)?;
        }
        if let (Some(memory), Some(range)) = (&file_memory, layout.file_memory) {
            memory.add_memslot(&vm, range.start)?;
        }
        let aperture = match &passed_through {
            Some(devices) => {
                let slots = aperture.iter().map(Aperture::most);
                allow_locking((config.memory_mib << 20).saturating_add(slots.sum()))?;
                devices.dma.map_ram(&ram)?;
                let start = layout.window.map_or(0, |window| window.start);
                aperture.map(|aperture| aperture.reached_by(devices.dma.clone(), start))
            }
            None => aperture,
        };

        let device_thread = DeviceThread::start("devices")?;
        let mut chipset = Chipset::new(Arc::clone(&vm), ram.clone(), layout.wide_bars);
        if let Some(VsockConfig {
            guest_cid,
            acceptor,
        }) = config.vsock
        {
            let device = Vsock::new(guest_cid.into());
            let worker = VsockWorker::new(ram.clone(), Mux::new(guest_cid.into(), acceptor));
            chipset.add_virtio(&device_thread, Box::new(device), Box::new(worker))?;
        }
        let worker = Box::new(RngWorker::new(ram.clone()));
        chipset.add_virtio(&device_thread, Box::new(Rng), worker)?;
        let tail = ConsoleTail::default();
        let output = Tee::new(config.console, tail.clone());
        let console = ConsoleWorker::new(ram.clone(), output.other()).map_err(VmError::Pipe)?;
        let (worker, port_input) = console;
        chipset.add_virtio(&device_thread, Box::new(Console), Box::new(worker))?;
        let ending = Ending::default();
        let mut device_threads: Vec<(_, ConfinementOf)> =
            vec![(device_thread, Confinement::of_devices)];
        let reclaimed = Arc::new(AtomicU64::new(0));
        // Devices of the host go on reaching the pages that a balloon gives back.
        if passed_through.is_none() {
            let thread = DeviceThread::start("balloon")?;
            let worker = Box::new(BalloonWorker::new(ram.clone(), Arc::clone(&reclaimed)));
            let balloon = Balloon {
                reporting: !config.prefault,
            };
            chipset.add_virtio(&thread, Box::new(balloon), worker)?;
            device_threads.push((thread, Confinement::of_balloon));
        }
        let mut file_systems = Vec::new();
        for (number, FsConfig { tag, server }) in config.file_systems.into_iter().enumerate() {
            let thread = DeviceThread::start(&format!("fs-{number}"))?;
            let worker = Box::new(FsWorker::new(ram.clone(), server));
            file_systems.push(tag.to_string());
            chipset.add_virtio(&thread, Box::new(Fs::new(tag)), worker)?;
            device_threads.push((thread, Confinement::of_file_system));
        }
        let mut disks = Vec::new();
        for (number, image) in config.disks.into_iter().enumerate() {
            let name = format!("disk-{number}");
            let thread = DeviceThread::start(&name)?;
            let device = Box::new(Block::new(&image));
            disks.push(image.handle().map_err(SnapshotError::DiskState)?);
            let worker = BlockWorker::new(ram.clone(), image, name, ending.clone());
            let worker = Box::new(worker);
            chipset.add_virtio(&thread, device, worker)?;
            device_threads.push((thread, Confinement::of_disk));
        }
        for (number, NetConfig { end, mac }) in config.networks.into_iter().enumerate() {
            let thread = DeviceThread::start(&format!("net-{number}"))?;
            let device = Box::new(Net::new(mac, &*end));
            let worker = Box::new(NetWorker::new(ram.clone(), end));
            chipset.add_virtio(&thread, device, worker)?;
            device_threads.push((thread, Confinement::of_network));
        }
        let passes_devices = passed_through.is_some();
        for device in passed_through.into_iter().flat_map(|passed| passed.devices) {
            chipset.add_passed_through(device)?;
        }
        let vcpus = create_vcpus(&vm, &processor, config.vcpus)?;
        let msrs = snapshot::msrs(&kvm)?;
        match &config.start {
            Start::Restore(snapshot) => {
                let memory = Memory {
                    ram: &ram,
                    files: file_memory.as_ref(),
                };
                snapshot.restore_processors(&vm, memory, &vcpus, &msrs)?;
            }
            Start::Boot(source) => {
                let entry = boot::load(&ram, &layout, config.vcpus, source)?;
                if let Some(first) = vcpus.first() {
                    cpu::enter_linux(first, &ram, entry)?;
                }
            }
        }
        let stats = VmStats::new(
            Stats::of_vm(&vm)?,
            vcpus.iter().map(Stats::of_vcpu).collect::<Result<_, _>>()?,
        );
        let accounting = Arc::new(Mutex::new(ExitAccounting::new({
            let (stats, server) = (stats.clone(), config.server);
            let of_server = move || server.as_ref().map_or(Some(0), |vcpu| vcpu.exits());
            move || Some([stats.read().ok()?.vcpu_sum("exits"), of_server()?])
        })));
        let exit_status = Arc::new(Mutex::new(ExitStatusPort::default()));
        let interrupt = IrqTrigger(chipset.legacy_line(serial::IRQ)?);
        let (serial, serial_input) = match &config.start {
            Start::Restore(snapshot) => snapshot.state.serial_port(interrupt, output)?,
            Start::Boot(_) => SerialPort::new(interrupt, output),
        };
        chipset.add_ports(serial::COM1, serial::PORTS, serial.clone())?;
        chipset.add_ports(power::EXIT_STATUS, 1, exit_status.clone())?;
        chipset.add_ports(exit_accounting::PORT, 1, accounting.clone())?;
        let i8042 = Arc::new(Mutex::new(I8042Ports));
        chipset.add_ports(power::I8042, power::I8042_PORTS, i8042)?;
        let panic = Arc::new(Mutex::new(PanicPort));
        chipset.add_ports(power::PANIC, 1, panic)?;
        let interrupt = chipset.legacy_line(power::SCI.into())?;
        let pm1 = Arc::new(Mutex::new(Pm1Ports::new(interrupt)));
        chipset.add_ports(power::PM1_EVENT, power::PM1_PORTS, pm1.clone())?;
        let (buses, pci) = chipset.into_buses()?;
        let machine = Machine {
            vm,
            ram,
            pci,
            serial,
            power: Arc::clone(&pm1),
            exit_status: Arc::clone(&exit_status),
            disks,
            file_systems,
            has_aperture: aperture.is_some(),
            file_memory,
            passes_devices,
            processor,
            msrs,
        };
        if let Start::Restore(snapshot) = &config.start {
            machine.restore(&snapshot.state)?;
        }
        Ok(Self {
            vcpus,
            pins: config.pins,
            buses: Arc::new(buses),
            exit_status,
            button: PowerButton::new(pm1),
            accounting,
            tail,
            input: Some(ConsoleInput::new(serial_input, port_input)),
            stats,
            counters: Arc::new(ExitCounters::default()),
            events: channel(),
            window_range: layout.window,
            timeout: config.timeout,
            ending,
            reclaimed,
            device_threads,
            machine,
            is_restored: matches!(config.start, Start::Restore(_)),
            window,
            aperture,
        })
    }

    /// Returns a handle that stops the VM from another thread.
    pub fn stop_handle(&self) -> StopHandle {
        StopHandle::new(self.events.0.clone())
    }

    /// Returns a handle that takes snapshots from another thread.
    pub fn snapshot_handle(&self) -> SnapshotHandle {
        SnapshotHandle::new(self.events.0.clone())
    }

    /// Returns the guest's power button.
    pub fn power_button(&self) -> PowerButton {
        self.button.clone()
    }

    /// Returns KVM's statistics, readable from any thread while the VM runs and after.
    pub fn stats(&self) -> VmStats {
        self.stats.clone()
    }

    /// Returns the counters of exits to the monitor, readable from any thread.
    pub fn exit_counters(&self) -> Arc<ExitCounters> {
        Arc::clone(&self.counters)
    }

    /// Returns the last lines of the guest's console, readable from any thread.
    pub fn console_tail(&self) -> ConsoleTail {
        self.tail.clone()
    }

    /// Returns the input of the guest's console, once.
    pub fn take_console_input(&mut self) -> Option<ConsoleInput> {
        self.input.take()
    }

    /// Returns the window's range of guest physical addresses.
    pub fn window_range(&self) -> Option<Range> {
        self.window_range
    }

    /// Returns the aperture, if the VM has one instead of a window.
    pub fn aperture(&self) -> Option<Aperture> {
        self.aperture.clone()
    }

    /// Returns the window. Parts of it can be replaced while the guest runs.
    pub fn window(&self) -> Option<Window> {
        self.window.clone()
    }

    /// Runs the guest until it ends. From now on the threads that serve it are confined: the vsock acceptor and the
    /// console sink run on them and are limited to the system calls that [`crate::confinement`] allows.
    pub fn run(self) -> Result<Report, VmError> {
        let (sender, receiver) = &self.events;
        let start = Instant::now();
        for (thread, confinement) in &self.device_threads {
            thread.confine(confinement()?)?;
        }
        if self.is_restored {
            self.machine.resume()?;
        }
        let confinement = match self.machine.passes_devices {
            true => Confinement::of_vcpu_with_devices()?,
            false => Confinement::of_vcpu()?,
        };
        let threads = VcpuThreads::start(
            self.vcpus,
            &self.pins,
            &self.buses,
            &self.counters,
            sender,
            confinement,
        )?;
        let device_threads: Vec<_> = self
            .device_threads
            .iter()
            .map(|(thread, _)| thread)
            .collect();
        let save = |request| {
            let machine = &self.machine;
            machine.serve(request, &threads, &device_threads, &self.ending)
        };
        let outcome = threads.wait(receiver, self.timeout, save, |end| {
            Some(judge(&end, self.exit_status.lock().status, &self.tail))
        });
        // A vCPU that resets a disk waits until the disk's reads under way and its current request are done.
        self.ending.begin();
        drop(threads);
        // A kernel that panicked and failed to reset the machine counts as panicked.
        let outcome = match outcome {
            ExitReason::TimedOut { .. } => panicked(&self.tail).unwrap_or(outcome),
            outcome => outcome,
        };
        Ok(Report {
            outcome,
            duration: start.elapsed(),
            console_tail: self.tail.lines(),
            out_of_memory: self.tail.out_of_memory(),
            exits: self.counters.read(),
            unclaimed_accesses: self.buses.ports.unclaimed() + self.buses.memory.unclaimed(),
            exit_accounts: self.accounting.lock().entered(),
            reclaimed_bytes: self.reclaimed.load(Ordering::Relaxed),
        })
    }
}

/// Translates the end of a vCPU to the exit reason of a Linux guest. The first vCPU that ends, ends the VM.
fn judge(end: &VcpuEnd, status: Option<u32>, tail: &ConsoleTail) -> ExitReason {
    if let Some(failure) = end.failure() {
        return failure;
    }
    match (status, &end.end) {
        (Some(status), _) | (None, &End::Write(Effect::Exited(status))) => {
            ExitReason::Exited { status }
        }
        // A program can write a panic's words to the console. No guest that panicked switches itself off.
        (None, End::Write(Effect::PowerOff)) => ExitReason::PoweredOff,
        (None, End::Write(Effect::Panicked)) => panicked(tail).unwrap_or(ExitReason::Panicked {
            line: "its console does not show why".to_owned(),
        }),
        (None, _) => panicked(tail).unwrap_or(ExitReason::Reset),
    }
}

/// Returns the exit reason if the console shows a kernel panic.
fn panicked(tail: &ConsoleTail) -> Option<ExitReason> {
    let line = tail.panic()?;
    // "Out of memory: …", "System is deadlocked on memory".
    let memory = line.to_ascii_lowercase();
    Some(
        if memory.contains("out of memory") || memory.contains("deadlocked on memory") {
            ExitReason::OutOfMemory { line }
        } else {
            ExitReason::Panicked { line }
        },
    )
}

pub(crate) fn kvm_error(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> VmError {
    move |source| VmError::Kvm { what, source }
}

/// Checks that each vCPU has a host processor of its own, or none has.
pub(crate) fn check_pins(pins: &[usize], vcpus: usize) -> Result<(), VmError> {
    if pins.is_empty() || pins.len() == vcpus {
        return Ok(());
    }
    Err(VmError::Pins {
        pins: pins.len(),
        vcpus,
    })
}

fn create_vcpus(vm: &VmFd, supported: &CpuId, count: u8) -> Result<Vec<VcpuFd>, VmError> {
    (0..count)
        .map(|id| {
            let vcpu = vm.create_vcpu(u64::from(id)).map_err(kvm_error("a vCPU"))?;
            vcpu.set_cpuid2(&cpu::cpuid_of(supported, id))
                .map_err(kvm_error("the vCPU's CPUID"))?;
            cpu::set_msrs(&vcpu, id)?;
            cpu::set_lapic_pins(&vcpu, id)?;
            Ok(vcpu)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit_reason::Registers;

    /// Returns the exit reason of a guest that writes `text` to its console and `status` to its port, then ends by
    /// `end`.
    fn ended(text: &str, status: Option<u32>, end: Effect) -> ExitReason {
        let tail = ConsoleTail::default();
        let mut console = Tee::new(Box::new(std::io::sink()), tail.clone());
        console.write_all(text.as_bytes()).expect("a sink");
        let end = VcpuEnd {
            vcpu: 0,
            end: End::Write(end),
            registers: Registers::default(),
        };
        judge(&end, status, &tail)
    }

    #[test]
    fn an_exit_status_counts_however_the_guest_ends() {
        for end in [Effect::PowerOff, Effect::Reset] {
            assert_eq!(ended("", Some(3), end), ExitReason::Exited { status: 3 });
        }
    }

    #[test]
    fn ends_without_a_status_are_distinguished() {
        assert_eq!(ended("", None, Effect::PowerOff), ExitReason::PoweredOff);
        assert_eq!(ended("", None, Effect::Reset), ExitReason::Reset);
    }

    #[test]
    fn a_panic_is_reported_with_its_line() {
        let line = "[    2.5] Kernel panic - not syncing: VFS: Unable to mount root fs";
        let text = format!("{line}\r\n[    2.6] Rebooting\r\n");
        assert_eq!(
            ended(&text, None, Effect::Reset),
            ExitReason::Panicked {
                line: line.to_owned()
            }
        );
        let line = "Kernel panic - not syncing: System is deadlocked on memory";
        assert_eq!(
            ended(&format!("{line}\n"), None, Effect::Reset),
            ExitReason::OutOfMemory {
                line: line.to_owned()
            }
        );
    }

    #[test]
    fn a_panic_that_the_console_does_not_show_is_reported_as_well() {
        let told = ended("", None, Effect::Panicked);
        assert!(matches!(told, ExitReason::Panicked { .. }), "{told}");
        let line = "Kernel panic - not syncing: sysrq triggered crash".to_owned();
        let told = ended(&format!("{line}\n"), None, Effect::Panicked);
        assert_eq!(told, ExitReason::Panicked { line });
    }

    #[test]
    fn a_guest_that_ends_in_order_did_not_panic_whatever_its_console_shows() {
        let text = "# journalctl -b -1\nKernel panic - not syncing: yesterday\n";
        assert_eq!(ended(text, None, Effect::PowerOff), ExitReason::PoweredOff);
        let exited = ExitReason::Exited { status: 0 };
        assert_eq!(ended(text, Some(0), Effect::Reset), exited);
    }

    #[test]
    fn a_vm_without_vcpus_is_refused() {
        let config = VmConfig {
            start: Start::Boot(BootSource {
                kernel: "/nonexistent".into(),
                initramfs: Vec::new(),
                command_line: String::new(),
            }),
            memory_mib: 64,
            vcpus: 0,
            window: None,
            file_memory: None,
            vsock: None,
            file_systems: Vec::new(),
            disks: Vec::new(),
            networks: Vec::new(),
            passed_through: Vec::new(),
            prefault: false,
            console: Box::new(std::io::sink()),
            timeout: None,
            disabled_exits: DisabledExits::default(),
            pins: Vec::new(),
            server: None,
        };
        assert!(matches!(Vm::new(config), Err(VmError::Vcpus(0))));
    }
}
