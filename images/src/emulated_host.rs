//! Runs the emulated host: a machine with virtualization, emulated by QEMU, for machines whose own KVM
//! cannot run Linux guests.
//!
//! Three virtio ports carry the program's standard output, its standard error and the report out of the machine. A
//! fourth carries signals for the program into it, and a fifth its standard input, if any. The serial console has the
//! kernel's messages, which errors include. The initrd is a memfd, so that this process never leaves a file behind,
//! however it ends.

use std::fmt;
use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::ioctl_fionread;
use wormhole_init::{COLLECT_BYTES, MAX_FILES, Report};

use crate::error::{ImageError, io};
use crate::image::{COMMAND_LINE, Image};

const QEMU: &str = "qemu-system-x86_64";

const NO_QEMU: ImageError = ImageError::NoTool {
    program: QEMU,
    package: "qemu-system-x86",
};

/// CPU model with nested virtualization. `check=off` removes features that QEMU cannot emulate without a warning. The
/// rest has x86-64-v2, the least that NumPy takes.
const CPU: &str = "EPYC,+svm,check=off";

/// Options of QEMU's seccomp filter, since QEMU emulates a machine for a guest that may be hostile. QEMU cannot start
/// processes, gain privileges, or change processor affinity and priorities.
const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

/// Kernel parameter that keeps programs, and thus guests, off the first processor, which is an additional one.
///
/// When any processor restores FPU state, QEMU (at least 7.2 to 11.1) clears a flag of the first processor without a
/// lock. A concurrent change of that processor's flags is lost, in particular of the flag for nested address
/// translation.
/// The guest or the emulated host then ends with a triple fault at a random place.
const FIRST_PROCESSOR: &str = "isolcpus=0";

/// Kernel parameter that disables speculation mitigations, which an emulated processor does not need. It makes a boot about 5 % shorter.
const NO_SPECULATION: &str = "mitigations=off";

/// Kernel parameter by which Linux uses the machine's IOMMU, which is one of Intel's beside a processor of AMD: Debian's cloud
/// kernel has no driver of AMD's.
const IOMMU: &str = "intel_iommu=on";

/// Kernel parameters that end a machine which has lost a processor's timer interrupt, as QEMU's emulation does now and
/// then when a guest of the machine runs. Otherwise it would wait for ever.
const WATCHED: &str = "rcupdate.rcu_cpu_stall_timeout=60 sysctl.kernel.panic_on_rcu_stall=1";

/// Time within which the machine is ready. A boot takes seconds, and on a busy processor less than a minute. QEMU's emulation
/// sometimes loses a timer interrupt while all processors of the machine wait for it; then nothing in the machine can end it.
const READY_LIMIT: Duration = Duration::from_secs(150);

/// Kernel parameter that keeps the machine itself from sending frames to the networks of its guests.
const SILENT: &str = "ipv6.disable=1";

/// Maximum bytes of the console's end in an error.
const CONSOLE_TAIL: usize = 4096;

/// Maximum bytes of files that a report returns: those of a guest, and those of the machine's own command.
pub const HOST_COLLECT_BYTES: u64 = COLLECT_BYTES + (32 << 20);

/// Maximum bytes read of a report.
const MAX_REPORT: u64 = HOST_COLLECT_BYTES + (2 << 20);

/// Names of the virtio ports out of the machine, in the order of their numbers.
const PORTS: [&str; 3] = ["stdout", "stderr", "report"];

/// Numbers of the virtio ports into the machine.
const SIGNALS_PORT: usize = PORTS.len() + 1;
const STDIN_PORT: usize = PORTS.len() + 2;

/// Signals that a terminal or another process sends to the whole process group. QEMU blocks them, since it would end;
/// they are forwarded to the program.
const NOT_FOR_QEMU: [libc::c_int; 6] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGUSR1,
    libc::SIGUSR2,
];

/// A file that backs a disk of the machine.
#[derive(Clone, Copy, Debug)]
pub struct DiskFile<'a> {
    pub file: BorrowedFd<'a>,
    pub writable: bool,
}

/// An NVMe disk of the machine.
#[derive(Clone, Copy, Debug)]
pub struct NvmeDisk<'a> {
    pub disk: DiskFile<'a>,
    /// Device number on PCI bus 0, from 16 on, and function. The functions of one device share an IOMMU group.
    pub address: (u8, u8),
}

