//! `wormhole backend-vm`: a backend in a VM of its own, to its launcher a process like a supervisor.
//!
//! The process takes the messages of a tenant on its standard input, makes a VM in which the tenant's window is a device,
//! and passes the messages to the [relay](crate::relay) there. Each control stream of the tenant comes out of the VM on a
//! connection of its own, and goes to the launcher as a descriptor. With the answer to the window the launcher gets the
//! figures of the VM's processor.
//!
//! With `--listen` it serves [several tenants](shared), which connect to a socket.

mod gpus;
mod log;
mod shared;
mod slots;
mod usage;

use std::fs::File;
use std::io::{self, Read};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use clap::Args;
use wormhole_images::{
    BackendRun, COMMAND_LINE, Ending, ImageError, Kernel, Report, backend_overlay, ports,
};
use wormhole_link::operator::{LEAST_MEMORY, OperatorOptions, SESSIONS};
use wormhole_link::tasks;
use wormhole_monitor::devices::vfio::{DeviceAddress, PassthroughError};
use wormhole_monitor::devices::vsock::Accepted;
use wormhole_monitor::{
    BootSource, ConnectRequest, DisabledExits, ExitReason, InitramfsPart, MAX_SLOTS, MAX_VCPUS,
    Refused, Slots, Start, StopHandle, Vm, VmConfig, VmError, VsockConfig, WindowConfig,
};
use wormhole_ring::control::Message;
use wormhole_ring::layout::WINDOW_MAX_BYTES;

pub use self::gpus::has_gpu;
use self::log::Log;
use crate::backend::{BackendError, receive, send};
use crate::cgroup;
use crate::confinement::ConfinementError;
use crate::device::DeviceOption;
use crate::image;
use crate::installation::{Installation, InstallationError};
use crate::run::Size;
use crate::run::confinement;
use crate::run::environment::forwarded_variables;
use crate::run::guest::{GUEST_CID, console, copy};
use crate::say;
use crate::wait::{until_readable, until_writable};

/// Kernel of a backend VM.
pub const KERNEL: Kernel = Kernel::V6_1;
/// Memory of a backend VM, without the window.
pub const MEMORY: u64 = 512 << 20;
/// Time for a backend VM to boot and to start its supervisor, on an emulated processor too.
pub const START_LIMIT: Duration = Duration::from_secs(120);
/// Time within which a backend VM takes a launcher's message.
const SEND_LIMIT: Duration = Duration::from_secs(10);
/// Time within which a backend VM ends its tenant: longer than its supervisor waits for workers.
const END_LIMIT: Duration = Duration::from_secs(110);
/// Length of a boot's identity, with the end of its line.
pub const BOOT_ID: usize = 64;

/// Parameter of the kernel that leaves the number of open files to the limits of processes and cgroups, as systemd does
/// elsewhere. By default one tenant's workers could open all that the kernel allows.
const FILES: &str = "sysctl.fs.file-max=9223372036854775807";
/// Memory of a backend VM for each window that it can have, beside [`MEMORY`].
const MEMORY_OF_A_SLOT: u64 = 256 << 20;
/// Least and most memory of a backend VM.
const LEAST: u64 = 256 << 20;
const MOST: u64 = 1 << 40;

#[derive(Debug, Args)]
pub struct Options {
    #[command(flatten)]
    device: DeviceOption,
    /// Socket on which several tenants connect. Without it standard input is the stream of the only one.
    #[arg(long, value_name = "PATH")]
    listen: Option<PathBuf>,
    /// Folder of images.
    #[arg(long, value_name = "FOLDER")]
    images: Option<PathBuf>,
    #[command(flatten)]
    vm: VmOptions,
    #[command(flatten)]
    operator: OperatorOptions,
}

/// Sizes of a backend VM that serves several tenants.
#[derive(Clone, Debug, Default, Args)]
pub struct VmOptions {
    /// Windows that a backend VM can have at a time; 4 if not given.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_SLOTS)))]
    slots: Option<u32>,
    /// Size of the largest window that a backend VM takes; 1G if not given.
    #[arg(long, value_name = "SIZE")]
    slot_size: Option<Size>,
    /// Processors of a backend VM; 1 if not given.
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=i64::from(MAX_VCPUS)))]
    cpus: Option<u8>,
    /// Memory of a backend VM, without the windows; 512M and 256M for each slot if not given.
    #[arg(long)]
    memory: Option<Size>,
    /// A PCI device of this machine that a backend VM has for itself, such as 0000:01:00.0, or the UUID of a mediated device.
    /// It must have the driver vfio-pci. May be given several times.
    #[arg(long, value_name = "ADDRESS")]
    pci: Vec<DeviceAddress>,
}

