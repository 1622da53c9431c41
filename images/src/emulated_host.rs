//! Runs the emulated host: a machine with virtualization, emulated by QEMU, for machines whose own KVM
//! cannot run Linux guests.
//!
//! Its program's standard output, standard error and report come out of three virtio ports, signals for it go in at a
//! fourth and its standard input, if it has one, at a fifth; the serial console has the kernel's messages, which are shown when something fails. The first file
//! system is handed over in a memfd: no end of this process leaves a file behind.

use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};
use wormhole_init::{MAX_FILES, Report};

use crate::error::{ImageError, io};
use crate::image::{COMMAND_LINE, Image};

const QEMU: &str = "qemu-system-x86_64";

const NO_QEMU: ImageError = ImageError::NoTool {
    program: QEMU,
    package: "qemu-system-x86",
};

/// A processor with nested virtualization. Linux 6.12 crashes while it boots in two of five runs if it uses
/// QEMU 7.2's emulation of cmpxchg16b, so that this instruction is hidden from it. What else QEMU cannot
/// emulate is left out without a warning.
const CPU: &str = "EPYC,+svm,-cx16,check=off";

/// QEMU filters its own system calls: it starts nothing, gains no privileges, and moves no process to other processors or
/// priorities. It has to emulate a machine for a guest that may be hostile.
const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

/// Keeps programs, and so guests, off the first processor, which is there beside those asked for.
///
/// Whenever any processor restores FPU state, QEMU (at least 7.2 to 11.1) clears a flag among the first processor's
/// own, without a lock. What that one changes there at the same time is lost: most of all whether it translates
/// addresses for a guest. The guest or the emulated host then ends by a triple fault, at a random place.
const FIRST_PROCESSOR: &str = "isolcpus=0";

/// How much of the console an error shows.
const CONSOLE_TAIL: usize = 4096;

/// The most that is taken of a report.
const MAX_REPORT: u64 = 128 << 20;

/// Names of the virtio ports out of the machine, in the order of their numbers.
const PORTS: [&str; 3] = ["stdout", "stderr", "report"];

/// The numbers of the virtio ports into the machine.
const SIGNALS_PORT: usize = PORTS.len() + 1;
const STDIN_PORT: usize = PORTS.len() + 2;

/// Signals that a terminal or another process sends to all that was started together. They are for the program: QEMU
/// would end by them.
const NOT_FOR_QEMU: [libc::c_int; 6] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGUSR1,
    libc::SIGUSR2,
];

/// A file that the machine has as a disk.
#[derive(Clone, Copy, Debug)]
pub struct DiskFile<'a> {
    pub file: BorrowedFd<'a>,
    pub writable: bool,
}

/// A machine to run once.
#[derive(Clone, Copy, Debug)]
pub struct EmulatedHost<'a> {
    pub image: &'a Image,
    /// What [`host_overlay`](crate::host_overlay) made.
    pub overlay: &'a [u8],
    /// Bytes of memory.
    pub memory: u64,
    /// Processors for programs.
    pub processors: u32,
    /// Disks, which are `/dev/vda`, `/dev/vdb` and so on in the machine.
    pub disks: &'a [DiskFile<'a>],
    /// After which the machine counts as hung.
    pub timeout: Duration,
    /// A socket whose other end says `!` when the program is about to start, and then takes its standard input.
    pub stdin: Option<BorrowedFd<'a>>,
    /// A socket whose other end says `!` when the machine listens, and then takes the numbers of signals for its
    /// program, a byte each.
    pub signals: Option<BorrowedFd<'a>>,
}

/// Passes on what is written, and remembers whether anything was.
struct Told<'a> {
    to: &'a mut (dyn Write + Send),
    told: bool,
}

impl<'a> Told<'a> {
    fn new(to: &'a mut (dyn Write + Send)) -> Self {
        Self { to, told: false }
    }
}

impl Write for Told<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.told |= !bytes.is_empty();
        self.to.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