/// The end behind a network interface of the machine.
#[derive(Clone, Copy, Debug)]
pub enum NetworkEnd<'a> {
    /// A tap interface.
    Tap(BorrowedFd<'a>),
    /// A server of a stream of frames, with its name.
    Stream(&'static str, &'a dyn SocketServer),
}

/// A network interface of the machine.
#[derive(Clone, Debug)]
pub struct MachineNetwork<'a> {
    pub end: NetworkEnd<'a>,
    /// Hardware address of the machine's own interface, which differs from the guest's.
    pub mac: String,
}

/// Starts servers outside the machine, one for each attempt to run it.
pub trait SocketServer: fmt::Debug {
    /// Starts a server, and returns a socket connected to it.
    fn start(&self) -> io::Result<OwnedFd>;
}

/// Configuration of one run of the machine.
#[derive(Clone, Copy, Debug)]
pub struct EmulatedHost<'a> {
    pub image: &'a Image,
    /// Overlay from [`host_overlay`](crate::host_overlay).
    pub overlay: &'a [u8],
    /// Memory in bytes.
    pub memory: u64,
    /// Number of processors for programs.
    pub processors: u32,
    /// Disks: `/dev/vda`, `/dev/vdb` and so on in the machine.
    pub disks: &'a [DiskFile<'a>],
    /// NVMe disks. With some the machine has an IOMMU, so that they can be passed through to guests.
    pub nvme_disks: &'a [NvmeDisk<'a>],
    /// Network interfaces: `eth0`, `eth1` and so on in the machine.
    pub networks: &'a [MachineNetwork<'a>],
    /// Tags and servers of the machine's virtio file systems, which speak vhost-user.
    pub files: &'a [(String, &'a dyn SocketServer)],
    /// Time after which the machine is considered hung, if it may not run for as long as it likes.
    pub timeout: Option<Duration>,
    /// Socket of the program's standard input. Its peer receives `!` when the program is about to start, and then sends
    /// the input.
    pub stdin: Option<BorrowedFd<'a>>,
    /// Signals for the program, if any are sent.
    pub signals: Option<MachineSignals<'a>>,
}

/// Signals for the program of a machine.
#[derive(Clone, Copy, Debug)]
pub struct MachineSignals<'a> {
    /// The machine's end. The peer receives `!` when the machine is ready, and then sends signal numbers of one byte each.
    pub socket: BorrowedFd<'a>,
    /// Set by the owner of the peer when it has received `!`.
    pub is_ready: &'a AtomicBool,
}

/// Writer that forwards to another one and records whether it has written anything.
struct TrackedWriter<'a> {
    to: &'a mut (dyn Write + Send),
    has_written: bool,
}

impl<'a> TrackedWriter<'a> {
    fn new(to: &'a mut (dyn Write + Send)) -> Self {
        Self {
            to,
            has_written: false,
        }
    }
}

impl Write for TrackedWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.has_written |= !bytes.is_empty();
        self.to.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// Returns whether an exit status shows a defect of QEMU: an orderly end without a report, or a failed assertion.
fn is_defect(status: ExitStatus) -> bool {
    status.success() || status.signal() == Some(libc::SIGABRT)
}