impl VmOptions {
    fn slots(&self) -> Slots {
        Slots {
            count: self.slots.unwrap_or(4),
            bytes: self.slot_size.map_or(1 << 30, |size| size.0),
        }
    }

    fn cpus(&self) -> u8 {
        self.cpus.unwrap_or(1)
    }

    fn memory(&self) -> u64 {
        let usual = || MEMORY + MEMORY_OF_A_SLOT * u64::from(self.slots().count);
        self.memory.map_or_else(usual, |size| size.0)
    }

    /// Refuses sizes and devices that a backend VM cannot have.
    ///
    /// # Errors
    /// A size is out of range, or a device is not free.
    pub fn check(&self) -> Result<(), Unserved> {
        let (slots, memory) = (self.slots(), self.memory());
        if !slots.bytes.is_multiple_of(2 << 20)
            || !(8 << 20..=WINDOW_MAX_BYTES).contains(&slots.bytes)
        {
            return Err(Unserved::SlotSize { bytes: slots.bytes });
        }
        if !memory.is_multiple_of(1 << 20) || !(LEAST..=MOST).contains(&memory) {
            return Err(Unserved::Memory { bytes: memory });
        }
        for address in &self.pci {
            address.check()?;
        }
        Ok(())
    }

    /// Returns the names of the options that are given.
    pub fn given(&self) -> Vec<&'static str> {
        let given = [
            ("slots", self.slots.is_some()),
            ("slot-size", self.slot_size.is_some()),
            ("cpus", self.cpus.is_some()),
            ("memory", self.memory.is_some()),
            ("pci", !self.pci.is_empty()),
        ];
        let given = given.into_iter();
        given
            .filter_map(|(name, is_given)| is_given.then_some(name))
            .collect()
    }

    /// Returns the arguments that set the same options for another process.
    pub fn arguments(&self) -> Vec<String> {
        let size = |size: Option<Size>| size.map(|size| size.to_string());
        let values = [
            ("--slots", self.slots.map(|count| count.to_string())),
            ("--slot-size", size(self.slot_size)),
            ("--cpus", self.cpus.map(|count| count.to_string())),
            ("--memory", size(self.memory)),
        ];
        let devices = self
            .pci
            .iter()
            .map(|address| ("--pci", Some(address.to_string())));
        let values = values.into_iter().chain(devices);
        values
            .filter_map(|(name, value)| Some([name.to_owned(), value?]))
            .flatten()
            .collect()
    }

    /// Returns the limits for the supervisor in the VM. A slot has one tenant at a time, and three quarters of the
    /// VM's memory are for them.
    fn limits(&self, operator: &OperatorOptions) -> OperatorOptions {
        let slots = self.slots().count;
        let each = self.memory() / 4 * 3 / u64::from(slots);
        OperatorOptions {
            tenant_memory: operator.tenant_memory.or(Some(each.max(LEAST_MEMORY))),
            // The slots bound its tenants. It counts those that have left until all of their memory is free.
            tenants_per_user: usize::try_from(4 * slots).ok(),
            // All have one user there, and none takes the sessions of another.
            sessions_per_user: operator.sessions_per_user.or_else(|| {
                let each = operator.sessions.unwrap_or(SESSIONS);
                usize::try_from(slots).ok()?.checked_mul(each)
            }),
            ..operator.clone()
        }
    }
}

