//! `wormhole guest start`: starts a guest's process and leaves it, or becomes it.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use wormhole_monitor::{BootSource, InitramfsPart, KvmCaps, MAX_VCPUS, Start};

use super::machine::Machine;
use super::{Facts, GuestsError, Held, Place, serve, snapshot};
use crate::backends::Chosen;
use crate::config::ConfigOption;
use crate::device::DeviceOption;
use crate::installation::Installation;
use crate::phases::Phases;
use crate::places::{Detached, Name, Process, Record, last_line};
use crate::run::network::EndOption;
use crate::run::resources::{self, Processors};
use crate::run::{Disk, RunError, Size};
use crate::say;
use crate::signals::Set;

#[derive(Debug, Args)]
pub struct Options {
    /// The guest's name.
    pub name: Name,
    /// Stay until the guest ends, with its serial console on standard input and output. SIGTERM, SIGINT and SIGHUP press
    /// its power button, and a second such signal ends it at once. A service manager is notified when the guest runs
    /// (sd_notify(3)).
    #[arg(long)]
    pub foreground: bool,
    /// The guest's kernel: a bzImage or an uncompressed `vmlinux`.
    #[arg(long, value_name = "FILE", required_unless_present = "restore")]
    kernel: Option<PathBuf>,
    /// The initial RAM disk: a cpio archive, compressed or not.
    #[arg(long, value_name = "FILE")]
    initrd: Option<PathBuf>,
    /// Text behind the kernel's command line, such as `root=/dev/vda1`.
    #[arg(long, value_name = "TEXT")]
    append: Option<String>,
    #[command(flatten)]
    pub device: DeviceOption,
    /// An existing backend, which serves the guest beside others: the name that `backend start` gave it, or
    /// the path of its socket. Without this option the guest has a backend of its own.
    #[arg(long, value_name = "NAME|unix:PATH", conflicts_with = "device")]
    pub backend: Option<Chosen>,
    /// Size of the window: shared memory between guest and backend. Not given, it is as large as the guest's memory, and at
    /// least 258M.
    #[arg(long)]
    pub window: Option<Size>,
    /// Memory of the guest.
    #[arg(long, default_value = "512M")]
    pub memory: Size,
    /// Processors of the guest.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=i64::from(MAX_VCPUS)))]
    pub cpus: u8,
    /// Processors of this machine, one for each of the guest's, which then stays on it.
    #[arg(long, value_name = "CPU[,CPU...]")]
    pub pin: Option<Processors>,
    /// The pinned processors are the guest's alone: it does not leave them when it waits or halts.
    #[arg(long, requires = "pin")]
    pub dedicated: bool,
    /// Allocate the guest's memory before it starts, and its parts of the window when they are granted.
    #[arg(long)]
    pub prefault: bool,
    /// A raw image file, or a block device, as a disk of the guest (`/dev/vda`, then `/dev/vdb` and so on). With `:ro`
    /// behind it the guest can only read it, and several guests can have it at once.
    #[arg(long, value_name = "FILE[:ro]", value_parser = OsStringValueParser::new().try_map(Disk::parse))]
    pub disk: Vec<Disk>,
    /// A network interface of the guest, by passt or on a tap interface of this machine. The guest gives it an address,
    /// by passt with DHCP.
    #[arg(long, value_name = "passt[,mac=MAC]|tap=NAME[,mac=MAC]")]
    pub network: Vec<EndOption>,
    /// Go on from the snapshot that `guest snapshot` has made in this folder, instead of booting. It has the options of the
    /// machine, and its disks must be as they were.
    #[arg(long, value_name = "FOLDER", conflicts_with_all = MACHINE)]
    restore: Option<PathBuf>,
    #[command(flatten)]
    config: ConfigOption,
}

/// Options that a snapshot has.
const MACHINE: [&str; 9] = [
    "kernel", "initrd", "append", "window", "memory", "cpus", "prefault", "disk", "network",
];

/// A guest to be started.
#[derive(Debug)]
pub struct Planned {
    pub machine: Machine,
    pub start: Start,
}

/// The kernel's command line before `--append`: a serial console, and a reset at once after a panic.
const COMMAND_LINE: &str = "console=ttyS0 panic=-1 reboot=k tsc=reliable";

/// Time limit for the end of a guest's process that is being stopped.
pub const END_LIMIT: Duration = Duration::from_secs(30);

/// Exit statuses of `wormhole guest start`, for its help.
pub const STATUSES: &str = "Exit status: 0: the guest runs in the background, or with --foreground switched itself off or ended after \
    `guest snapshot --stop`; 2: wormhole refused or failed. With --foreground also 3: the guest reset itself; 4: its kernel panicked; 137: a \
    second signal ended it.";

impl Options {
    /// Returns the guest to start. Refuses options and snapshots that are impossible, and machines that run no guests.
    pub fn plan(&self) -> Result<Planned, GuestsError> {
        let planned = match &self.restore {
            Some(folder) => {
                let (machine, snapshot) = snapshot::load(folder)?;
                let start = Start::Restore(Box::new(snapshot));
                Planned { machine, start }
            }
            None => Planned {
                machine: Machine::of(self),
                start: Start::Boot(self.boot()),
            },
        };
        self.check(&planned.machine)?;
        Ok(planned)
    }