impl EmulatedHost<'_> {
    /// Checks that QEMU is installed.
    pub fn available() -> Result<(), ImageError> {
        let folders = std::env::var_os("PATH").unwrap_or_default();
        let found = std::env::split_paths(&folders).any(|folder| folder.join(QEMU).is_file());
        if found { Ok(()) } else { Err(NO_QEMU) }
    }

    /// Boots the machine, forwards the program's output as it arrives, and returns the report.
    ///
    /// QEMU's emulation of virtualization has defects: a machine may hang in its boot or later, may end with a fault that real processors do
    /// not raise, after which QEMU exits with status 0, or may abort by an assertion of QEMU. A machine that is not ready in
    /// time, or ends so before its program has written anything is started once more, with a message on `stderr`.
    pub fn run(
        &self,
        stdout: &mut (dyn Write + Send),
        stderr: &mut (dyn Write + Send),
    ) -> Result<Report, ImageError> {
        let initrd = self.initrd()?;
        let (mut out, mut err) = (TrackedWriter::new(stdout), TrackedWriter::new(stderr));
        let ended = self.attempt(&initrd, &mut out, &mut err);
        if out.has_written || err.has_written {
            return ended;
        }
        let why = match &ended {
            Err(ImageError::HostDied { status, .. }) if is_defect(*status) => {
                format!("died ({status}) before its program wrote anything")
            }
            Err(ImageError::HostNotReady { after, .. }) => {
                format!("was not ready within {} s", after.as_secs())
            }
            _ => return ended,
        };
        // If stderr is closed, the message is lost too.
        let _ = writeln!(
            err,
            "wormhole: the emulated host {why}: it is started once more"
        );
        self.attempt(&initrd, &mut out, &mut err)
    }

    /// Writes the machine's initrd to a memfd.
    fn initrd(&self) -> Result<File, ImageError> {
        let failed = |source| ImageError::Initrd { source };
        let file = memfd_create("wormhole-initrd", MemfdFlags::CLOEXEC);
        let mut file = File::from(file.map_err(|error| failed(error.into()))?);
        let mut modules =
            File::open(&self.image.modules).map_err(io("open", &self.image.modules))?;
        io::copy(&mut modules, &mut file).map_err(failed)?;
        file.write_all(self.overlay).map_err(failed)?;
        Ok(file)
    }

    fn attempt(
        &self,
        initrd: &File,
        stdout: &mut (dyn Write + Send),
        stderr: &mut (dyn Write + Send),
    ) -> Result<Report, ImageError> {
        // The machine's first process blocks until the signals port is open on this side, even if no signals are sent.
        let silent = UnixStream::pair().map_err(|source| ImageError::Start {
            program: QEMU,
            source,
        })?;
        let (peer, unused) = &silent;
        let signals = self
            .signals
            .map_or(unused.as_fd(), |signals| signals.socket);
        if let Some(signals) = self.signals {
            signals.is_ready.store(false, Ordering::Relaxed);
        }
        let is_ready = || match self.signals {
            Some(signals) => signals.is_ready.load(Ordering::Relaxed),
            None => ioctl_fionread(peer).is_ok_and(|bytes| bytes > 0),
        };
        let pipe = || {
            io::pipe().map_err(|source| ImageError::Start {
                program: QEMU,
                source,
            })
        };
        let (console_reader, console_writer) = pipe()?;
        let (stdout_reader, stdout_writer) = pipe()?;
        let (stderr_reader, stderr_writer) = pipe()?;
        let (report_reader, report_writer) = pipe()?;
        let mut child = self.start(
            initrd,
            signals,
            [console_writer, stdout_writer, stderr_writer, report_writer],
        )?;

        // The channel waits for ever in the place of the longest time.
        let limit = self.timeout.unwrap_or(Duration::MAX);
        let (ended, end) = mpsc::channel();
        let (console, report, outcome) = thread::scope(|scope| {
            let console = scope.spawn(|| tail(console_reader));
            scope.spawn(|| forward(stdout_reader, stdout));
            scope.spawn(|| forward(stderr_reader, stderr));
            let report = scope.spawn(move || {
                let mut bytes = Vec::new();
                // After a read error, the report's format shows whether it is complete.
                let _ = report_reader.take(MAX_REPORT).read_to_end(&mut bytes);
                // The receiver is gone only after a timeout.
                let _ = ended.send(());
                bytes
            });
            // QEMU holds the report's pipe open while it runs.
            let mut outcome = end.recv_timeout(limit.min(READY_LIMIT));
            if outcome == Err(RecvTimeoutError::Timeout) && is_ready() {
                outcome = end.recv_timeout(limit.saturating_sub(READY_LIMIT));
            }
            if outcome.is_err() {
                // An error means that QEMU has already exited.
                let _ = child.kill();
            }
            (join(console), join(report), outcome)
        });
        let status = child.wait().map_err(|source| ImageError::Start {
            program: QEMU,
            source,
        })?;
        if outcome == Err(RecvTimeoutError::Timeout) {
            let error = match is_ready() || limit <= READY_LIMIT {
                true => ImageError::HostTimeout {
                    after: limit,
                    console,
                },
                false => ImageError::HostNotReady {
                    after: READY_LIMIT,
                    console,
                },
            };
            return Err(error);
        }
        Report::read(&report[..], MAX_FILES, HOST_COLLECT_BYTES).map_err(|source| {
            ImageError::HostDied {
                status,
                console,
                source,
            }
        })
    }

    fn start(
        &self,
        initrd: &File,
        signals: BorrowedFd<'_>,
        writers: [PipeWriter; 4],
    ) -> Result<Child, ImageError> {
        // QEMU's own messages go to the same pipe as the console.
        let errors = writers[0].try_clone().map_err(|source| ImageError::Start {
            program: QEMU,
            source,
        })?;
        let files = self.files.iter().map(|(_, server)| server.start());
        let files = files.collect::<io::Result<Vec<OwnedFd>>>();
        let files = files.map_err(|source| ImageError::Start {
            program: "wormhole-fs",
            source,
        })?;
        let streams = self.networks.iter().map(|network| match network.end {
            NetworkEnd::Tap(_) => Ok(None),
            NetworkEnd::Stream(program, server) => match server.start() {
                Ok(socket) => Ok(Some(socket)),
                Err(source) => Err(ImageError::Start { program, source }),
            },
        });
        let streams = streams.collect::<Result<Vec<Option<OwnedFd>>, _>>()?;
        let networks = self.networks.iter().zip(&streams);
        let networks = networks.filter_map(|(network, stream)| match network.end {
            NetworkEnd::Tap(file) => Some(file.as_raw_fd()),
            NetworkEnd::Stream(..) => stream.as_ref().map(AsRawFd::as_raw_fd),
        });
        // The descriptors are duplicated to numbers above all of their sources, and above the few that are opened to
        // start QEMU.
        let sources: Vec<RawFd> = writers
            .iter()
            .map(AsRawFd::as_raw_fd)
            .chain([initrd.as_raw_fd()])
            .chain([signals.as_raw_fd()])
            .chain(self.stdin.map(|stdin| stdin.as_raw_fd()))
            .chain(self.disks.iter().map(|disk| disk.file.as_raw_fd()))
            .chain(
                self.nvme_disks
                    .iter()
                    .map(|nvme| nvme.disk.file.as_raw_fd()),
            )
            .chain(networks)
            .chain(files.iter().map(AsRawFd::as_raw_fd))
            .collect();
        let first = sources.iter().max().map_or(0, |highest| highest + 100);
        let numbers: Vec<RawFd> = (first..).take(sources.len()).collect();
        let (numbers_but_files, files_numbers) = numbers.split_at(numbers.len() - files.len());
        let (others, networks) =
            numbers_but_files.split_at(numbers_but_files.len() - self.networks.len());
        let (others, nvme_disks) = others.split_at(others.len() - self.nvme_disks.len());
        let (others, disks) = others.split_at(others.len() - self.disks.len());
        let (others, stdin) = others.split_at(others.len() - usize::from(self.stdin.is_some()));
        let [console, outputs @ .., initrd_number, signals_number] = others else {
            unreachable!("there are a console, an initrd and signals");
        };

        let mut command = Command::new(QEMU);
        command.args(["-accel", "tcg,thread=multi", "-cpu", CPU, "-nodefaults"]);
        let memory = self.memory >> 20;
        let machine = match files.is_empty() {
            true => "q35",
            // The servers map the machine's memory.
            false => "q35,memory-backend=ram",
        };
        command.args(["-M", machine]);
        command.args(["-no-user-config", "-display", "none", "-no-reboot"]);
        command.args(["-sandbox", SANDBOX]);
        command.args([
            "-smp",
            &(self.processors + 1).to_string(),
            "-m",
            &format!("{memory}M"),
        ]);
        command
            .arg("-kernel")
            .arg(&self.image.kernel)
            .arg("-initrd")
            .arg(format!("/dev/fd/{initrd_number}"));
        let mut parameters =
            format!("{COMMAND_LINE} {FIRST_PROCESSOR} {SILENT} {NO_SPECULATION} {WATCHED}");
        if !self.nvme_disks.is_empty() {
            parameters = format!("{parameters} {IOMMU}");
            // Before the devices that it serves.
            command.args(["-device", "intel-iommu,intremap=on"]);
        }
        command.args(["-append", &parameters]);
        command.args([
            "-chardev",
            &format!("file,id=console,path=/dev/fd/{console}"),
        ]);
        command.args(["-serial", "chardev:console", "-device", "virtio-serial-pci"]);
        let mut port = |name: &str, number: usize, chardev: String| {
            command.args(["-chardev", &chardev]);
            command.args([
                "-device",
                &format!("virtserialport,chardev={name},name={name},nr={number}"),
            ]);
        };
        for (index, (name, output)) in PORTS.iter().zip(outputs).enumerate() {
            port(
                name,
                index + 1,
                format!("file,id={name},path=/dev/fd/{output}"),
            );
        }
        port(
            "signals",
            SIGNALS_PORT,
            format!("socket,id=signals,fd={signals_number}"),
        );
        if let [number] = stdin {
            port("stdin", STDIN_PORT, format!("socket,id=stdin,fd={number}"));
        }
        // Behind the ports, whose names in the machine have the number of their device.
        if !files.is_empty() {
            command.arg("-object").arg(format!(
                "memory-backend-memfd,id=ram,size={memory}M,share=on"
            ));
        }
        for (index, ((tag, _), number)) in self.files.iter().zip(files_numbers).enumerate() {
            command
                .arg("-chardev")
                .arg(format!("socket,id=files{index},fd={number}"));
            command
                .arg("-device")
                .arg(format!("vhost-user-fs-pci,chardev=files{index},tag={tag}"));
        }
        for (index, (disk, number)) in self.disks.iter().zip(disks).enumerate() {
            command
                .arg("-blockdev")
                .arg(block_device(&format!("disk{index}"), disk, *number));
            command
                .arg("-device")
                .arg(format!("virtio-blk-pci,drive=disk{index}"));
        }
        for (index, (nvme, number)) in self.nvme_disks.iter().zip(nvme_disks).enumerate() {
            let (device, function) = nvme.address;
            command.arg("-blockdev").arg(block_device(
                &format!("nvme{index}"),
                &nvme.disk,
                *number,
            ));
            command.arg("-device").arg(format!(
                "nvme,drive=nvme{index},serial=nvme{index},addr={device:x}.{function},multifunction=on"
            ));
        }
        for (index, (network, number)) in self.networks.iter().zip(networks).enumerate() {
            let end = match network.end {
                NetworkEnd::Tap(_) => format!("tap,fd={number},vhost=off"),
                NetworkEnd::Stream(..) => {
                    format!("stream,server=off,addr.type=fd,addr.str={number}")
                }
            };
            command
                .arg("-netdev")
                .arg(format!("{end},id=network{index}"));
            command.arg("-device").arg(format!(
                "virtio-net-pci,netdev=network{index},mac={},romfile=",
                network.mac
            ));
        }
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(errors);
        // SAFETY: the closure calls only dup2, sigemptyset, sigaddset, sigprocmask and prctl, which are safe between fork and
        // exec, and accesses only its own copies of the numbers and its own set, for which all zeroes is a valid value.
        unsafe {
            command.pre_exec(move || {
                for (&source, &number) in sources.iter().zip(&numbers) {
                    if libc::dup2(source, number) < 0 {
                        return Err(io::Error::last_os_error());
                    }
                }
                let mut blocked: libc::sigset_t = mem::zeroed();
                libc::sigemptyset(&raw mut blocked);
                for signal in NOT_FOR_QEMU {
                    libc::sigaddset(&raw mut blocked, signal);
                }
                if libc::sigprocmask(libc::SIG_BLOCK, &raw const blocked, std::ptr::null_mut()) != 0
                    || libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0
                {
                    return Err(io::Error::last_os_error());
                }
                Ok(())
            });
        }
        command.spawn().map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => NO_QEMU,
            _ => ImageError::Start {
                program: QEMU,
                source,
            },
        })
    }
}