/// Reason why a backend VM cannot be for a run.
#[derive(Debug, thiserror::Error)]
pub enum Unserved {
    #[error(
        "--device {0} needs a GPU in the backend VM, and that of a single run has none: start one with `wormhole backend start \
         --placement vm --device {0} --pci ADDRESS` and choose it by --backend, or choose --placement host"
    )]
    Device(String),
    #[error("--device {0} needs a GPU that the backend VM has for itself: name it with --pci")]
    NoGpu(String),
    #[error("--device {0} in a backend VM serves one guest at a time: add --slots 1")]
    SharedGpu(String),
    #[error(
        "--device {device} needs NVIDIA's driver, which the image {} does not have: add it with `wormhole image build backend \
         --driver FILE`",
        .place.display()
    )]
    NoDriver { device: String, place: PathBuf },
    #[error(transparent)]
    Installation(#[from] InstallationError),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(
        "--backend names an existing backend, and --placement vm starts one: leave one of them out"
    )]
    Another,
    #[error(
        "a slot of {bytes} bytes is no size of a window: it must be a multiple of 2 MiB, at least 8M and at most {}T",
        WINDOW_MAX_BYTES >> 40
    )]
    SlotSize { bytes: u64 },
    #[error(
        "a backend VM cannot have {bytes} bytes of memory: it must be a multiple of 1M, at least {}M and at most {}G",
        LEAST >> 20,
        MOST >> 30
    )]
    Memory { bytes: u64 },
    #[error("--{} applies to backend VMs alone: add --placement vm, or leave it out", .0.join(", --"))]
    NoVm(Vec<&'static str>),
    #[error(
        "--tenant-user has no effect with --placement vm, whose socket is for root and its user: leave it out"
    )]
    Users,
    #[error(transparent)]
    Passthrough(#[from] PassthroughError),
}

impl Unserved {
    /// Returns the names of the options that the error is about.
    pub fn options(&self) -> Vec<&'static str> {
        match self {
            Self::Device(_) => vec!["placement", "device"],
            Self::NoGpu(_) | Self::NoDriver { .. } => vec!["device"],
            Self::SharedGpu(_) => vec!["device", "slots"],
            Self::Installation(_) | Self::Image(_) => Vec::new(),
            Self::Another => vec!["placement", "backend"],
            Self::SlotSize { .. } => vec!["slot-size"],
            Self::Memory { .. } => vec!["memory"],
            Self::NoVm(options) => options.clone(),
            Self::Users => vec!["placement", "tenant-user"],
            Self::Passthrough(_) => vec!["pci"],
        }
    }
}

/// Refuses options of a run that a backend VM cannot serve.
pub fn check(has_another: bool, device: &DeviceOption) -> Result<(), Unserved> {
    if has_another {
        return Err(Unserved::Another);
    }
    match has_gpu(device) {
        false => Ok(()),
        true => Err(Unserved::Device(device.device.clone())),
    }
}

