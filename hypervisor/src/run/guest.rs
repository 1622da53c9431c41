//! Placement `host`: the program runs in a guest VM of this machine's KVM, and the backend is a
//! process of this system.

use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use wormhole_images::status::{NOT_EXECUTABLE, NOT_FOUND};
use wormhole_images::{
    COMMAND_LINE, Ending, FILES_TAG, GuestRun, Image, Report, guest_overlay, ports,
};
use wormhole_link::tasks;
use wormhole_monitor::stats::{Snapshot, VmStats};
use wormhole_monitor::{
    BootSource, ConnectRequest, ExitReason, FsConfig, InitramfsPart, Refused, Tag, Vm, VmConfig,
    VmError, VsockConfig, exit_accounting,
};

use crate::backend::Port;
use crate::installation::Installation;
use crate::say;
use crate::signals::{KILLED, Passing, Signals, to_machine};

use super::confinement::{self, ConfinementError};
use super::summary::Summary;
use super::{Options, RunError, files, images, network, not_executed, resources};

/// Vsock CID of the guest. Every guest has a monitor of its own, so all guests use the same one.
const GUEST_CID: u32 = 3;

/// Environment variable of the guest's programs with the vsock port on which they report their
/// activity to the monitor.
const ACCOUNTS_VARIABLE: &str = "WORMHOLE_EXIT_ACCOUNTS";

