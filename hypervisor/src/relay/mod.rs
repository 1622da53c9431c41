//! `wormhole relay`: the program of a backend VM, which stands between its supervisor and the launcher outside.
//!
//! Descriptors cannot leave a VM. So the relay adds the window, which is a device of this VM, to the launcher's message that
//! attaches it, and carries each control stream of a guest over a connection of its own. It reads nothing that passes over
//! them.
//!
//! With `--shared` it does so for [several tenants](slots) of one supervisor.

mod driver;
mod slots;

use std::env;
use std::fs::File;
use std::io::{self, Write};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::Arc;

use clap::Args;
use wormhole_connect::connect_vsock;
use wormhole_images::ports;
use wormhole_link::arguments::USAGE;
use wormhole_link::operator::OperatorOptions;
use wormhole_link::tasks;
use wormhole_ring::control::{Message, Refusal};

use self::driver::DriverError;
use crate::backend::{BackendError, receive, send, start_supervisor};
use crate::backend_vm::has_gpu;
use crate::carrying::Places;
use crate::device::DeviceOption;
use crate::installation::Installation;
use crate::say;

/// Variable with the devices of windows, separated by colons, which the first process of the VM sets.
const WINDOW: &str = "WORMHOLE_WINDOW";

/// Identity of this boot of the kernel.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// vsock address of the host.
const HOST: u32 = libc::VMADDR_CID_HOST;

#[derive(Debug, Args)]
pub struct Options {
    #[command(flatten)]
    device: DeviceOption,
    /// Serve a tenant in each window.
    #[arg(long)]
    shared: bool,
    #[command(flatten)]
    operator: OperatorOptions,
}

