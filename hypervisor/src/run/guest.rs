//! Placements `host` and `vm`: the program runs in a guest VM of this machine's KVM, and the backend is a process of this
//! system, or runs in a [VM of its own](crate::backend_vm).

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use wormhole_images::status::{NOT_EXECUTABLE, NOT_FOUND};
use wormhole_images::{
    COLLECT_BYTES, COMMAND_LINE, Ending, FILES_TAG, GuestRun, Report, guest_overlay, ports,
    volume_tag,
};
use wormhole_link::tasks;
use wormhole_monitor::devices::vsock::Accepted;
use wormhole_monitor::{
    BootSource, ConnectRequest, ExitReason, FsConfig, InitramfsPart, Refused, Start, Tag, Vm,
    VmConfig, VmError, VsockConfig, exit_accounting,
};

use crate::backend::Streams;
use crate::cgroup;
use crate::confinement::ConfinementError;
use crate::file_memory::FileMemory;
use crate::image;
use crate::installation::Installation;
use crate::say;
use crate::signals::{KILLED, Passing, Signals, to_machine};

use super::confinement;
use super::files::{self, Export};
use super::summary::{BackendVmSummary, Summary};
use super::volumes::Volume;
use super::{Disk, Ended, Input, Options, RunError, images, network, resources};
use crate::phases::Phases;

/// Vsock CID of the guest. Every guest has a monitor of its own, so all guests use the same one.
pub const GUEST_CID: u32 = 3;

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
pub fn console(tail: &[String]) -> String {
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
    input: Option<Input>,
    phases: Phases,
) -> Result<Ended, RunError> {
    phases.begin("starting the backend, and booting the guest");
    let start = Instant::now();
    let disks = options.disks()?;
    let networks = network::open(&options.network)?;
    let folder = images(installation)?;
    let image = image::ensure(image::GUEST, &folder, options.kernel().into())?;
    let mut variables = options.variables();
    variables.push((
        ACCOUNTS_VARIABLE.into(),
        exit_accounting::PORT.to_string().into(),
    ));
    let user = options.user().map_err(|source| RunError::Io {
        what: "cannot tell the user's groups".to_owned(),
        source,
    })?;
    let overlay = guest_overlay(&GuestRun {
        init: installation.init()?,
        frontends: installation.frontends()?,
        program: program.to_path_buf(),
        arguments: options.arguments(),
        variables,
        stdin: input.is_some(),
        terminal: options.terminal(),
        volumes: options.volume.iter().map(Volume::mount).collect(),
        user,
        hostname: options.hostname().to_owned(),
        directory: options.directory()?,
        window: options.window(),
        networks: options.network.iter().map(|one| one.guest).collect(),
        collect: options
            .collect
            .iter()
            .map(|one| one.guest.clone())
            .collect(),
    })?;
    let mut backend = options.open_backend(installation)?;
    let backend_vm = backend.vm();
    let server = backend_vm.as_ref().map(|(figures, _)| Arc::clone(figures));
    let window = backend
        .window()
        .try_clone()
        .map_err(|source| RunError::Io {
            what: "cannot share the window with the guest".to_owned(),
            source,
        })?;
    let bytes = FileMemory::usual(options.memory().0, &backend);
    let file_memory = FileMemory::open(bytes, &mut backend)?;
    let program = installation.files()?;
    let file_system = |tag: &str, export: &Export| {
        let server = files::start(&program, export).map_err(|source| RunError::Io {
            what: "cannot start the server of the guest's files".to_owned(),
            source,
        })?;
        let tag = Tag::new(tag).map_err(|error| GuestError::Failed(error.to_string()))?;
        Ok::<_, RunError>(FsConfig { tag, server })
    };
    let root = file_system(FILES_TAG, &Export::of_root(options.root()));
    let volumes = options.volume.iter().enumerate();
    let volumes = volumes
        .map(|(number, volume)| file_system(&volume_tag(number), &Export::of(volume, options)));
    let file_systems = std::iter::once(root)
        .chain(volumes)
        .collect::<Result<_, _>>()?;
    let disabled_exits = resources::disabled_exits(options.dedicated).map_err(GuestError::from)?;
    let (sender, streams) = channel();
    let control = Arc::new(OnceLock::new());
    let memory =
        options.memory().0 + bytes + options.window() + Disk::bytes_in_memory(&options.disk);
    cgroup::enter(installation, Some(memory));
    wormhole_monitor::confinement::leave_namespaces();
    let vm = Vm::new(VmConfig {
        start: Start::Boot(BootSource {
            kernel: image.kernel,
            initramfs: vec![
                InitramfsPart::Path(image.modules),
                InitramfsPart::Bytes(overlay),
            ],
            command_line: COMMAND_LINE.to_owned(),
        }),
        memory_mib: options.memory().0 >> 20,
        vcpus: options.cpus(),
        window: Some(window.into()),
        file_memory: file_memory.map(FileMemory::into_file),
        vsock: Some(VsockConfig {
            guest_cid: GUEST_CID,
            acceptor: Box::new(acceptor(Arc::clone(&control), input.is_some(), sender)),
        }),
        file_systems,
        disks,
        networks,
        passed_through: Vec::new(),
        prefault: options.prefault,
        console: Box::new(io::sink()),
        timeout: options.timeout(),
        disabled_exits,
        pins: options.pin.iter().flat_map(|pin| pin.0.clone()).collect(),
        server: server.clone(),
    })
    .map_err(GuestError::from)?;

    // All files are open by now, and all processes are started.
    confinement::enter().map_err(GuestError::from)?;
    backend.tell_exits(vm.stats());
    backend.listen(vm.window().map(|window| (window, vm.stop_handle())))?;
    let opened = backend.streams()?;
    control.get_or_init(|| opened);
    let stats = vm.stats();
    let vm_name = stats.vm_name().to_owned();
    let killed = Arc::new(AtomicBool::new(false));
    let pass = {
        let (signals, killed, stop) = (signals.clone(), Arc::clone(&killed), vm.stop_handle());
        let grace = Duration::from_secs(options.grace);
        let has_terminal = options.tty;
        move |stream| {
            phases.end();
            let (killed, stop) = (Arc::clone(&killed), stop.clone());
            signals.to(to_machine(stream, has_terminal, grace, move || {
                killed.store(true, Ordering::Release);
                stop.stop();
            }))
        }
    };
    let exits = move || {
        let own = stats.read().ok()?.vcpu_sum("exits");
        let of_server = server.as_ref().map(|vcpu| vcpu.exits());
        Some((own, of_server.unwrap_or(Some(0))?))
    };
    let paths = options.collect.len();
    let attendant = tasks::spawn("attendant", move || {
        attend(&streams, exits, input, pass, paths)
    });
    let attendant = attendant.map_err(|source| RunError::Io {
        what: "the thread that attends the guest cannot be made".to_owned(),
        source,
    })?;
    let report = vm.run().map_err(GuestError::from)?;
    // The VM is gone, and with it the other ends of all streams, so the attendant ends.
    let mut seen = attendant.join().unwrap_or_default();
    let served = backend.finish();

    if let Some(line) = &report.out_of_memory {
        say::line(format_args!(
            "the guest ran out of memory ({line}): give it more with --memory"
        ));
    }
    let reclaimed = report.reclaimed_bytes;
    let collected = seen.report.as_mut();
    let collected = collected.map(|report| std::mem::take(&mut report.collected));
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
    let [exit_accounts, backend_accounts] = report.exit_accounts;
    let (vm_exits, backend_exits) = seen.exits.unzip();
    summary.vm_exits = vm_exits;
    summary.vm = Some(vm_name);
    summary.exit_accounts = Some(exit_accounts);
    summary.backend_vm = backend_vm.map(|(figures, boot_id)| BackendVmSummary {
        vm: figures.vm_name().to_owned(),
        boot_id,
        vm_exits: backend_exits,
        exit_accounts: backend_accounts,
    });
    summary.reclaimed_bytes = Some(reclaimed);
    Ok(Ended {
        status,
        summary,
        collected: collected.unwrap_or_default(),
        is_absence_said: false,
    })
}