impl EmulatedHost<'_> {
    /// Whether QEMU is installed.
    pub fn available() -> Result<(), ImageError> {
        let folders = std::env::var_os("PATH").unwrap_or_default();
        let found = std::env::split_paths(&folders).any(|folder| folder.join(QEMU).is_file());
        if found { Ok(()) } else { Err(NO_QEMU) }
    }

    /// Boots the machine, hands out what its program writes as it comes, and returns the report.
    ///
    /// QEMU's emulation of virtualization is not perfect: a guest may end by a fault that real processors do not
    /// show, for which QEMU ends well, or hang. A machine that ends so before its program has written anything is
    /// started once more, which is said on `stderr`.
    pub fn run(
        &self,
        stdout: &mut (dyn Write + Send),
        stderr: &mut (dyn Write + Send),
    ) -> Result<Report, ImageError> {
        let initrd = self.initrd()?;
        // The machine's first process waits until somebody listens, also where nobody has a signal for its program.
        let (_silent, unused) = UnixStream::pair().map_err(|source| ImageError::Start {
            program: QEMU,
            source,
        })?;
        let signals = self.signals.unwrap_or(unused.as_fd());

        let (mut out, mut err) = (Told::new(stdout), Told::new(stderr));
        match self.attempt(&initrd, signals, &mut out, &mut err) {
            Err(ImageError::HostDied { status, .. })
                if status.success() && !out.told && !err.told =>
            {
                // Who does not read the output is not told either.
                let _ = writeln!(
                    err,
                    "wormhole: the emulated host died ({status}) before its program wrote anything: it is started \
                     once more"
                );
                self.attempt(&initrd, signals, &mut out, &mut err)
            }
            ended => ended,
        }
    }

    /// The first file system of the machine, in memory.
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
        signals: BorrowedFd<'_>,
        stdout: &mut (dyn Write + Send),
        stderr: &mut (dyn Write + Send),
    ) -> Result<Report, ImageError> {
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

        let (ended, end) = mpsc::channel();
        let (console, report, outcome) = thread::scope(|scope| {
            let console = scope.spawn(|| tail(console_reader));
            scope.spawn(|| forward(stdout_reader, stdout));
            scope.spawn(|| forward(stderr_reader, stderr));
            let report = scope.spawn(move || {
                let mut bytes = Vec::new();
                // What was read before an error is judged by the report's own form.
                let _ = report_reader.take(MAX_REPORT).read_to_end(&mut bytes);
                // The receiver is gone only when the machine was given up.
                let _ = ended.send(());
                bytes
            });
            // QEMU holds the report's pipe open as long as it runs.
            let outcome = end.recv_timeout(self.timeout);
            if outcome.is_err() {
                // An error means that it has just ended by itself.
                let _ = child.kill();
            }
            (join(console), join(report), outcome)
        });
        let status = child.wait().map_err(|source| ImageError::Start {
            program: QEMU,
            source,
        })?;
        if matches!(outcome, Err(RecvTimeoutError::Timeout)) {
            return Err(ImageError::HostTimeout {
                after: self.timeout,
                console,
            });
        }
        Report::read(&report[..], MAX_FILES).map_err(|source| ImageError::HostDied {
            status,
            console,
            source,
        })
    }

    fn start(
        &self,
        initrd: &File,
        signals: BorrowedFd<'_>,
        writers: [PipeWriter; 4],
    ) -> Result<Child, ImageError> {
        // What QEMU itself has to say is shown with the console.
        let errors = writers[0].try_clone().map_err(|source| ImageError::Start {
            program: QEMU,
            source,
        })?;
        // The descriptors get numbers of their own in QEMU, above all that are to be moved and well above
        // the few that are opened to start it.
        let sources: Vec<RawFd> = writers
            .iter()
            .map(AsRawFd::as_raw_fd)
            .chain([initrd.as_raw_fd()])
            .chain([signals.as_raw_fd()])
            .chain(self.stdin.map(|stdin| stdin.as_raw_fd()))
            .chain(self.disks.iter().map(|disk| disk.file.as_raw_fd()))
            .collect();
        let first = sources.iter().max().map_or(0, |highest| highest + 100);
        let numbers: Vec<RawFd> = (first..).take(sources.len()).collect();
        let (others, disks) = numbers.split_at(numbers.len() - self.disks.len());
        let (others, stdin) = others.split_at(others.len() - usize::from(self.stdin.is_some()));
        let [console, outputs @ .., initrd_number, signals_number] = others else {
            unreachable!("there are a console, an initrd and signals");
        };

        let mut command = Command::new(QEMU);
        command.args([
            "-accel",
            "tcg,thread=multi",
            "-cpu",
            CPU,
            "-M",
            "q35",
            "-nodefaults",
        ]);
        command.args(["-no-user-config", "-display", "none", "-no-reboot"]);
        command.args(["-sandbox", SANDBOX]);
        command.args([
            "-smp",
            &(self.processors + 1).to_string(),
            "-m",
            &format!("{}M", self.memory >> 20),
        ]);
        command
            .arg("-kernel")
            .arg(&self.image.kernel)
            .arg("-initrd")
            .arg(format!("/dev/fd/{initrd_number}"));
        command.args(["-append", &format!("{COMMAND_LINE} {FIRST_PROCESSOR}")]);
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
        for (index, (disk, number)) in self.disks.iter().zip(disks).enumerate() {
            let read_only = if disk.writable { "off" } else { "on" };
            // The lock of whoever opened the file holds.
            command.arg("-blockdev").arg(format!(
                "raw,node-name=disk{index},read-only={read_only},discard=unmap,file.driver=file,\
                 file.filename=/dev/fd/{number},file.locking=off"
            ));
            command
                .arg("-device")
                .arg(format!("virtio-blk-pci,drive=disk{index}"));
        }
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(errors);
        // SAFETY: all zeroes is a set; the functions write nothing else.
        let blocked = unsafe {
            let mut set: libc::sigset_t = mem::zeroed();
            libc::sigemptyset(&raw mut set);
            for signal in NOT_FOR_QEMU {
                libc::sigaddset(&raw mut set, signal);
            }
            set
        };
        // SAFETY: the closure calls only dup2, sigprocmask and prctl, which are safe between fork and exec, and touches
        // no memory but its own copies of the numbers and the set.
        unsafe {
            command.pre_exec(move || {
                for (&source, &number) in sources.iter().zip(&numbers) {
                    if libc::dup2(source, number) < 0 {
                        return Err(io::Error::last_os_error());
                    }
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

/// Copies as the bytes come, and goes on reading when nobody takes them any more.
fn forward(mut from: PipeReader, to: &mut (dyn Write + Send)) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(length) = from.read(&mut buffer) {
        if length == 0 {
            break;
        }
        // The machine must not hang on an output that is gone.
        let _ = to.write_all(&buffer[..length]).and_then(|()| to.flush());
    }
}

/// The last that was said.
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