/// Returns QEMU's description of a file as a block device.
fn block_device(name: &str, disk: &DiskFile<'_>, number: RawFd) -> String {
    let read_only = if disk.writable { "off" } else { "on" };
    // The process that opened the file holds a lock on it already.
    format!(
        "raw,node-name={name},read-only={read_only},discard=unmap,file.driver=file,\
         file.filename=/dev/fd/{number},file.locking=off"
    )
}

/// Copies bytes as they arrive. Continues to read after the writer has failed.
fn forward(mut from: PipeReader, to: &mut (dyn Write + Send)) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(length) = from.read(&mut buffer) {
        if length == 0 {
            break;
        }
        // The machine must not block on a closed output.
        let _ = to.write_all(&buffer[..length]).and_then(|()| to.flush());
    }
}

/// Reads to the end and returns the last [`CONSOLE_TAIL`] bytes.
fn tail(mut from: PipeReader) -> String {
    let mut kept = Vec::new();
    let mut buffer = vec![0; 4096];
    while let Ok(length) = from.read(&mut buffer) {
        if length == 0 {
            break;
        }
        kept.extend_from_slice(&buffer[..length]);
        let excess = kept.len().saturating_sub(CONSOLE_TAIL);
        kept.drain(..excess);
    }
    String::from_utf8_lossy(&kept).trim().to_owned()
}

fn join<T: Default>(thread: thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kill_is_no_defect_of_qemu() {
        for (status, defect) in [
            (0, true),
            (libc::SIGABRT, true),
            (libc::SIGKILL, false),
            (1 << 8, false),
        ] {
            assert_eq!(is_defect(ExitStatus::from_raw(status)), defect, "{status}");
        }
    }
}
