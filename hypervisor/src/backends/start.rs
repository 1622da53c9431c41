//! `wormhole backend start`: starts a supervisor, or a VM with one, and leaves it, or stays with it.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use clap::Args;
use rustix::process::{Pid, kill_process};
use wormhole_link::arguments::USAGE;
use wormhole_link::operator::OperatorOptions;

use super::{BackendsError, DEFAULT, END_LIMIT, Facts, Held, Place, Placement, connect_to};
use crate::backend::{Backend, BackendError};
use crate::backend_vm::{Unserved, VmOptions, read_boot_id};
use crate::config::ConfigOption;
use crate::device::DeviceOption;
use crate::installation::Installation;
use crate::phases::Phases;
use crate::places::{Detached, Name, Process, Record, last_line, notify};
use crate::say;
use crate::signals::Set;

#[derive(Debug, Args)]
pub struct Options {
    /// The backend's name.
    #[arg(default_value = DEFAULT)]
    name: Name,
    /// Placement of the backend.
    #[arg(long, value_enum, default_value = "host")]
    placement: Placement,
    #[command(flatten)]
    device: DeviceOption,
    #[command(flatten)]
    operator: OperatorOptions,
    #[command(flatten)]
    vm: VmOptions,
    /// Stay until the backend ends, with its log on standard error. SIGTERM, SIGINT and SIGHUP stop it. A service
    /// manager is notified when it serves (sd_notify(3)).
    #[arg(long)]
    foreground: bool,
    #[command(flatten)]
    config: ConfigOption,
}

/// Window of the tenant that asks whether the device works.
const PROBE: u64 = 8 << 20;
/// Time in which a supervisor that has closed its socket gives its reason.
const LAST_WORDS: Duration = Duration::from_secs(10);
/// Time within which a backend VM that serves says which boot it is.
const BOOT_LIMIT: Duration = Duration::from_secs(10);
/// Interval between looks for the supervisor's socket.
const AGAIN: Duration = Duration::from_millis(5);
/// Signals that end a backend in the foreground.
const ENDING: [libc::c_int; 3] = [libc::SIGHUP, libc::SIGINT, libc::SIGTERM];

/// Starts a backend. Returns when it serves, or when it has ended.
pub fn run(options: &Options) -> Result<(), BackendsError> {
    options.check()?;
    let installation = Installation::locate()?;
    let place = Place::own(options.name.clone())?;
    let held = place.hold()?;
    if let Some(Record { process, .. }) = place.running()? {
        return Err(BackendsError::Running {
            name: place.name,
            pid: process.pid,
        });
    }
    let watched = Set::of(&[&ENDING[..], &[libc::SIGCHLD]].concat());
    if options.foreground {
        watched.block();
    }
    let mut serving = ServingProcess::start(options, &installation, &place, &held, watched)?;
    let phase = Phases::of(match options.placement {
        Placement::Host => "starting the backend",
        Placement::Vm => "booting the backend VM",
    });
    let serves = serving.serves(options, &place, &held);
    drop(phase);
    if let Err(error) = serves {
        let error = serving.reason(options, &place, error);
        held.remove();
        return Err(error);
    }
    if !options.foreground {
        say::result(format_args!(
            "backend {0} serves: `wormhole run --backend {0} PROGRAM`; its log is {1}",
            place.name,
            place.log().display()
        ));
        return Ok(());
    }
    drop(held);
    let process = Process::of(serving.0.id());
    notify();
    let ended = serving.attend(&watched);
    // Another command may have stopped the backend and removed its folder, and one may have started a
    // later backend of this name.
    if let (Ok(held), Some(process)) = (place.hold(), process)
        && held.is_of(process)
    {
        held.remove();
    }
    match ended {
        Ok(status) if is_right(options.placement, status) => Ok(()),
        Ok(status) => Err(BackendsError::Failed(place.name, status)),
        Err(error) => Err(BackendsError::Start(error)),
    }
}

/// Returns whether a backend ended as it should. The process of a VM ends by the signal that asks for its end.
fn is_right(placement: Placement, status: ExitStatus) -> bool {
    status.success() || placement == Placement::Vm && status.signal() == Some(libc::SIGTERM)
}

impl Options {
    /// Refuses options that are impossible, or that would have no effect.
    fn check(&self) -> Result<(), BackendsError> {
        self.operator.check()?;
        match self.placement {
            Placement::Host => {
                let given = self.vm.given();
                if !given.is_empty() {
                    return Err(Unserved::NoVm(given).into());
                }
            }
            Placement::Vm => {
                self.vm.check_device(&self.device)?;
                self.vm.check()?;
                if !self.operator.tenant_user.is_empty() {
                    return Err(Unserved::Users.into());
                }
            }
        }
        Ok(())
    }

