//! Placements `host` and `vm` on the emulated host: a QEMU machine with emulated virtualization, in which the
//! same command runs the program in a guest of that machine's KVM.

use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use wormhole_images::{
    Collected, DiskFile, EmulatedHost, Ending, FILES_TAG, HOST_FILES, HostRun, MachineSignals,
    SocketServer, host_overlay, volume_place, volume_tag,
};
use wormhole_link::tasks;
use wormhole_monitor::DiskAccess;

use crate::backend_vm;
use crate::image;
use crate::installation::Installation;
use crate::say;
use crate::signals::{KILLED, Signals, to_machine};

use super::collect::Collect;
use super::environment::{LIBRARY_PATH, forwarded_variables};
use super::files::{Export, HostFiles};
use super::guest::GuestError;
use super::network::{self, Bridged};
use super::summary::Summary;
use super::volumes::Volume;
use super::{Ended, Input, Options, Placement, RunError, Size, images};
use crate::phases::Phases;

/// File to which the inner command writes its summary.
const SUMMARY: &str = "/run/summary.json";
/// Returns the path to which the inner command copies what an option `--collect` names.
fn collected(number: usize) -> PathBuf {
    Path::new("/run").join(format!("collected-{number}"))
}

/// Number of processors of the emulated host: the guest's, and one for the backend that polls.
const PROCESSORS: u32 = 2;
/// Memory of the emulated host beside the guest's RAM and window, in bytes.
const HOST_MEMORY: u64 = 768 << 20;
/// Time for the emulated host itself to boot and to shut down.
const HOST_TIME: Duration = Duration::from_secs(60);

/// Writer to standard error that stores the last bytes.
#[derive(Default)]
struct Errors {
    end: Vec<u8>,
}

impl Errors {
    /// Number of bytes stored: enough for the inner command's last message.
    const KEPT: usize = 1024;

    /// Returns whether the guest's processor reported a triple fault. On a real processor Linux
    /// never causes one.
    fn report_a_triple_fault(&self) -> bool {
        String::from_utf8_lossy(&self.end)
            .lines()
            .any(|line| line.starts_with("wormhole: guest: ") && line.contains("(triple fault)"))
    }

    /// Returns whether the inner command, or its supervisor, has printed why there is no summary.
    fn report_the_reason(&self) -> bool {
        String::from_utf8_lossy(&self.end)
            .lines()
            .any(|line| line.starts_with("wormhole: ") || line.starts_with("wormhole-supervisor: "))
    }
}

