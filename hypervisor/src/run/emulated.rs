//! Placement `host` on the emulated host: a QEMU machine with emulated virtualization, in which the
//! same command runs the program in a guest of that machine's KVM.

use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use wormhole_images::{
    DiskFile, EmulatedHost, Ending, HOST_FILES, HostRun, Image, TapFile, host_overlay,
};
use wormhole_link::tasks;
use wormhole_monitor::{DiskAccess, MacAddress};

use crate::installation::Installation;
use crate::say;
use crate::signals::{KILLED, Signals, to_machine};

use super::files::HostFiles;
use super::guest::GuestError;
use super::network::{self, NetworkError};
use super::summary::Summary;
use super::{LIBRARY_PATH, Options, RunError, images, not_executed};

/// File to which the inner command writes its summary.
const SUMMARY: &str = "/run/summary.json";
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
    why: Option<&str>,
) -> Result<(u8, Summary), RunError> {
    let start = Instant::now();
    let disks = options.disks()?;
    let networks = network::open(&options.network)?;
    let folder = images(installation)?;
    let kernel = options.kernel().into();
    let host = Image::emulated_host(&folder, wormhole_images::Kernel::V6_1)?;
    let mut arguments: Vec<std::ffi::OsString> = [
        "run",
        "--placement",
        "host",
        "--host",
        "kvm",
        "--quiet",
        "--json",
        SUMMARY,
    ]
    .map(Into::into)
    .to_vec();
    for (flag, value) in [
        ("--device", options.device.device.clone()),
        ("--kernel", options.kernel().to_string()),
        ("--window", options.window.to_string()),
        ("--memory", options.memory().to_string()),
        ("--cpus", options.cpus().to_string()),
        ("--timeout", options.timeout().to_string()),
        ("--grace", options.grace.to_string()),
    ] {
        arguments.extend([flag.into(), value.into()]);
    }
    for file in &options.take {
        arguments.extend(["--take".into(), file.into()]);
    }
    let has_files = options.rootfs.is_some();
    if has_files {
        let directory = options.directory()?;
        let name = options.arguments(program).swap_remove(0);
        arguments.extend(["--rootfs".into(), HOST_FILES.into()]);
        arguments.extend(["--workdir".into(), directory.into()]);
        // The name may begin with a dash, as a login shell's.
        arguments.push([OsStr::new("--argv0="), &name].join(OsStr::new("")));
    }
    let given = match has_files {
        true => options.variables(),
        false => options.env.clone(),
    };
    for (name, value) in &given {
        arguments.extend([
            "--env".into(),
            [name.as_os_str(), value].join(OsStr::new("=")),
        ]);
    }
    if options.prefault {
        arguments.push("--prefault".into());
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
    // QEMU bridges the machine's taps with those of this host.
    for (number, (option, network)) in options.network.iter().zip(&networks).enumerate() {
        let value = format!("tap=tap{number},mac={},{}", network.mac, option.guest);
        arguments.extend(["--network".into(), value.into()]);
    }
    arguments.extend(["--".into(), program.into()]);
    arguments.extend(options.command[1..].iter().cloned());

    // The outer overlay looks for the program's libraries in these folders.
    let mut variables = super::forwarded_variables();
    let paths = options.env.iter().filter(|(name, _)| name == LIBRARY_PATH);
    variables.extend(paths.cloned());
    let programs = match has_files {
        true => Vec::new(),
        false => std::iter::once(program.to_path_buf())
            .chain(options.take.iter().cloned())
            .collect(),
    };
    let files = options.rootfs.as_ref().map(|folder| {
        let program = installation.files()?;
        Ok::<_, RunError>(HostFiles::new(program, folder.clone()))
    });
    let files = files.transpose()?;
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
        guest: Image::guest(&folder, kernel)?,
        guest_kernel: kernel,
        arguments,
        variables,
        stdin: options.interactive,
        programs,
        has_files,
        taps: networks.len(),
        collect: vec![SUMMARY.into()],
    })
    .map_err(|error| not_executed(program, error))?;
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
    let signals =
        pass(signals.clone(), ours, Duration::from_secs(options.grace)).map_err(failed)?;
    let stdin = options
        .interactive
        .then(super::standard_input)
        .transpose()?;
    let taps = networks
        .iter()
        .map(|network| {
            Ok(TapFile {
                file: network.tap.file().as_fd(),
                mac: MacAddress::random()
                    .map_err(NetworkError::Random)?
                    .to_string(),
            })
        })
        .collect::<Result<Vec<_>, NetworkError>>()?;
    let mut errors = Errors::default();
    let report = EmulatedHost {
        image: &host,
        overlay: &overlay,
        memory: HOST_MEMORY
            .saturating_add(options.memory().0)
            .saturating_add(options.window.0),
        processors: PROCESSORS,
        disks: &disks
            .iter()
            .map(|disk| DiskFile {
                file: disk.as_fd(),
                writable: disk.access() == DiskAccess::ReadWrite,
            })
            .collect::<Vec<_>>(),
        taps: &taps,
        files: files.as_ref().map(|files| files as _),
        timeout: HOST_TIME.saturating_add(Duration::from_secs(options.timeout())),
        stdin: stdin.as_ref().map(|stdin| stdin.as_fd()),
        signals: Some(theirs.as_fd()),
    }
    .run(&mut io::stdout(), &mut errors);
    drop(ready.shutdown(std::net::Shutdown::Both));
    drop(signals.join());
    let report = report?;

    if let Ending::Failed { message, .. } = report.ending {
        return Err(GuestError::Failed(message).into());
    }
    let summary = report
        .files
        .iter()
        .find(|(path, _)| path == Path::new(SUMMARY))
        .and_then(|(_, text)| serde_json::from_slice::<Summary>(text).ok());
    match summary {
        Some(mut summary) => {
            summary.guest = "emulated".to_owned();
            summary.seconds = start.elapsed().as_secs_f64();
            Ok((report.ending.status(), summary))
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

/// Passes signals on once the machine listens, until the socket is shut down. Before that there is
/// no program, and signals end this process, and QEMU with it.
fn pass(signals: Signals, mut stream: UnixStream, grace: Duration) -> io::Result<JoinHandle<()>> {
    tasks::spawn("pass", move || {
        let mut word = [0];
        let mut passing = None;
        // A restarted machine sends the byte again.
        while matches!(stream.read(&mut word), Ok(1)) {
            let Ok(to) = stream.try_clone() else { break };
            drop(passing.take());
            passing = Some(signals.to(to_machine(to, grace, || {
                std::process::exit(i32::from(KILLED));
            })));
        }
        drop(passing);
    })
}