/// Failure of a guest.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    #[error(transparent)]
    Vm(#[from] VmError),
    #[error("the launcher cannot be confined")]
    Confinement(#[from] ConfinementError),
    #[error("{outcome}{}", console(.tail))]
    Ended {
        outcome: ExitReason,
        tail: Vec<String>,
    },
    #[error("the guest could not run the program: {0}")]
    Failed(String),
    #[error("the guest ended without a report of its program{}", console(.0))]
    NoReport(Vec<String>),
}

/// Formats the console's last lines as an appendix to a sentence.
fn console(tail: &[String]) -> String {
    if tail.is_empty() {
        return String::new();
    }
    format!("; its console's last lines:\n{}", tail.join("\n"))
}

/// Boots a guest that runs only the program.
pub fn run(
    options: &Options,
    program: &Path,
    installation: &Installation,
    signals: &Signals,
) -> Result<(u8, Summary), RunError> {
    let start = Instant::now();
    let disks = options.disks()?;
    let networks = network::open(&options.network)?;
    let folder = images(installation)?;
    let image = Image::guest(&folder, options.kernel().into())?;
    let mut variables = options.variables();
    variables.push((
        ACCOUNTS_VARIABLE.into(),
        exit_accounting::PORT.to_string().into(),
    ));
    let overlay = guest_overlay(&GuestRun {
        init: installation.init()?,
        frontends: installation.frontends()?,
        program: program.to_path_buf(),
        arguments: options.arguments(program),
        variables,
        has_files: options.rootfs.is_some(),
        stdin: options.interactive,
        directory: options.directory()?,
        take: options.take.clone(),
        window: options.window.0,
        networks: options.network.iter().map(|one| one.guest).collect(),
    })
    .map_err(|error| not_executed(program, error))?;
    let mut backend = options.open_backend(installation)?;
    let window = backend
        .window()
        .try_clone()
        .map_err(|source| RunError::Io {
            what: "cannot share the window with the guest".to_owned(),
            source,
        })?;
    let fs = options.rootfs.as_deref().map(|folder| {
        let server = installation.files()?;
        files::start(&server, folder).map_err(|source| RunError::Io {
            what: "cannot start the server of the guest's files".to_owned(),
            source,
        })
    });
    let fs = fs.transpose()?;
    let disabled_exits = resources::disabled_exits(options.dedicated).map_err(GuestError::from)?;
    let (sender, streams) = channel();
    let vm = Vm::new(VmConfig {
        boot: BootSource {
            kernel: image.kernel,
            initramfs: vec![
                InitramfsPart::Path(image.modules),
                InitramfsPart::Bytes(overlay),
            ],
            command_line: COMMAND_LINE.to_owned(),
        },
        memory_mib: options.memory().0 >> 20,
        vcpus: options.cpus(),
        window: Some(window.into()),
        vsock: Some(VsockConfig {
            guest_cid: GUEST_CID,
            acceptor: Box::new(acceptor(backend.port(), options.interactive, sender)),
        }),
        fs: fs
            .map(|server| Tag::new(FILES_TAG).map(|tag| FsConfig { tag, server }))
            .transpose()
            .map_err(|error| GuestError::Failed(error.to_string()))?,
        disks,
        networks,
        prefault: options.prefault,
        console: Box::new(io::sink()),
        timeout: Some(Duration::from_secs(options.timeout())),
        disabled_exits,
        pins: options.pin.iter().flat_map(|pin| pin.0.clone()).collect(),
    })
    .map_err(GuestError::from)?;

    // All files are open by now, and all processes are started.
    confinement::enter().map_err(GuestError::from)?;
    backend.listen(vm.window().map(|window| (window, vm.stop_handle())))?;
    let stats = vm.stats();
    let killed = Arc::new(AtomicBool::new(false));
    let pass = {
        let (signals, killed, stop) = (signals.clone(), Arc::clone(&killed), vm.stop_handle());
        let grace = Duration::from_secs(options.grace);
        move |stream| {
            let (killed, stop) = (Arc::clone(&killed), stop.clone());
            signals.to(to_machine(stream, grace, move || {
                killed.store(true, Ordering::Release);
                stop.stop();
            }))
        }
    };
    let attendant = tasks::spawn("attendant", move || attend(&streams, &stats, pass));
    let attendant = attendant.map_err(|source| RunError::Io {
        what: "the thread that attends the guest cannot be made".to_owned(),
        source,
    })?;
    let report = vm.run().map_err(GuestError::from)?;
    // The VM is gone, and with it the other ends of all streams, so the attendant ends.
    let seen = attendant.join().unwrap_or_default();
    let served = backend.finish();

    if let Some(line) = &report.out_of_memory {
        say::line(format_args!(
            "the guest ran out of memory ({line}): give it more with --memory"
        ));
    }
    let (exit_accounts, reclaimed) = (report.exit_accounts, report.reclaimed_bytes);
    let status = if killed.load(Ordering::Acquire) {
        KILLED
    } else {
        match status(report.outcome, seen.report, report.console_tail) {
            Ok(status) => status,
            // The backend's failure is reported first, because it causes the other error.
            Err(error) => return Err(served.failure.map_or(error, RunError::from)),
        }
    };
    let mut summary = Summary::of(served, "kvm", start.elapsed());
    summary.vm_exits = seen.exits;
    summary.exit_accounts = Some(exit_accounts);
    summary.reclaimed_bytes = Some(reclaimed);
    Ok((status, summary))
}

/// Returns the acceptor of the guest's connections. Control streams lead to the supervisor, the
/// others to the attendant.
fn acceptor(
    port: Port,
    interactive: bool,
    sender: Sender<(u32, UnixStream)>,
) -> impl FnMut(ConnectRequest) -> Result<UnixStream, Refused> + Send {
    let mut open = vec![ports::STDOUT, ports::STDERR, ports::SIGNALS, ports::REPORT];
    open.extend(interactive.then_some(ports::STDIN));
    move |request| {
        if request.port == ports::CONTROL {
            return port.open(false).map_err(|_| Refused);
        }
        // The first process connects each of the other ports once, before the program starts.
        let at = open
            .iter()
            .position(|port| *port == request.port)
            .ok_or(Refused)?;
        let (guest, host) = UnixStream::pair().map_err(|_| Refused)?;
        open.swap_remove(at);
        sender.send((request.port, host)).map_err(|_| Refused)?;
        Ok(guest)
    }
}

/// Results of a guest beside its program's output.
#[derive(Debug, Default)]
struct Seen {
    report: Option<Report>,
    /// Number of VM exits of all vCPUs from the program's start to its report.
    exits: Option<u64>,
}

/// Copies the program's output, passes signals on, reads the report, and counts VM exits from start
/// to report.
fn attend(
    streams: &Receiver<(u32, UnixStream)>,
    stats: &VmStats,
    pass: impl Fn(UnixStream) -> Passing,
) -> Seen {
    let mut seen = Seen::default();
    let mut passing = None;
    let mut before = None;
    std::thread::scope(|scope| {
        for (port, stream) in streams {
            match port {
                ports::STDOUT => {
                    in_thread(scope, move || copy(stream, io::stdout()));
                }
                ports::STDERR => {
                    in_thread(scope, move || copy(stream, io::stderr()));
                }
                ports::STDIN => super::feed(stream),
                ports::SIGNALS => passing = Some(pass(stream)),
                _ => {
                    // The last connection before the program starts; the report arrives when the
                    // program has ended.
                    before = stats.read().ok();
                    // The request named no files.
                    seen.report = Report::read(stream, 0).ok();
                    seen.exits = before
                        .take()
                        .zip(stats.read().ok())
                        .map(|(before, after)| exits(&before, &after));
                }
            }
        }
    });
    drop(passing);
    seen
}

fn exits(before: &Snapshot, after: &Snapshot) -> u64 {
    after.since(before).vcpu_sum("exits")
}

/// Runs the work in a thread of the scope. If no thread can be created, the work is dropped and a
/// line is printed.
fn in_thread<'scope>(
    scope: &'scope std::thread::Scope<'scope, '_>,
    work: impl FnOnce() + Send + 'scope,
) {
    let started = std::thread::Builder::new().spawn_scoped(scope, work);
    if let Err(error) = started.map_err(tasks::named) {
        say::line(format_args!("the program's output is lost: {error}"));
    }
}

fn copy(mut from: UnixStream, mut to: impl Write) {
    // The copy ends if the guest goes away or an output is closed; the run reports its own outcome.
    drop(io::copy(&mut from, &mut to).and_then(|_| to.flush()));
}

fn status(outcome: ExitReason, report: Option<Report>, tail: Vec<String>) -> Result<u8, RunError> {
    match outcome {
        ExitReason::Exited { .. } => match report {
            Some(Report {
                ending:
                    Ending::Failed {
                        status: status @ (NOT_EXECUTABLE | NOT_FOUND),
                        message,
                    },
                ..
            }) => Err(RunError::NotRun { status, message }),
            Some(Report {
                ending: Ending::Failed { message, .. },
                ..
            }) => Err(GuestError::Failed(message).into()),
            Some(report) => Ok(report.ending.status()),
            None => Err(GuestError::NoReport(tail).into()),
        },
        outcome => Err(GuestError::Ended { outcome, tail }.into()),
    }
}