impl Write for Errors {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.end.extend_from_slice(bytes);
        let excess = self.end.len().saturating_sub(Self::KEPT);
        self.end.drain(..excess);
        // The scan of these bytes must work even if standard error fails.
        let _ = io::stderr().write_all(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Runs the same command in the emulated host. `why` is the reason for not using this machine's
/// KVM.
pub fn run(
    options: &Options,
    program: &Path,
    installation: &Installation,
    signals: &Signals,
    input: Option<Input>,
    why: Option<&str>,
    phases: Phases,
) -> Result<Ended, RunError> {
    let start = Instant::now();
    let disks = options.disks()?;
    let networks = network::bridged(&options.network)?;
    let folder = images(installation)?;
    let kernel = options.kernel().into();
    let host = image::ensure(image::EMULATED_HOST, &folder, wormhole_images::Kernel::V6_1)?;
    let mut arguments: Vec<std::ffi::OsString> =
        ["run", "--host", "kvm", "--quiet", "--json", SUMMARY]
            .map(Into::into)
            .to_vec();
    let (placement, backend_memory) = match options.placement {
        Placement::Vm => ("vm", backend_vm::MEMORY),
        _ => ("host", 0),
    };
    for (flag, value) in [
        ("--placement", placement.to_owned()),
        ("--device", options.device.device.clone()),
        ("--kernel", options.kernel().to_string()),
        ("--window", Size(options.window()).to_string()),
        ("--memory", options.memory().to_string()),
        ("--cpus", options.cpus().to_string()),
        ("--grace", options.grace.to_string()),
    ] {
        arguments.extend([flag.into(), value.into()]);
    }
    if let Some(timeout) = options.timeout() {
        arguments.extend(["--timeout".into(), timeout.as_secs().to_string().into()]);
    }
    arguments.extend(["--rootfs".into(), HOST_FILES.into()]);
    for (number, volume) in options.volume.iter().enumerate() {
        let inner = Volume {
            source: volume_place(number),
            ..volume.clone()
        };
        arguments.extend(["--volume".into(), inner.text()]);
    }
    for (number, collect) in options.collect.iter().enumerate() {
        let inner = Collect {
            host: collected(number),
            ..collect.clone()
        };
        arguments.extend(["--collect".into(), inner.text()]);
    }
    arguments.extend(["--workdir".into(), options.directory()?.into()]);
    let user = options.user().map_err(|source| RunError::Io {
        what: "cannot tell the user's groups".to_owned(),
        source,
    })?;
    arguments.extend(["--user".into(), user.to_string().into()]);
    arguments.extend(["--hostname".into(), options.hostname().into()]);
    // The name may begin with a dash, as a login shell's.
    let name = options.arguments().swap_remove(0);
    arguments.push([OsStr::new("--argv0="), &name].join(OsStr::new("")));
    // The machine's own library path is not the program's.
    let none = (LIBRARY_PATH.into(), "".into());
    for (name, value) in std::iter::once(&none).chain(&options.variables()) {
        arguments.extend([
            "--env".into(),
            [name.as_os_str(), value].join(OsStr::new("=")),
        ]);
    }
    if options.prefault {
        arguments.push("--prefault".into());
    }
    if options.tty {
        arguments.push("--tty".into());
    }
    if options.interactive {
        arguments.push("--interactive".into());
    }
    // Names of the machine's disks inside the emulated host.
    for (letter, disk) in (b'a'..=b'z').zip(&disks) {
        let read_only = match disk.access() {
            DiskAccess::ReadOnly => ":ro",
            DiskAccess::ReadWrite => "",
        };
        let name = format!("/dev/vd{}{read_only}", char::from(letter));
        arguments.extend(["--disk".into(), name.into()]);
    }
    // The machine bridges its taps with its own interfaces, which are connected to the host's ends.
    for (number, (option, network)) in options.network.iter().zip(&networks).enumerate() {
        let value = format!("tap=tap{number},mac={},{}", network.mac, option.guest);
        arguments.extend(["--network".into(), value.into()]);
    }
    arguments.extend(["--".into(), program.into()]);
    arguments.extend(options.command[1..].iter().cloned());

    let server = installation.files()?;
    let root = (FILES_TAG.to_owned(), Export::of_root(options.root()));
    let volumes = options.volume.iter().enumerate();
    let volumes = volumes.map(|(number, volume)| (volume_tag(number), Export::of(volume, options)));
    let servers: Vec<(String, HostFiles)> = std::iter::once(root)
        .chain(volumes)
        .map(|(tag, export)| (tag, HostFiles::new(server.clone(), export)))
        .collect();
    let files: Vec<(String, &dyn SocketServer)> = servers
        .iter()
        .map(|(tag, server)| (tag.clone(), server as _))
        .collect();
    let mut images = vec![image::ensure(image::GUEST, &folder, kernel)?];
    if options.placement == Placement::Vm {
        images.push(image::ensure(image::BACKEND, &folder, backend_vm::KERNEL)?);
    }
    let overlay = host_overlay(&HostRun {
        init: installation.init()?,
        wormhole: installation.command().to_path_buf(),
        parts: [
            installation.supervisor()?,
            installation.worker()?,
            installation.init()?,
            installation.files()?,
        ]
        .into_iter()
        .chain(installation.frontends()?)
        .collect(),
        images,
        arguments,
        variables: forwarded_variables(),
        stdin: input.is_some(),
        terminal: options.terminal(),
        programs: Vec::new(),
        has_files: true,
        volumes: options
            .volume
            .iter()
            .map(|volume| volume.is_writable)
            .collect(),
        taps: networks.len(),
        collect: std::iter::once(SUMMARY.into())
            .chain((0..options.collect.len()).map(collected))
            .collect(),
    })?;
    EmulatedHost::available()?;
    if let Some(why) = why {
        say::line(format_args!("{why}; using the emulated host"));
    }
    let failed = |source| RunError::Io {
        what: "signals cannot be passed on".to_owned(),
        source,
    };
    let (ours, theirs) = UnixStream::pair().map_err(failed)?;
    let ready = ours.try_clone().map_err(failed)?;
    let is_ready = Arc::new(AtomicBool::new(false));
    phases.begin("booting the emulated host");
    let ready_too = Arc::clone(&is_ready);
    let signals = pass(signals.clone(), ours, options, ready_too, phases).map_err(failed)?;
    let stdin = input.map(Input::socket).transpose()?;
    let of_machine = networks.iter().map(Bridged::of_machine);
    let of_machine = of_machine.collect::<Result<Vec<_>, _>>()?;
    let mut errors = Errors::default();
    let report = EmulatedHost {
        image: &host,
        overlay: &overlay,
        memory: HOST_MEMORY
            .saturating_add(backend_memory)
            .saturating_add(options.memory().0)
            // Half as much for files.
            .saturating_add(options.memory().0 / 2)
            .saturating_add(options.window()),
        processors: PROCESSORS,
        disks: &disks
            .iter()
            .map(|disk| DiskFile {
                file: disk.as_fd(),
                writable: disk.access() == DiskAccess::ReadWrite,
            })
            .collect::<Vec<_>>(),
        nvme_disks: &[],
        networks: &of_machine,
        files: &files,
        timeout: options
            .timeout()
            .map(|guest| HOST_TIME.saturating_add(guest)),
        stdin: stdin.as_ref().map(|stdin| stdin.as_fd()),
        signals: Some(MachineSignals {
            socket: theirs.as_fd(),
            is_ready: &is_ready,
        }),
    }
    .run(&mut io::stdout(), &mut errors);
    drop(ready.shutdown(std::net::Shutdown::Both));
    drop(signals.join());
    let report = report?;

    if let Ending::Failed { message, .. } = report.ending {
        return Err(GuestError::Failed(message).into());
    }
    let mut collected = report.collected.into_iter();
    let summary = match collected.next() {
        Some(Collected::File(text)) => serde_json::from_slice::<Summary>(&text).ok(),
        _ => None,
    };
    match summary {
        Some(mut summary) => {
            summary.guest = "emulated".to_owned();
            summary.seconds = start.elapsed().as_secs_f64();
            Ok(Ended {
                status: report.ending.status(),
                summary,
                collected: collected.collect(),
                is_absence_said: true,
            })
        }
        None if errors.report_a_triple_fault() => Err(RunError::EmulatedProcessor),
        None if errors.report_the_reason() => Err(RunError::Said(report.ending.status())),
        None => match report.ending {
            // A signal that came before the program started.
            Ending::Signalled(_) => Err(RunError::Said(report.ending.status())),
            ending => Err(RunError::Inner(ending.status())),
        },
    }
}

/// Passes signals on once the machine listens, which `is_ready` tells, until the socket is shut down. Before that there is
/// no program, and signals end this process, and QEMU with it.
fn pass(
    signals: Signals,
    mut stream: UnixStream,
    options: &Options,
    is_ready: Arc<AtomicBool>,
    phases: Phases,
) -> io::Result<JoinHandle<()>> {
    let (grace, has_terminal) = (Duration::from_secs(options.grace), options.tty);
    tasks::spawn("pass", move || {
        let mut word = [0];
        let mut passing = None;
        // A restarted machine sends the byte again.
        while matches!(stream.read(&mut word), Ok(1)) {
            is_ready.store(true, Ordering::Relaxed);
            phases.begin("booting the guest in the emulated host, and then the program");
            let Ok(to) = stream.try_clone() else { break };
            drop(passing.take());
            passing = Some(signals.to(to_machine(to, has_terminal, grace, || {
                std::process::exit(i32::from(KILLED));
            })));
        }
        drop(passing);
    })
}