/// Returns the acceptor of the guest's connections. Control streams lead to the supervisor by `control`, which is
/// set before the guest starts, the others to the attendant.
fn acceptor(
    control: Arc<OnceLock<Streams>>,
    interactive: bool,
    sender: Sender<(u32, UnixStream)>,
) -> impl FnMut(ConnectRequest) -> Result<Accepted, Refused> + Send {
    let mut open = vec![ports::STDOUT, ports::STDERR, ports::SIGNALS, ports::REPORT];
    open.extend(interactive.then_some(ports::STDIN));
    move |request| {
        if request.port == ports::CONTROL {
            return control.get().ok_or(Refused)?.open();
        }
        // The first process connects each of the other ports once, before the program starts.
        let at = open
            .iter()
            .position(|port| *port == request.port)
            .ok_or(Refused)?;
        let (guest, host) = UnixStream::pair().map_err(|_| Refused)?;
        open.swap_remove(at);
        sender.send((request.port, host)).map_err(|_| Refused)?;
        Ok(guest.into())
    }
}

/// Results of a guest beside its program's output.
#[derive(Debug, Default)]
struct Seen {
    report: Option<Report>,
    /// Numbers of exits of the guest and of the backend VM from the program's start to its report.
    exits: Option<(u64, u64)>,
}

/// Copies the program's output, passes signals on, reads the report with the files of `paths` paths, and counts each VM's exits from start
/// to report.
fn attend(
    streams: &Receiver<(u32, UnixStream)>,
    exits: impl Fn() -> Option<(u64, u64)>,
    mut input: Option<Input>,
    pass: impl Fn(UnixStream) -> Passing,
    paths: usize,
) -> Seen {
    let mut seen = Seen::default();
    let mut passing = None;
    std::thread::scope(|scope| {
        for (port, stream) in streams {
            match port {
                ports::STDOUT => {
                    in_thread(scope, move || copy(stream, io::stdout()));
                }
                ports::STDERR => {
                    in_thread(scope, move || copy(stream, io::stderr()));
                }
                ports::STDIN => {
                    if let Some(input) = input.take() {
                        input.feed(stream);
                    }
                }
                ports::SIGNALS => passing = Some(pass(stream)),
                _ => {
                    // The last connection before the program starts; the report arrives when the
                    // program has ended.
                    let before = exits();
                    seen.report = Report::read(stream, paths, COLLECT_BYTES).ok();
                    let both = before.zip(exits());
                    seen.exits = both.map(|((own, server), now)| {
                        (now.0.saturating_sub(own), now.1.saturating_sub(server))
                    });
                }
            }
        }
    });
    drop(passing);
    seen
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

/// Copies bytes as they arrive. The copy ends if the guest goes away or an output is closed; the run reports its own
/// outcome.
pub fn copy(mut from: UnixStream, mut to: impl Write) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return,
            // A prompt is no whole line.
            Ok(length)
                if to
                    .write_all(&buffer[..length])
                    .and_then(|()| to.flush())
                    .is_err() =>
            {
                return;
            }
            Err(error) if error.kind() != io::ErrorKind::Interrupted => return,
            _ => {}
        }
    }
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