    fn check(&self, machine: &Machine) -> Result<(), RunError> {
        machine.check()?;
        if let Some(pins) = &self.pin {
            let needs_another = self.dedicated && self.backend.is_none();
            resources::check_processors(pins, machine.cpus.into(), needs_another)?;
        }
        for file in [self.kernel.as_ref(), self.initrd.as_ref()]
            .into_iter()
            .flatten()
        {
            check_file(file)?;
        }
        match wormhole_monitor::probe() {
            KvmCaps::Linux => Ok(()),
            KvmCaps::Denied { why } => Err(RunError::Kvm(why)),
            KvmCaps::Missing { .. } | KvmCaps::PayloadOnly { .. } => Err(RunError::NoLinux),
        }
    }

    pub fn facts(&self, machine: &Machine) -> Facts {
        let device = || self.device.device.clone();
        Facts {
            backend: self.backend.as_ref().map(ToString::to_string),
            device: self.backend.is_none().then(device),
            memory: machine.memory,
            cpus: machine.cpus,
        }
    }

    fn boot(&self) -> BootSource {
        let appended = self.append.iter().map(String::as_str);
        let words: Vec<&str> = std::iter::once(COMMAND_LINE).chain(appended).collect();
        BootSource {
            // There is one where there is no snapshot.
            kernel: self.kernel.clone().unwrap_or_default(),
            initramfs: self
                .initrd
                .iter()
                .cloned()
                .map(InitramfsPart::Path)
                .collect(),
            command_line: words.join(" "),
        }
    }
}

/// Refuses what is no regular file, since reading a pipe or a device could last for ever.
fn check_file(path: &Path) -> Result<(), RunError> {
    let failed = |source| RunError::Io {
        what: format!("cannot read {}", path.display()),
        source,
    };
    match fs::metadata(path).map_err(failed)?.is_file() {
        true => Ok(()),
        false => Err(RunError::NoFile(path.to_owned())),
    }
}

/// Starts a guest. Returns when it runs, or with `--foreground` when it has ended.
pub fn run(options: &Options) -> Result<u8, GuestsError> {
    if options.foreground {
        return serve::run(options);
    }
    let Planned { machine, .. } = options.plan()?;
    let place = Place::own(options.name.clone())?;
    let held = hold(&place)?;
    if let Err(error) = in_background(options, &machine, &place, &held) {
        held.remove();
        return Err(error);
    }
    say::result(format_args!(
        "guest {0} runs: `wormhole guest console {0}` attaches to its console",
        place.name
    ));
    Ok(0)
}

/// Holds the place of a guest that does not run, without files of an earlier one.
pub fn hold(place: &Place) -> Result<Held, GuestsError> {
    let held = place.hold()?;
    if let Some(Record { process, .. }) = place.running()? {
        return Err(GuestsError::Running {
            name: place.name.clone(),
            pid: process.pid,
        });
    }
    held.clear();
    Ok(held)
}

/// Starts the guest's process, and waits until the guest runs.
fn in_background(
    options: &Options,
    machine: &Machine,
    place: &Place,
    held: &Held,
) -> Result<(), GuestsError> {
    let failed = |source| GuestsError::Start {
        name: place.name.clone(),
        source,
    };
    let (mut running, theirs) = io::pipe().map_err(failed)?;
    let mut command = Command::new(Installation::locate()?.command());
    command
        .arg("serve-guest")
        // The options of `guest start`, as they were given.
        .args(std::env::args_os().skip(3))
        .stdin(Stdio::null())
        .stdout(theirs)
        .stderr(held.open_log()?);
    let spawned = Detached::Wholly.spawn(&mut command, Set::of(&[]));
    // The pipe ends with the other process's end of it.
    drop(command);
    let mut process = spawned.map_err(failed)?;
    let recorded = match Process::of(process.id()) {
        Some(process) => held
            .write(&Record::new(process, options.facts(machine)))
            .map_err(GuestsError::from),
        None => Ok(()),
    };
    if let Err(error) = recorded {
        end(&mut process);
        return Err(error);
    }
    let phase = Phases::of("waiting until the guest runs");
    if let Ok(1) = running.read(&mut [0]) {
        return Ok(());
    }
    drop(phase);
    end(&mut process);
    let reason = last_line(&place.log(), "wormhole");
    Err(GuestsError::Ended {
        name: place.name.clone(),
        reason: reason.unwrap_or_else(|| "its process ended without a reason".to_owned()),
    })
}

/// Ends the guest's process, and waits for it.
fn end(process: &mut Child) {
    if let Some(process) = Process::of(process.id()) {
        // Fails for no child of this process.
        let _ = process.end_after(END_LIMIT, END_LIMIT);
    }
    let _ = process.wait();
}
