//! The process of a guest: boots it, and stays until it ends.

use std::fs::File;
use std::io::{self, PipeWriter, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::io::ioctl_fionbio;
use rustix::stdio::dup2_stdout;
use wormhole_images::ports;
use wormhole_link::{chain, tasks};
use wormhole_lock::Mutex;
use wormhole_monitor::{
    ConnectRequest, ConsoleInput, ExitReason, PowerButton, Refused, Start, StopHandle, Vm,
    VmConfig, VsockConfig,
};

use super::attendant::{Attendant, Attended};
use super::machine;
use super::start::{Options, Planned, hold};
use super::{END, GuestsError, Held, Place, snapshot};
use crate::backend::Backend;
use crate::cgroup;
use crate::file_memory::FileMemory;
use crate::installation::Installation;
use crate::places::{Process, Record, notify};
use crate::run::confinement;
use crate::run::guest::{GUEST_CID, GuestError};
use crate::run::{Disk, RunError, Size, open_backend, resources};
use crate::say;
use crate::signals::{Grace, KILLED, Receiver, Signal, Signals};

/// Exit status for a guest that reset itself.
const RESET: u8 = 3;
/// Exit status for a guest whose kernel panicked or ran out of memory.
const PANICKED: u8 = 4;

/// Time between two presses of the power button: a guest that boots misses the first ones.
const PRESSED_AGAIN: Duration = Duration::from_secs(1);

/// A guest's folder while the guest is made: removed on drop, also by its attendant.
struct Home {
    held: Option<Held>,
    attendant: Option<Attendant>,
}

impl Drop for Home {
    fn drop(&mut self) {
        match (self.held.take(), self.attendant.take()) {
            (Some(held), None) => held.remove(),
            // The attendant finds the folder free.
            (held, attendant) => {
                drop(held);
                drop(attendant);
            }
        }
    }
}

/// A guest that is ready to run.
struct Guest {
    vm: Vm,
    backend: Backend,
    /// Keys of a person who is attached to the console.
    input: UnixStream,
    /// Connections of commands that save the guest.
    connections: UnixStream,
    /// The console's output for standard output, in the foreground.
    output: Option<io::PipeReader>,
    /// The file for the sentence with which the guest ends, in the background.
    end: Option<File>,
}

/// Runs the guest, and returns its exit status when it has ended.
pub fn run(options: &Options) -> Result<u8, GuestsError> {
    let signals = Signals::take(&[]).map_err(|source| RunError::Io {
        what: "the thread that takes signals cannot be made".to_owned(),
        source,
    })?;
    let planned = options.plan()?;
    let place = Place::own(options.name.clone())?;
    // In the background the starter holds the folder.
    let held = options.foreground.then(|| hold(&place)).transpose()?;
    let mut home = Home {
        held,
        attendant: None,
    };
    if let (Some(held), Some(process)) = (&home.held, Process::of(std::process::id())) {
        held.write(&Record::new(process, options.facts(&planned.machine)))?;
    }
    let guest = make(options, planned, &place, &mut home)?;
    home.held = None;
    match options.foreground {
        true => notify(),
        false => leave_starter().map_err(|source| GuestsError::Start {
            name: place.name.clone(),
            source,
        })?,
    }
    let mut end = guest.end.as_ref().and_then(|end| end.try_clone().ok());
    let status = until_its_end(options, guest, &signals);
    let sentence = match &status {
        Ok((_, sentence)) => sentence.clone(),
        Err(error) => Some(chain(error)),
    };
    if let (Some(sentence), Some(end)) = (sentence, &mut end) {
        let _ = end.write_all(sentence.as_bytes());
    }
    drop(home);
    Ok(status?.0)
}

/// Makes the guest's machine.
fn make(
    options: &Options,
    planned: Planned,
    place: &Place,
    home: &mut Home,
) -> Result<Guest, GuestsError> {
    let Planned { mut machine, start } = planned;
    let disks = Disk::open(&machine.disks()).map_err(RunError::from)?;
    let networks = machine.open_networks()?;
    let installation = Installation::locate()?;
    let mut backend = open_backend(
        &installation,
        options.backend.as_ref(),
        &options.device.device,
        Size(machine.window),
    )?;
    if let Some(chosen) = &options.backend {
        backend
            .stay(&installation, chosen)
            .map_err(RunError::from)?;
    }
    let file_memory = match &start {
        Start::Boot(_) => {
            machine.files = FileMemory::usual(machine.memory, &backend);
            FileMemory::open(machine.files, &mut backend)
        }
        Start::Restore(_) => FileMemory::open_empty(machine.files, &mut backend),
    }?;
    // A guest that takes this process over later cannot change it.
    let path = place.file(machine::FILE);
    let written = machine.write(&path);
    written.map_err(|source| GuestsError::Write { path, source })?;
    let window = backend.window().try_clone();
    let window = window.map_err(|source| RunError::Io {
        what: "cannot share the window with the guest".to_owned(),
        source,
    })?;
    let attended = |source| GuestsError::Attendant {
        name: place.name.clone(),
        source,
    };
    let started = Attendant::start(&installation, &place.name).map_err(attended)?;
    let Attended {
        attendant,
        input,
        connections,
    } = started;
    let sink = attendant.sink().map_err(attended)?;
    home.attendant = Some(attendant);
    let (output, own) = match options.foreground {
        true => pipe().map(|(output, own)| (Some(output), Some(own))),
        false => Ok((None, None)),
    }
    .map_err(attended)?;
    let path = place.file(END);
    let end = match options.foreground {
        true => None,
        false => {
            let file = create_end(&path);
            Some(file.map_err(|source| GuestsError::Write { path, source })?)
        }
    };
    let control = backend.streams().map_err(RunError::from)?;
    let memory =
        machine.memory + machine.files + machine.window + Disk::bytes_in_memory(&machine.disks());
    cgroup::enter(&installation, Some(memory));
    wormhole_monitor::confinement::leave_namespaces();
    let vm = Vm::new(VmConfig {
        start,
        memory_mib: machine.memory >> 20,
        vcpus: machine.cpus,
        window: Some(window.into()),
        file_memory: file_memory.map(FileMemory::into_file),
        vsock: Some(VsockConfig {
            guest_cid: GUEST_CID,
            acceptor: Box::new(move |request: ConnectRequest| match request.port {
                ports::CONTROL => control.open(),
                _ => Err(Refused),
            }),
        }),
        file_systems: Vec::new(),
        disks,
        networks,
        passed_through: Vec::new(),
        prefault: machine.prefault,
        console: Box::new(Sinks {
            attendant: sink,
            own,
        }),
        timeout: None,
        disabled_exits: resources::disabled_exits(options.dedicated)
            .map_err(|error| RunError::from(GuestError::from(error)))?,
        pins: options.pin.iter().flat_map(|pin| pin.0.clone()).collect(),
        server: None,
    })
    .map_err(|error| RunError::from(GuestError::from(error)))?;
    Ok(Guest {
        vm,
        backend,
        input,
        connections,
        output,
        end,
    })
}

/// Makes the file for the sentence with which the guest ends: for its user alone, since it may quote the guest.
fn create_end(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.write(true).create(true).truncate(true).mode(0o600);
    options.open(path)
}

/// Lets the starter go: the guest runs.
fn leave_starter() -> io::Result<()> {
    let mut stdout = io::stdout();
    stdout.write_all(b"!").and_then(|()| stdout.flush())?;
    dup2_stdout(File::options().write(true).open("/dev/null")?)?;
    // The process keeps no folder of its starter in use.
    std::env::set_current_dir("/")
}

/// Runs the guest. Returns its exit status, and the sentence of a guest that failed.
fn until_its_end(
    options: &Options,
    guest: Guest,
    signals: &Signals,
) -> Result<(u8, Option<String>), RunError> {
    let Guest {
        mut vm,
        mut backend,
        input,
        connections,
        output,
        ..
    } = guest;
    // All files are open by now, and all processes are started.
    confinement::enter().map_err(GuestError::from)?;
    backend.tell_exits(vm.stats());
    backend.listen(vm.window().map(|window| (window, vm.stop_handle())))?;
    let passing = signals.to(presser(vm.power_button(), vm.stop_handle()));
    let connected = |source| RunError::Io {
        what: "a thread of the guest's console or snapshots cannot be made".to_owned(),
        source,
    };
    let shown = output.map(|output| tasks::spawn("console-output", move || show(output)));
    let shown = shown.transpose().map_err(connected)?;
    if let Some(console) = vm.take_console_input() {
        // The threads are never joined: they end with their input, with the guest, or with this process.
        let console = Typed(Arc::new(Mutex::new(console)));
        if options.foreground {
            let console = console.clone();
            tasks::spawn("console-input", move || {
                type_in(io::stdin().lock(), console)
            })
            .map_err(connected)?;
        }
        tasks::spawn("attached-input", move || type_in(input, console)).map_err(connected)?;
    }
    let is_saved = Arc::new(AtomicBool::new(false));
    let server = snapshot::Server {
        attendant: connections,
        snapshots: vm.snapshot_handle(),
        is_saved: Arc::clone(&is_saved),
    };
    tasks::spawn("snapshots", move || server.run()).map_err(connected)?;
    let report = vm.run().map_err(GuestError::from)?;
    // A blocked reader of the output does not keep this process from a signal.
    drop(passing);
    drop(shown.map(std::thread::JoinHandle::join));
    let served = backend.finish();
    let status = match is_saved.load(Ordering::SeqCst) {
        true => 0,
        false => status(&report.outcome)?,
    };
    if status != 0 {
        say::line(format_args!("guest {}: {}", options.name, report.outcome));
    }
    if let Some(failure) = served.failure {
        say::line(format_args!(
            "the backend of guest {} failed: {failure}",
            options.name
        ));
    }
    let failed = matches!(status, RESET | PANICKED);
    Ok((status, failed.then(|| report.outcome.to_string())))
}

/// Returns a receiver of signals that presses the power button until the guest has ended, and ends the guest at a second
/// request.
fn presser(button: PowerButton, stop: StopHandle) -> Receiver {
    let mut grace = Grace::new(Duration::MAX);
    let mut is_asked = false;
    Box::new(move |signal: Option<Signal>| {
        let now = Instant::now();
        if let Some(signal @ (libc::SIGHUP | libc::SIGINT | libc::SIGTERM)) = signal {
            is_asked = true;
            if grace.count(signal, now).is_some() {
                stop.stop();
            }
        }
        if !is_asked {
            return None;
        }
        button.press();
        Some(now + PRESSED_AGAIN)
    })
}

/// Returns the exit status for the end of a guest.
fn status(outcome: &ExitReason) -> Result<u8, RunError> {
    match outcome {
        // A guest without a program has no status to write, and a written one is no failure of the guest.
        ExitReason::PoweredOff | ExitReason::Exited { .. } => Ok(0),
        ExitReason::Reset => Ok(RESET),
        ExitReason::Panicked { .. } | ExitReason::OutOfMemory { .. } => Ok(PANICKED),
        ExitReason::Stopped => Ok(KILLED),
        outcome => Err(GuestError::Ended {
            outcome: outcome.clone(),
            tail: Vec::new(),
        }
        .into()),
    }
}

/// Returns a pipe. While it is full, its writer does not wait, and bytes that do not fit are lost.
fn pipe() -> io::Result<(io::PipeReader, PipeWriter)> {
    let (reader, writer) = io::pipe()?;
    ioctl_fionbio(&writer, true)?;
    Ok((reader, writer))
}

/// The console's sinks. Each takes what it has room for.
struct Sinks {
    attendant: File,
    own: Option<PipeWriter>,
}

impl Write for Sinks {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _ = self.attendant.write_all(bytes);
        let _ = self.own.as_mut().map(|own| own.write_all(bytes));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Copies the console's output to standard output, without waiting for whole lines.
fn show(mut output: io::PipeReader) {
    let mut bytes = [0; 4096];
    let mut stdout = io::stdout();
    while let Ok(count @ 1..) = output.read(&mut bytes) {
        // A closed output does not end the guest.
        let _ = stdout
            .write_all(&bytes[..count])
            .and_then(|()| stdout.flush());
    }
}

/// The console's input, from the foreground and from a person who is attached.
#[derive(Clone)]
struct Typed(Arc<Mutex<ConsoleInput>>);

impl Write for Typed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Copies bytes to the console. Ends with them, or with the guest.
fn type_in(mut from: impl Read, mut to: Typed) {
    let _ = io::copy(&mut from, &mut to);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exit_status_tells_how_a_guest_ended() {
        let line = String::new();
        let code = |outcome| status(&outcome).ok();
        assert_eq!(code(ExitReason::PoweredOff), Some(0));
        assert_eq!(code(ExitReason::Exited { status: 7 }), Some(0));
        assert_eq!(code(ExitReason::Reset), Some(RESET));
        let panic = ExitReason::Panicked { line: line.clone() };
        assert_eq!(code(panic), Some(PANICKED));
        assert_eq!(code(ExitReason::OutOfMemory { line }), Some(PANICKED));
        assert_eq!(code(ExitReason::Stopped), Some(KILLED));
        let failed = ExitReason::RunFailed {
            vcpu: 0,
            error: String::new(),
        };
        assert_eq!(code(failed), None);
    }

    #[test]
    fn other_users_do_not_read_how_a_guest_ended() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().expect("a folder");
        let file = create_end(&folder.path().join(END)).expect("a file");
        let mode = file.metadata().expect("it is open").permissions().mode();
        assert_eq!(mode & 0o7777 & !0o600, 0);
    }

    #[test]
    fn a_console_that_no_one_reads_does_not_hold_up_the_guest() {
        let (output, mut sink) = pipe().expect("a pipe");
        let written = sink.write_all(&vec![b'x'; 1 << 20]);
        let error = written.expect_err("the sink is full");
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        drop(output);
    }
}