    /// Returns the command of the process that listens on the place's socket.
    fn command(
        &self,
        installation: &Installation,
        place: &Place,
    ) -> Result<Command, BackendsError> {
        let mut command = match self.placement {
            Placement::Host => {
                let mut command = Command::new(installation.supervisor()?);
                command.arg("--workers").arg(installation.folder());
                command
            }
            Placement::Vm => {
                let mut command = Command::new(installation.command());
                command.arg("backend-vm").args(self.vm.arguments());
                // The process gets few variables, and none that could name the folder.
                if let Some(images) = installation.images() {
                    command.arg("--images").arg(images);
                }
                command
            }
        };
        command
            .args(["--device", &self.device.device])
            .args(self.operator.arguments())
            .arg("--listen")
            .arg(place.socket());
        Ok(command)
    }
}

/// The process that serves: a supervisor, or the monitor of a backend VM.
struct ServingProcess(Child);

impl ServingProcess {
    fn start(
        options: &Options,
        installation: &Installation,
        place: &Place,
        held: &Held,
        watched: Set,
    ) -> Result<Self, BackendsError> {
        let mut command = options.command(installation, place)?;
        command
            .current_dir("/")
            .stdin(Stdio::null())
            // A backend VM says which boot it is. Nothing else is written there.
            .stdout(match options.placement {
                Placement::Host => Stdio::null(),
                Placement::Vm => Stdio::piped(),
            });
        if !options.foreground {
            command.stderr(held.open_log()?);
        }
        let detached = match options.foreground {
            true => Detached::Until,
            false => Detached::Wholly,
        };
        let started = detached.spawn(&mut command, watched);
        started.map(Self).map_err(BackendsError::Start)
    }

    /// Writes the record, and waits until the backend serves a tenant.
    fn serves(
        &mut self,
        options: &Options,
        place: &Place,
        held: &Held,
    ) -> Result<(), BackendsError> {
        let gone = || BackendsError::Start(io::ErrorKind::NotFound.into());
        let process = Process::of(self.0.id()).ok_or_else(gone)?;
        let facts = Facts {
            device: options.device.device.clone(),
            placement: options.placement,
            boot_id: None,
            protocol: wormhole_api::PROTOCOL_HASH,
        };
        let mut record = Record::new(process, facts);
        held.write(&record)?;
        let stream = loop {
            match connect_to(&place.socket()) {
                Ok(stream) => break stream,
                Err(BackendsError::NoListener(_)) if process.lives() => std::thread::sleep(AGAIN),
                Err(error) => return Err(error),
            }
        };
        let unfit = |source| BackendsError::Unfit {
            name: options.name.clone(),
            source,
        };
        let probe = match options.placement {
            Placement::Host => Backend::attach_to(stream, PROBE),
            Placement::Vm => Backend::attach_static(stream, PROBE),
        };
        let mut probe = probe.map_err(unfit)?;
        probe.listen(None).map_err(unfit)?;
        if let Some(error) = probe.finish().failure {
            return Err(unfit(error));
        }
        if let Some(output) = self.0.stdout.take() {
            record.facts.boot_id = Some(read_boot_id(output, BOOT_LIMIT));
            held.write(&record)?;
        }
        Ok(())
    }

    /// Ends the supervisor, and returns the reason why it does not serve: its own, if it gave one.
    fn reason(&mut self, options: &Options, place: &Place, error: BackendsError) -> BackendsError {
        let is_ending = matches!(
            error,
            BackendsError::NoListener(_)
                | BackendsError::Unfit {
                    source: BackendError::Closed,
                    ..
                }
        );
        if let Some(process) = Process::of(self.0.id()) {
            // Fails for no child of this process.
            let _ = match is_ending {
                true => process.end_after(LAST_WORDS, END_LIMIT),
                false => process.end(END_LIMIT),
            };
        }
        let refused = self
            .0
            .wait()
            .is_ok_and(|status| status.code() == Some(USAGE.into()));
        let name = match options.placement {
            Placement::Host => "wormhole-supervisor",
            Placement::Vm => "wormhole: backend VM",
        };
        match last_line(&place.log(), name) {
            _ if !refused => error,
            _ if options.foreground => BackendsError::Said,
            Some(reason) => BackendsError::Ended {
                name: options.name.clone(),
                reason,
            },
            None => error,
        }
    }

    /// Waits for the end of the supervisor, and passes on signals that ask for it.
    fn attend(&mut self, watched: &Set) -> io::Result<ExitStatus> {
        let pid = Pid::from_child(&self.0);
        loop {
            if let Some(status) = self.0.try_wait()? {
                return Ok(status);
            }
            if watched
                .wait(None)
                .is_some_and(|signal| ENDING.contains(&signal))
            {
                // The child has not been waited for, so the number is still its own.
                let _ = kill_process(pid, rustix::process::Signal::TERM);
            }
        }
    }
}