/// Reason why there is no backend VM, or none any more.
#[derive(Debug, thiserror::Error)]
pub enum BackendVmError {
    #[error("its launcher has brought no window")]
    NoWindow,
    #[error(transparent)]
    Installation(#[from] InstallationError),
    #[error("{0}")]
    Kvm(String),
    #[error("cannot listen on {path}")]
    Listen {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("it has ended")]
    Gone,
    #[error("cannot tell where images lie: set WORMHOLE_IMAGES or HOME")]
    NoImages,
    #[error("its image has no driver of NVIDIA's for {0}")]
    NoDriver(String),
    #[error("with NVIDIA's driver it needs --memory {}M or more", .least >> 20)]
    LittleMemory { least: u64 },
    #[error("cannot read the driver {}", .path.display())]
    Driver {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error("its process cannot be confined")]
    Confinement(#[from] ConfinementError),
    #[error(transparent)]
    Vm(#[from] VmError),
    #[error("the launcher's stream cannot be used")]
    Stream(#[source] io::Error),
    #[error("one of its threads cannot be made")]
    Thread(#[source] io::Error),
    #[error(transparent)]
    Messages(#[from] BackendError),
    #[error("it has not started its supervisor within {} s", START_LIMIT.as_secs())]
    Slow,
    #[error("it has opened no stream to its launcher")]
    NoStream,
    #[error("it has not ended its tenant within {} s", END_LIMIT.as_secs())]
    Endless,
    #[error("it cannot serve: {0}")]
    Failed(String),
    #[error("{outcome}{}", console(.tail))]
    Ended {
        outcome: ExitReason,
        tail: Vec<String>,
    },
    #[error("its supervisor ended with status {0}; its log lines above may name the cause")]
    Supervisor(u8),
}

/// Serves the tenant until its launcher ends it, or the VM ends.
pub fn run(options: &Options) -> Result<(), BackendVmError> {
    if let Some(path) = &options.listen {
        return shared::run(options, path);
    }
    let input = io::stdin().as_fd().try_clone_to_owned();
    let tenant = UnixStream::from(input.map_err(BackendVmError::Stream)?);
    let mut body = Vec::new();
    let (attach, window) = match receive(&tenant, &mut body)? {
        Some((Message::Attach(attach), Some(window))) => (attach, window),
        _ => return Err(BackendVmError::NoWindow),
    };
    let (acceptor, streams) = acceptor();
    let arguments = ["relay", "--device", &options.device.device];
    let machine = Machine {
        window_bytes: window.metadata().map_err(BackendVmError::Stream)?.len(),
        window: window.into(),
        memory: MEMORY,
        vcpus: 1,
        passed_through: Vec::new(),
        arguments: arguments.map(str::to_owned).to_vec(),
    };
    let vm = make(options, machine, acceptor)?;
    // All files are open by now.
    confinement::enter()?;
    let (stop, stats) = (vm.stop_handle(), vm.stats());
    let outputs = streams.outputs;
    let attendant = tasks::spawn("output", move || attend(&outputs));
    let ended = tasks::spawn("vm", move || vm.run());
    let mut running = Running {
        stop,
        threads: Some((
            ended.map_err(BackendVmError::Thread)?,
            attendant.map_err(BackendVmError::Thread)?,
        )),
    };
    let figures = stats.vcpus().first().map(|vcpu| vcpu.file());
    let served = match streams.tenant.recv_timeout(START_LIMIT) {
        Ok(relay) => send(&relay, &Message::Attach(attach), &[])
            .map_err(BackendVmError::from)
            .and_then(|()| serve(tenant, relay, &streams.control, figures, END_LIMIT)),
        Err(RecvTimeoutError::Timeout) => Err(BackendVmError::Slow),
        Err(RecvTimeoutError::Disconnected) => Err(BackendVmError::NoStream),
    };
    // The VM's own end is the cause of the other error.
    running.end().map_or(served, Err)
}

/// Parts of a backend VM.
struct Machine {
    window: WindowConfig,
    /// Size of each window.
    window_bytes: u64,
    memory: u64,
    vcpus: u8,
    passed_through: Vec<DeviceAddress>,
    /// Arguments of the command in it.
    arguments: Vec<String>,
}

/// Makes the VM.
fn make(
    options: &Options,
    machine: Machine,
    acceptor: impl FnMut(ConnectRequest) -> Result<Accepted, Refused> + Send + 'static,
) -> Result<Vm, BackendVmError> {
    let installation = Installation::locate()?;
    let images = options.images.clone().or_else(|| installation.images());
    let images = images.ok_or(BackendVmError::NoImages)?;
    let image = image::ensure(image::BACKEND, &images, KERNEL)?;
    let (driver, archive) = gpus::driver(&image, &options.device)?.unzip();
    let memory = machine.memory + options.vm.memory_of_driver(archive.as_deref())?;
    let overlay = backend_overlay(&BackendRun {
        init: installation.init()?,
        wormhole: installation.command().to_path_buf(),
        parts: vec![installation.supervisor()?, installation.worker()?],
        arguments: machine.arguments.into_iter().map(Into::into).collect(),
        variables: forwarded_variables(),
        window: machine.window_bytes,
        driver,
    })?;
    let limit = match &machine.window {
        // A window that has left stays charged to this process as long as its launcher has it. One tenant's must not end the VM
        // of all.
        WindowConfig::Aperture(_) => None,
        WindowConfig::Whole(_) => Some(memory + machine.window_bytes),
    };
    cgroup::enter(&installation, limit);
    wormhole_monitor::confinement::leave_namespaces();
    let vm = Vm::new(VmConfig {
        start: Start::Boot(BootSource {
            kernel: image.kernel,
            initramfs: [image.modules]
                .into_iter()
                .chain(archive)
                .map(InitramfsPart::Path)
                .chain([InitramfsPart::Bytes(overlay)])
                .collect(),
            command_line: format!("{COMMAND_LINE} {FILES}"),
        }),
        memory_mib: memory >> 20,
        vcpus: machine.vcpus,
        window: Some(machine.window),
        file_memory: None,
        vsock: Some(VsockConfig {
            guest_cid: GUEST_CID,
            acceptor: Box::new(acceptor),
        }),
        file_systems: Vec::new(),
        disks: Vec::new(),
        networks: Vec::new(),
        passed_through: machine.passed_through,
        prefault: false,
        console: Box::new(io::sink()),
        timeout: None,
        // Its workers poll. It leaves its processor where nothing is to be polled.
        disabled_exits: DisabledExits {
            halt: false,
            ..DisabledExits::offered()?
        },
        pins: Vec::new(),
        server: None,
    })?;
    Ok(vm)
}

/// Passes messages between launcher and relay until the relay closes its direction. Waits for that `limit` long once the
/// launcher has closed its own.
fn serve(
    tenant: UnixStream,
    relay: UnixStream,
    control: &Receiver<UnixStream>,
    figures: Option<&File>,
    limit: Duration,
) -> Result<(), BackendVmError> {
    let (tenant, relay) = (Arc::new(tenant), Arc::new(relay));
    let is_late = Arc::new(AtomicBool::new(false));
    let orders = {
        let (tenant, relay) = (Arc::clone(&tenant), Arc::clone(&relay));
        let is_late = Arc::clone(&is_late);
        move || {
            let mut body = Vec::new();
            // Bytes that are no message end the tenant, as its launcher's end does. So does a message that the VM does not
            // take.
            while let Ok(Some((message, _))) = receive(&tenant, &mut body) {
                if send_within(&relay, &message, SEND_LIMIT).is_err() {
                    break;
                }
            }
            drop(relay.shutdown(Shutdown::Write));
            // This process ends before, unless the VM is in the hands of its tenant.
            std::thread::sleep(limit);
            is_late.store(true, Ordering::Release);
            drop(relay.shutdown(Shutdown::Both));
        }
    };
    tasks::spawn("orders", orders).map_err(BackendVmError::Thread)?;
    let passed = pass_answers(&relay, &tenant, control, figures);
    match is_late.load(Ordering::Acquire) {
        true => Err(BackendVmError::Endless),
        false => passed,
    }
}

/// Sends a relay a message, if its stream has room in time. No one else may send meanwhile.
fn send_within(
    relay: &UnixStream,
    message: &Message<'_>,
    limit: Duration,
) -> Result<(), BackendError> {
    match until_writable(relay, Instant::now() + limit) {
        Ok(true) => send(relay, message, &[]),
        Ok(false) => Err(BackendError::Stream(io::ErrorKind::TimedOut.into())),
        Err(error) => Err(BackendError::Stream(error)),
    }
}

/// Returns the connection that belongs to a message of a relay. It has arrived before the message.
fn stream_of(
    message: &Message<'_>,
    arrived: impl FnOnce() -> Option<UnixStream>,
) -> Option<UnixStream> {
    match message {
        Message::Stream(_) => arrived(),
        // The relay may have connected before it failed.
        Message::Refused { .. } => arrived().and(None),
        _ => None,
    }
}

/// Returns the descriptor that goes to the launcher with a message of a relay: with the answer to its window the figures
/// of the VM's processor, with others the stream that belongs to them.
fn descriptor_of(
    message: &Message<'_>,
    stream: Option<&UnixStream>,
    figures: Option<&File>,
) -> Option<RawFd> {
    match message {
        Message::Attached => figures.map(AsRawFd::as_raw_fd),
        _ => stream.map(AsRawFd::as_raw_fd),
    }
}

/// Passes the relay's messages to the launcher, with the descriptors that belong to them.
fn pass_answers(
    relay: &UnixStream,
    tenant: &UnixStream,
    control: &Receiver<UnixStream>,
    figures: Option<&File>,
) -> Result<(), BackendVmError> {
    let mut body = Vec::new();
    while let Some((message, _)) = receive(relay, &mut body)? {
        let stream = stream_of(&message, || control.try_recv().ok());
        let descriptor = descriptor_of(&message, stream.as_ref(), figures);
        send(tenant, &message, descriptor.as_slice())?;
    }
    Ok(())
}

/// Streams that the VM opens.
#[derive(Debug)]
struct Streams {
    tenant: Receiver<UnixStream>,
    control: Receiver<UnixStream>,
    outputs: Receiver<(u32, UnixStream)>,
}

/// End of a VM.
type Outcome = Result<wormhole_monitor::Report, VmError>;

/// A backend VM that runs. It is stopped on drop.
#[derive(Debug)]
struct Running {
    stop: StopHandle,
    /// The VM's, and that of its outputs.
    threads: Option<(JoinHandle<Outcome>, JoinHandle<Option<Report>>)>,
}

impl Running {
    /// Stops the VM. Returns its failure if it had ended before by one.
    fn end(&mut self) -> Option<BackendVmError> {
        self.stop.stop();
        self.join()
    }

    /// Waits for the end of the VM. Returns its failure.
    fn wait(mut self) -> Option<BackendVmError> {
        self.join()
    }

    fn join(&mut self) -> Option<BackendVmError> {
        let (ended, attendant) = self.threads.take()?;
        let report = ended.join();
        // The VM is gone, and with it the other ends of its streams.
        let said = attendant.join().ok().flatten();
        match report {
            Ok(Ok(report)) => failure(report.outcome, said, report.console_tail),
            Ok(Err(error)) => Some(error.into()),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.end());
    }
}

fn failure(outcome: ExitReason, said: Option<Report>, tail: Vec<String>) -> Option<BackendVmError> {
    match (outcome, said.map(|report| report.ending)) {
        (_, Some(Ending::Failed { message, .. })) => Some(BackendVmError::Failed(message)),
        (ExitReason::Stopped | ExitReason::Exited { status: 0 }, _) => None,
        (ExitReason::Exited { .. }, Some(ending)) => {
            Some(BackendVmError::Supervisor(ending.status()))
        }
        (outcome, _) => Some(BackendVmError::Ended { outcome, tail }),
    }
}

/// Returns the acceptor of the VM's connections, and their other ends. The stream of the tenant and each output are opened
/// once, and one control stream at a time waits for its message.
fn acceptor() -> (
    impl FnMut(ConnectRequest) -> Result<Accepted, Refused> + Send,
    Streams,
) {
    let (tenant, tenants): (Sender<UnixStream>, _) = channel();
    let (control, controls): (SyncSender<UnixStream>, _) = sync_channel(1);
    let (output, outputs) = channel();
    let mut open = vec![ports::TENANT, ports::STDOUT, ports::STDERR, ports::REPORT];
    let accept = move |request: ConnectRequest| {
        let (theirs, ours) = UnixStream::pair().map_err(|_| Refused)?;
        if request.port == ports::CONTROL {
            control.try_send(ours).map_err(|_| Refused)?;
            return Ok(theirs.into());
        }
        let at = open.iter().position(|port| *port == request.port);
        open.swap_remove(at.ok_or(Refused)?);
        match request.port {
            ports::TENANT => tenant.send(ours).map_err(|_| Refused)?,
            port => output.send((port, ours)).map_err(|_| Refused)?,
        }
        Ok(theirs.into())
    };
    let streams = Streams {
        tenant: tenants,
        control: controls,
        outputs,
    };
    (accept, streams)
}

/// Reads the VM's outputs until it is gone: passes on which boot it is, and its log. Returns its report.
fn attend(outputs: &Receiver<(u32, UnixStream)>) -> Option<Report> {
    let mut report = None;
    std::thread::scope(|scope| {
        for (port, stream) in outputs {
            match port {
                ports::STDOUT => drop(scope.spawn(move || {
                    say::result(format_args!("{}", read_boot_id(stream, START_LIMIT)));
                })),
                ports::STDERR => drop(scope.spawn(move || copy(stream, Log::new(say::Foreign)))),
                // The last one. The request named no files.
                _ => report = Report::read(stream, 0, 0).ok(),
            }
        }
    });
    report
}

/// Reads the first line of a relay's output, or of a backend VM's. Returns an empty text if the line does not come within
/// `limit`, or is not the identity of a boot, a UUID as Linux writes it (random(4)): the VM then has none.
pub fn read_boot_id(mut output: impl Read + AsFd, limit: Duration) -> String {
    let end = Instant::now() + limit;
    let mut line = Vec::new();
    while line.len() < BOOT_ID && !line.ends_with(b"\n") {
        if !until_readable(&output, Some(end)).is_ok_and(|is_there| is_there) {
            return String::new();
        }
        let mut bytes = [0; BOOT_ID];
        let room = BOOT_ID - line.len();
        match output.read(&mut bytes[..room]) {
            Ok(0) => break,
            Ok(count) => line.extend_from_slice(&bytes[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    let line = String::from_utf8_lossy(&line);
    let line = line.lines().next().unwrap_or_default().trim();
    let is_identity = line.len() == 36
        && line.bytes().enumerate().all(|(at, byte)| match at {
            8 | 13 | 18 | 23 => byte == b'-',
            _ => byte.is_ascii_digit() || matches!(byte, b'a'..=b'f'),
        });
    match is_identity {
        true => line.to_owned(),
        false => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn request(port: u32) -> ConnectRequest {
        ConnectRequest { port, peer_port: 1 }
    }

    #[test]
    fn a_backend_vm_opens_each_stream_once_and_one_control_stream_at_a_time() {
        let (mut accept, streams) = acceptor();
        let mut theirs = Vec::new();
        for port in [ports::TENANT, ports::STDOUT, ports::STDERR, ports::REPORT] {
            theirs.push(accept(request(port)).unwrap());
            assert_eq!(accept(request(port)).unwrap_err(), Refused, "{port}");
        }
        assert!(streams.tenant.try_recv().is_ok());
        let outputs = streams.outputs.try_iter().map(|(port, _)| port);
        assert_eq!(
            outputs.collect::<Vec<_>>(),
            [ports::STDOUT, ports::STDERR, ports::REPORT]
        );
        for _ in 0..3 {
            theirs.push(accept(request(ports::CONTROL)).unwrap());
            assert!(accept(request(ports::CONTROL)).is_err());
            assert!(streams.control.try_recv().is_ok());
        }
        for port in [ports::SIGNALS, ports::STDIN, 0, u32::MAX] {
            assert_eq!(accept(request(port)).unwrap_err(), Refused, "{port}");
        }
    }

    #[test]
    fn another_process_gets_the_same_sizes() {
        use clap::Parser;

        #[derive(Debug, Parser)]
        struct Command {
            #[command(flatten)]
            vm: VmOptions,
        }
        let all = VmOptions {
            slots: Some(7),
            slot_size: Some(Size(258 << 20)),
            cpus: Some(2),
            memory: Some(Size(1 << 30)),
            pci: ["af:00.0", "af:00.1"]
                .map(|text| text.parse().unwrap())
                .to_vec(),
        };
        for options in [all, VmOptions::default()] {
            let arguments = ["x".to_owned()].into_iter().chain(options.arguments());
            let parsed = Command::try_parse_from(arguments).unwrap().vm;
            assert_eq!(format!("{parsed:?}"), format!("{options:?}"));
            let devices = options.pci.len().saturating_sub(1);
            assert_eq!(
                options.given().len() + devices,
                options.arguments().len() / 2
            );
            let sizes = VmOptions {
                pci: Vec::new(),
                ..options
            };
            sizes.check().unwrap();
        }
    }

    #[test]
    fn tenants_divide_three_quarters_of_the_memory() {
        let vm = VmOptions {
            slots: Some(3),
            memory: Some(Size(1 << 30)),
            ..VmOptions::default()
        };
        let limits = vm.limits(&OperatorOptions::default());
        assert_eq!(limits.tenant_memory, Some(256 << 20));
        assert_eq!(limits.tenants_per_user, Some(12));
        assert_eq!(limits.sessions_per_user, Some(3 * SESSIONS));
        let operator = OperatorOptions {
            tenant_memory: Some(1 << 31),
            sessions: Some(5),
            ..OperatorOptions::default()
        };
        let limits = vm.limits(&operator);
        assert_eq!(
            (limits.tenant_memory, limits.sessions),
            (Some(1 << 31), Some(5))
        );
    }

    #[test]
    fn sizes_that_a_backend_vm_cannot_have_are_refused() {
        for (slot, memory) in [
            (3 << 20, 1 << 30),
            (4 << 20, 1 << 30),
            (1 << 50, 1 << 30),
            (1 << 30, 1 << 20),
            (1 << 30, (1 << 30) + 1),
        ] {
            let vm = VmOptions {
                slot_size: Some(Size(slot)),
                memory: Some(Size(memory)),
                ..VmOptions::default()
            };
            assert!(vm.check().is_err(), "{vm:?}");
        }
    }

    #[test]
    fn what_a_backend_vm_calls_its_boot_is_bounded() {
        let (mut relay, stream) = UnixStream::pair().unwrap();
        relay.write_all(&[b'a'; 1000]).unwrap();
        assert_eq!(read_boot_id(stream, START_LIMIT), "");
        let boot = "a68fb9d5-8acf-4b0c-9f4c-5d2b3f0e1c77";
        let (capital, short) = (boot.to_uppercase(), &boot[..35]);
        let without = boot.replace('-', "0");
        let long = format!("{boot}0");
        for (said, identity) in [
            (&*format!("{boot}\nmore"), boot),
            (boot, boot),
            (&capital, ""),
            (short, ""),
            (&without, ""),
            (&long, ""),
            ("0-1\nmore", ""),
            ("\x1b[2J\n", ""),
            ("0 1\n", ""),
            ("", ""),
        ] {
            let (mut relay, stream) = UnixStream::pair().unwrap();
            relay.write_all(said.as_bytes()).unwrap();
            drop(relay);
            assert_eq!(read_boot_id(stream, START_LIMIT), identity);
        }
    }

    #[test]
    fn a_backend_vm_that_does_not_say_its_boot_has_none() {
        for said in ["", "0-"] {
            let (mut relay, stream) = UnixStream::pair().unwrap();
            relay.write_all(said.as_bytes()).unwrap();
            assert_eq!(read_boot_id(stream, Duration::from_millis(10)), "");
        }
    }

    #[test]
    fn a_backend_vm_that_does_not_end_its_tenant_holds_up_no_run() {
        let (launcher, tenant) = UnixStream::pair().unwrap();
        let (vm, relay) = UnixStream::pair().unwrap();
        let (_arrives, control) = sync_channel(1);
        drop(launcher);
        let served = serve(tenant, relay, &control, None, Duration::from_millis(20));
        assert!(matches!(served, Err(BackendVmError::Endless)), "{served:?}");
        drop(vm);
    }

    #[test]
    fn a_message_that_a_relay_does_not_take_is_given_up() {
        let (_vm, relay) = UnixStream::pair().unwrap();
        let asked = Message::Stream(wormhole_ring::control::Stream { local: 0 });
        let limit = Duration::from_millis(20);
        while send_within(&relay, &asked, limit).is_ok() {}
    }

    #[test]
    fn the_launcher_gets_each_control_stream_and_the_figures_with_their_messages() {
        let (relay, vm) = UnixStream::pair().unwrap();
        let (launcher, tenant) = UnixStream::pair().unwrap();
        let (arrives, control) = sync_channel(1);
        let (mut guest, stream) = UnixStream::pair().unwrap();
        arrives.send(stream).unwrap();
        let asked = wormhole_ring::control::Stream { local: 0 };
        for message in [
            Message::Attached,
            Message::Stream(asked),
            Message::Stream(asked),
        ] {
            send(&relay, &message, &[]).unwrap();
        }
        drop(relay);
        let figures = tempfile::tempfile().unwrap();
        figures.set_len(48).unwrap();
        pass_answers(&vm, &tenant, &control, Some(&figures)).unwrap();
        drop(tenant);
        let mut body = Vec::new();
        let mut next = || receive(&launcher, &mut body).unwrap().map(|(_, file)| file);
        let figures = next().unwrap().expect("the figures");
        assert_eq!(figures.metadata().unwrap().len(), 48);
        let stream = next().unwrap().expect("a stream");
        UnixStream::from(std::os::fd::OwnedFd::from(stream))
            .write_all(b"a byte")
            .unwrap();
        let mut said = String::new();
        guest.read_to_string(&mut said).unwrap();
        assert_eq!(said, "a byte");
        // Without a connection there is no stream, which the launcher says to the guest.
        assert!(next().unwrap().is_none());
        assert!(next().is_none());
    }
}