/// Reason why a window is not served, or not any more.
#[derive(Debug, thiserror::Error)]
pub enum RelayError {
    #[error("cannot open the window {}", path.display())]
    Window {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot tell which boot this is")]
    Boot(#[source] io::Error),
    #[error("cannot reach the launcher outside this VM")]
    Launcher(#[source] io::Error),
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error(transparent)]
    Backend(#[from] BackendError),
    #[error("cannot reach the supervisor")]
    Supervisor(#[source] io::Error),
    #[error("the folder of cgroups cannot be mounted")]
    Cgroups(#[source] io::Error),
    #[error("the launcher's stream has brought no tenant")]
    NoTenant,
    #[error("a thread of the relay cannot be made")]
    Thread(#[source] io::Error),
    #[error("the end of the supervisor cannot be awaited")]
    Wait(#[source] io::Error),
    #[error("the supervisor failed ({0})")]
    Failed(ExitStatus),
}

impl RelayError {
    /// Returns whether the process that failed has printed the cause already.
    pub fn is_said(&self) -> bool {
        matches!(self, Self::Failed(status) if status.code() == Some(USAGE.into()))
    }
}

/// Serves until the launcher ends the tenant, or the supervisor ends.
pub fn run(options: &Options) -> Result<(), RelayError> {
    let windows = env::var_os(WINDOW).unwrap_or_default();
    let windows: Vec<PathBuf> = env::split_paths(&windows).collect();
    if has_gpu(&options.device) {
        let driver = driver::load()?;
        say::line(format_args!("driver {} is loaded", driver.version));
    }
    if options.shared {
        say_boot()?;
        return slots::run(options, windows);
    }
    let path = windows.into_iter().next().unwrap_or_default();
    let window = File::options().read(true).write(true).open(&path);
    let window = window.map_err(|source| RelayError::Window { path, source })?;
    say_boot()?;
    let installation = Installation::locate().map_err(BackendError::from)?;
    let (mut supervisor, tenant) = start_supervisor(&installation, &options.device.device)?;
    let launcher = connect_vsock(HOST, ports::TENANT).map_err(RelayError::Launcher)?;
    let (launcher, tenant) = (Arc::new(launcher), Arc::new(tenant));
    let down = {
        let (launcher, tenant) = (Arc::clone(&launcher), Arc::clone(&tenant));
        move || {
            if let Err(error) = pass_orders(&launcher, &tenant, window.as_raw_fd()) {
                say::line(format_args!("the launcher's orders end: {error}"));
            }
            drop(tenant.shutdown(Shutdown::Write));
        }
    };
    tasks::spawn("orders", down).map_err(RelayError::Thread)?;
    let outside = || connect_vsock(HOST, ports::CONTROL);
    let passed = pass_answers(&tenant, &launcher, &outside, &Places::of_one_among(1));
    drop(tenant.shutdown(Shutdown::Both));
    drop(launcher.shutdown(Shutdown::Write));
    let status = supervisor.wait().map_err(RelayError::Wait)?;
    match status.success() {
        true => Ok(passed?),
        false => Err(RelayError::Failed(status)),
    }
}

/// Says which boot this is.
fn say_boot() -> Result<(), RelayError> {
    let boot = std::fs::read_to_string(BOOT_ID).map_err(RelayError::Boot)?;
    let mut output = io::stdout();
    let said = output.write_all(boot.as_bytes());
    said.and_then(|()| output.flush())
        .map_err(RelayError::Launcher)
}

/// Passes the launcher's messages on until it closes its direction.
fn pass_orders(
    launcher: &UnixStream,
    tenant: &UnixStream,
    window: RawFd,
) -> Result<(), BackendError> {
    let mut body = Vec::new();
    while let Some((message, _)) = receive(launcher, &mut body)? {
        match message {
            Message::Attach(_) => send(tenant, &message, &[window])?,
            message => send(tenant, &message, &[])?,
        }
    }
    Ok(())
}

/// Passes the supervisor's messages on until it closes its direction. A control stream gets a connection to the launcher
/// before the launcher reads of it.
fn pass_answers(
    tenant: &UnixStream,
    launcher: &UnixStream,
    outside: &impl Fn() -> io::Result<UnixStream>,
    places: &Places,
) -> Result<(), BackendError> {
    let mut body = Vec::new();
    while let Some((message, file)) = receive(tenant, &mut body)? {
        let carried = match (&message, file) {
            (Message::Stream(_), Some(file)) => places.carry(OwnedFd::from(file).into(), outside),
            _ => Ok(()),
        };
        match carried {
            Ok(()) => send(launcher, &message, &[])?,
            Err(error) => {
                let reason = format!("the backend VM cannot carry it: {error}");
                let refused = Message::Refused {
                    code: Refusal::Quota as u32,
                    reason: &reason,
                };
                send(launcher, &refused, &[])?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use wormhole_ring::control::{Attach, Stream};

    use super::*;

    #[test]
    fn the_window_comes_with_the_message_that_attaches_it_and_with_no_other() {
        let (launcher, outside) = UnixStream::pair().unwrap();
        let (tenant, supervisor) = UnixStream::pair().unwrap();
        let window = tempfile::tempfile().unwrap();
        window.set_len(4096).unwrap();
        let orders = [
            Message::Stream(Stream { local: 0 }),
            Message::Attach(Attach::default()),
        ];
        for order in &orders {
            send(&launcher, order, &[]).unwrap();
        }
        drop(launcher);
        pass_orders(&outside, &tenant, window.as_raw_fd()).unwrap();
        drop(tenant);
        let mut body = Vec::new();
        let mut sizes = Vec::new();
        while let Some((_, file)) = receive(&supervisor, &mut body).unwrap() {
            sizes.push(file.map(|file| file.metadata().unwrap().len()));
        }
        assert_eq!(sizes, [None, Some(4096)]);
    }

    #[test]
    fn a_control_stream_that_cannot_leave_the_vm_is_refused() {
        let (tenant, supervisor) = UnixStream::pair().unwrap();
        let (launcher, mut outside) = UnixStream::pair().unwrap();
        let (mut guest, stream) = UnixStream::pair().unwrap();
        let message = Message::Stream(Stream { local: 0 });
        send(&supervisor, &message, &[stream.as_raw_fd()]).unwrap();
        drop((supervisor, stream));
        let unreachable = || Err(io::ErrorKind::ConnectionRefused.into());
        pass_answers(&tenant, &launcher, &unreachable, &Places::of_one_among(1)).unwrap();
        drop(launcher);
        let mut body = Vec::new();
        let (answer, _) = receive(&outside, &mut body).unwrap().expect("an answer");
        assert!(matches!(answer, Message::Refused { .. }), "{answer:?}");
        assert_eq!(outside.read(&mut [0]).unwrap(), 0);
        // Its end is closed.
        assert_eq!(guest.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn a_guest_has_a_share_of_the_streams_and_none_that_the_supervisor_has_ended() {
        let places = Arc::new(Places::of_one_among(64));
        let (tenant, supervisor) = UnixStream::pair().unwrap();
        let (launcher, outside) = UnixStream::pair().unwrap();
        let most = places.most();
        let left = Arc::clone(&places);
        let (keep, kept) = std::sync::mpsc::channel();
        let passing = std::thread::spawn(move || {
            let connect = || {
                let (theirs, ours) = UnixStream::pair()?;
                keep.send(theirs).map_err(io::Error::other)?;
                Ok(ours)
            };
            pass_answers(&tenant, &launcher, &connect, &places).unwrap();
        });
        let mut body = Vec::new();
        let mut open = |ends: &mut Vec<UnixStream>| {
            let (ours, stream) = UnixStream::pair().unwrap();
            let message = Message::Stream(Stream { local: 0 });
            send(&supervisor, &message, &[stream.as_raw_fd()]).unwrap();
            ends.push(ours);
            let (answer, _) = receive(&outside, &mut body).unwrap().expect("an answer");
            matches!(answer, Message::Stream(_))
        };
        let mut ends = Vec::new();
        for _ in 0..most {
            assert!(open(&mut ends));
        }
        assert!(!open(&mut ends), "one more than its share");
        // The supervisor ends them. The guest keeps its ends.
        drop(ends.drain(..));
        while !left.are_free() {
            std::thread::yield_now();
        }
        assert!(open(&mut ends));
        drop((supervisor, ends));
        passing.join().unwrap();
        assert_eq!(kept.iter().count(), most + 1);
    }
}
