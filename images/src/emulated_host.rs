//! Runs the emulated host: a machine with virtualization, emulated by QEMU, for machines whose own KVM
//! cannot run Linux guests.
//!
//! Its program's standard output, standard error and report come out of three virtio ports; the serial
//! console has the kernel's messages, which are shown when something fails.

use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use wormhole_init::Report;

use crate::error::{ImageError, io};
use crate::image::{COMMAND_LINE, Image};

const QEMU: &str = "qemu-system-x86_64";

/// A processor with nested virtualization. Linux 6.12 crashes while it boots in two of five runs if it uses
/// QEMU 7.2's emulation of cmpxchg16b, so that this instruction is hidden from it. What else QEMU cannot
/// emulate is left out without a warning.
const CPU: &str = "EPYC,+svm,-cx16,check=off";

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

/// Names of the virtio ports, in the order of their numbers.
const PORTS: [&str; 3] = ["stdout", "stderr", "report"];

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
    /// After which the machine counts as hung.
    pub timeout: Duration,
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
        let mut initrd =
            tempfile::NamedTempFile::new().map_err(io("make a file in", &std::env::temp_dir()))?;
        let modules = self.image.initrd(self.overlay)?;
        initrd
            .write_all(&modules)
            .map_err(io("write", initrd.path()))?;

        let (mut out, mut err) = (Told::new(stdout), Told::new(stderr));
        match self.attempt(initrd.path(), &mut out, &mut err) {
            Err(ImageError::HostDied { status, .. })
                if status.success() && !out.told && !err.told =>
            {
                // Who does not read the output is not told either.
                let _ = writeln!(
                    err,
                    "wormhole: the emulated host died ({status}) before its program wrote anything: it is started \
                     once more"
                );
                self.attempt(initrd.path(), &mut out, &mut err)
            }
            ended => ended,
        }
    }

    fn attempt(
        &self,
        initrd: &Path,
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
        Report::read(&report[..]).map_err(|source| ImageError::HostDied {
            status,
            console,
            source,
        })
    }

    fn start(&self, initrd: &Path, writers: [PipeWriter; 4]) -> Result<Child, ImageError> {
        // What QEMU itself has to say is shown with the console.
        let errors = writers[0].try_clone().map_err(|source| ImageError::Start {
            program: QEMU,
            source,
        })?;
        // The descriptors get numbers of their own in QEMU, above all that are to be moved and well above
        // the few that are opened to start it.
        let sources: [RawFd; 4] = std::array::from_fn(|index| writers[index].as_raw_fd());
        let first = sources.iter().max().map_or(0, |highest| highest + 100);
        let numbers: [RawFd; 4] =
            std::array::from_fn(|index| first + RawFd::try_from(index).unwrap_or_default());

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
            .arg(initrd);
        command.args(["-append", &format!("{COMMAND_LINE} {FIRST_PROCESSOR}")]);
        command.args([
            "-chardev",
            &format!("file,id=console,path=/dev/fd/{}", numbers[0]),
        ]);
        command.args(["-serial", "chardev:console", "-device", "virtio-serial-pci"]);
        for (index, name) in PORTS.iter().enumerate() {
            command.args([
                "-chardev",
                &format!("file,id={name},path=/dev/fd/{}", numbers[index + 1]),
            ]);
            command.args([
                "-device",
                &format!("virtserialport,chardev={name},name={name},nr={}", index + 1),
            ]);
        }
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(errors);
        // SAFETY: the closure calls only dup2 and prctl, which are safe between fork and exec, and touches
        // no memory but its own copies of the numbers.
        unsafe {
            command.pre_exec(move || {
                for (&source, &number) in sources.iter().zip(&numbers) {
                    if libc::dup2(source, number) < 0 {
                        return Err(io::Error::last_os_error());
                    }
                }
                if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                    return Err(io::Error::last_os_error());
                }
                Ok(())
            });
        }
        command.spawn().map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => ImageError::NoTool {
                program: QEMU,
                package: "qemu-system-x86",
            },
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
