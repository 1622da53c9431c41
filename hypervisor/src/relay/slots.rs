//! The relay of a backend VM with several slots, each for the window of one tenant.
//!
//! Each slot is a device of this VM. A thread for each slot opens a stream to the launchers outside, which is the slot's
//! offer, and waits for a tenant on it. A tenant's supervisor gets a descriptor of the device that no other tenant gets, so
//! that a worker reaches no other tenant's window.
//!
//! The descriptor is locked (flock(2)). The lock lasts as long as a descriptor or a mapping of any process stems from that
//! opening of the device, also if it is underway in a socket. So the relay acknowledges the end of a tenant when the
//! supervisor has ended the tenant's stream, which it does when all of the tenant's workers are reaped, and the lock can be
//! had again.

use std::fs::{self, File};
use std::io;
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::mount::{MountFlags, mount};
use wormhole_connect::connect_vsock;
use wormhole_images::ports;
use wormhole_link::{chain, raise_descriptor_limit, tasks};
use wormhole_ring::control::{Message, WindowRun};

use super::{HOST, Options, Places, RelayError, pass_answers};
use crate::backend::{BackendError, receive, send};
use crate::installation::Installation;
use crate::say;

/// Socket on which the supervisor listens.
const SUPERVISOR: &str = "/run/supervisor";
/// Folder of the socket.
const FOLDER: &str = "/run";
/// Folder in which the supervisor makes the cgroups of its tenants.
const CGROUPS: &str = "/sys/fs/cgroup";
/// Interval between looks for the supervisor's socket.
const AGAIN: Duration = Duration::from_millis(5);

/// Serves the slots until the supervisor ends.
pub fn run(options: &Options, windows: Vec<PathBuf>) -> Result<(), RelayError> {
    mount("none", CGROUPS, "cgroup2", MountFlags::empty(), None)
        .map_err(|error| RelayError::Cgroups(error.into()))?;
    // If it is neither there nor can be made, the supervisor says so.
    let _ = fs::create_dir(FOLDER);
    let mut supervisor = start_supervisor(options)?;
    // Each control stream takes some. With fewer, streams beyond them are refused.
    let _ = raise_descriptor_limit();
    let count = windows.len();
    while UnixStream::connect(SUPERVISOR).is_err() {
        if let Some(status) = supervisor.try_wait().map_err(RelayError::Wait)? {
            return Err(RelayError::Failed(status));
        }
        std::thread::sleep(AGAIN);
    }
    for (slot, window) in (0..).zip(windows) {
        let serve = move || {
            if let Err(error) = serve(slot, &window, &Places::of_one_among(count)) {
                // Without an acknowledgement the slot is in quarantine.
                say::line(format_args!("slot {slot} is lost: {}", chain(&error)));
            }
        };
        tasks::spawn("slot", serve).map_err(RelayError::Thread)?;
    }
    let status = supervisor.wait().map_err(RelayError::Wait)?;
    Err(RelayError::Failed(status))
}

fn start_supervisor(options: &Options) -> Result<Child, RelayError> {
    let installation = Installation::locate().map_err(BackendError::from)?;
    let supervisor = installation.supervisor().map_err(BackendError::from)?;
    let mut command = Command::new(supervisor);
    command
        .args(["--device", &options.device.device])
        .args(options.operator.arguments())
        .args(["--listen", SUPERVISOR, "--workers"])
        .arg(installation.folder())
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    let started = command.spawn().map_err(tasks::named);
    started.map_err(|error| BackendError::Start(error).into())
}

/// Serves the tenants of a slot, one after the other.
fn serve(slot: u32, window: &Path, places: &Places) -> Result<(), RelayError> {
    let mut device = open(window)?;
    loop {
        lock(&device, window)?;
        // The end of the tenant needs no new descriptor.
        let next = open(window)?;
        let launcher = connect_vsock(HOST, ports::SLOT + slot).map_err(RelayError::Launcher)?;
        let supervisor = || UnixStream::connect(SUPERVISOR);
        let outside = || connect_vsock(HOST, ports::SLOT_CONTROL + slot);
        serve_one(&launcher, supervisor, (outside, places), device, || {
            lock(&next, window)
        })?;
        device = next;
        // The other side ends the stream when it has removed the window.
        let mut body = Vec::new();
        while receive(&launcher, &mut body)?.is_some() {}
    }
}

/// Serves a tenant: passes messages on until the supervisor has ended the tenant, and acknowledges the end when the window
/// is `unused`.
fn serve_one(
    launcher: &UnixStream,
    supervisor: impl FnOnce() -> io::Result<UnixStream>,
    (outside, places): (impl Fn() -> io::Result<UnixStream>, &Places),
    device: File,
    unused: impl FnOnce() -> Result<(), RelayError>,
) -> Result<(), RelayError> {
    let mut body = Vec::new();
    let Some((attach @ Message::Attach(_), _)) = receive(launcher, &mut body)? else {
        return Err(RelayError::NoTenant);
    };
    // A supervisor waits a bounded time for the window of a connection.
    let supervisor = supervisor().map_err(RelayError::Supervisor)?;
    // It may have refused the connection already. Then its reason is there to be read.
    if let Err(error) = send(&supervisor, &attach, &[device.as_raw_fd()]) {
        say::line(format_args!("the supervisor takes no tenant: {error}"));
    }
    drop(device);
    std::thread::scope(|scope| {
        let orders = || {
            if let Err(error) = pass(launcher, &supervisor) {
                say::line(format_args!("a launcher's orders end: {error}"));
            }
            drop(supervisor.shutdown(Shutdown::Write));
        };
        let orders = std::thread::Builder::new().spawn_scoped(scope, orders);
        if orders.is_ok()
            && let Err(error) = pass_answers(&supervisor, launcher, &outside, places)
        {
            say::line(format_args!("a supervisor's answers end: {error}"));
        }
        drop(supervisor.shutdown(Shutdown::Both));
        // A guest that reads nothing holds a stream beyond its end.
        places.clear();
        let over = Message::WindowUnmap(WindowRun::default());
        let acknowledged = unused().and_then(|()| Ok(send(launcher, &over, &[])?));
        if acknowledged.is_err() {
            drop(launcher.shutdown(Shutdown::Both));
        }
        orders.map_err(tasks::named).map_err(RelayError::Thread)?;
        acknowledged
    })
}

/// Passes a launcher's messages on until it asks for the end of the tenant.
fn pass(launcher: &UnixStream, supervisor: &UnixStream) -> Result<(), BackendError> {
    let mut body = Vec::new();
    while let Some((message, _)) = receive(launcher, &mut body)? {
        match message {
            Message::WindowUnmap(_) => break,
            message => send(supervisor, &message, &[])?,
        }
    }
    Ok(())
}

/// Opens a slot's device.
fn open(path: &Path) -> Result<File, RelayError> {
    let opened = File::options().read(true).write(true).open(path);
    opened.map_err(|source| RelayError::Window {
        path: path.to_owned(),
        source,
    })
}

/// Locks a slot's device, once nothing refers to an earlier opening of it.
fn lock(device: &File, path: &Path) -> Result<(), RelayError> {
    flock(device, FlockOperation::LockExclusive).map_err(|error| RelayError::Window {
        path: path.to_owned(),
        source: error.into(),
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::mpsc::channel;

    use wormhole_ring::control::{Attach, Stream};

    use super::*;

    /// Sends the orders of a launcher that attaches a window and leaves.
    fn order_attach_and_end(outside: &UnixStream) {
        for order in [
            Message::Attach(Attach::default()),
            Message::WindowUnmap(WindowRun::default()),
        ] {
            send(outside, &order, &[]).unwrap();
        }
    }

    /// Serves a tenant whose guest has no control streams.
    fn serve_without_streams(
        launcher: &UnixStream,
        supervisor: UnixStream,
        device: File,
        unused: impl FnOnce() -> Result<(), RelayError>,
    ) -> Result<(), RelayError> {
        let unreachable = || Err(io::ErrorKind::ConnectionRefused.into());
        let places = Places::of_one_among(1);
        serve_one(
            launcher,
            || Ok(supervisor),
            (unreachable, &places),
            device,
            unused,
        )
    }

    #[test]
    fn an_opening_is_locked_until_its_last_descriptor_is_closed() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (here, there) = UnixStream::pair().unwrap();
        let device = open(file.path()).unwrap();
        lock(&device, file.path()).unwrap();
        send(&here, &Message::Attached, &[device.as_raw_fd()]).unwrap();
        drop(device);
        let (tell, ends) = channel();
        let path = file.path().to_owned();
        let waiting = std::thread::spawn(move || {
            let locked = open(&path).unwrap();
            lock(&locked, &path).unwrap();
            tell.send(()).unwrap();
            drop(locked);
        });
        // It is underway in the socket, then a descriptor of this process.
        let own = File::options().read(true).open(file.path()).unwrap();
        let is_locked = || flock(&own, FlockOperation::NonBlockingLockShared).is_err();
        assert!(is_locked() && ends.try_recv().is_err());
        let mut body = Vec::new();
        let received = receive(&there, &mut body).unwrap();
        assert!(is_locked() && ends.try_recv().is_err());
        drop(received);
        ends.recv().unwrap();
        waiting.join().unwrap();
    }

    #[test]
    fn the_end_of_a_tenant_is_acknowledged_when_the_supervisor_has_ended_it_and_its_window_is_unused()
     {
        let (outside, launcher) = UnixStream::pair().unwrap();
        let (near, supervisor) = UnixStream::pair().unwrap();
        let device = tempfile::tempfile().unwrap();
        device.set_len(4096).unwrap();
        let (free, freed) = channel::<()>();
        let serving = std::thread::spawn(move || {
            let unused = || freed.recv().map_err(|_| RelayError::NoTenant);
            serve_without_streams(&launcher, near, device, unused)
        });
        let (mut body, mut answer) = (Vec::new(), Vec::new());
        send(&outside, &Message::Attach(Attach::default()), &[]).unwrap();
        send(&outside, &Message::Stream(Stream { local: 0 }), &[]).unwrap();
        let (message, window) = receive(&supervisor, &mut body).unwrap().unwrap();
        assert!(matches!(message, Message::Attach(_)));
        assert_eq!(window.unwrap().metadata().unwrap().len(), 4096);
        let (message, window) = receive(&supervisor, &mut body).unwrap().unwrap();
        assert!(matches!(message, Message::Stream(_)) && window.is_none());
        let over = Message::WindowUnmap(WindowRun::default());
        send(&outside, &over, &[]).unwrap();
        // The supervisor reports after the launcher's end.
        assert!(receive(&supervisor, &mut body).unwrap().is_none());
        send(&supervisor, &Message::SessionReport("{}"), &[]).unwrap();
        drop(supervisor);
        let (message, _) = receive(&outside, &mut answer).unwrap().unwrap();
        assert!(matches!(message, Message::SessionReport("{}")));
        outside.set_nonblocking(true).unwrap();
        assert!(receive(&outside, &mut answer).is_err(), "it is used");
        outside.set_nonblocking(false).unwrap();
        free.send(()).unwrap();
        let (message, _) = receive(&outside, &mut answer).unwrap().unwrap();
        assert!(matches!(message, Message::WindowUnmap(_)));
        serving.join().unwrap().unwrap();
    }

    #[test]
    fn a_supervisor_that_refuses_before_it_is_asked_costs_no_slot() {
        let (outside, launcher) = UnixStream::pair().unwrap();
        let (near, supervisor) = UnixStream::pair().unwrap();
        let device = tempfile::tempfile().unwrap();
        let refused = Message::Refused {
            code: 1,
            reason: "full",
        };
        send(&supervisor, &refused, &[]).unwrap();
        drop(supervisor);
        order_attach_and_end(&outside);
        serve_without_streams(&launcher, near, device, || Ok(())).unwrap();
        let mut body = Vec::new();
        let (message, _) = receive(&outside, &mut body).unwrap().unwrap();
        assert!(matches!(message, Message::Refused { reason: "full", .. }));
        let (message, _) = receive(&outside, &mut body).unwrap().unwrap();
        assert!(matches!(message, Message::WindowUnmap(_)));
    }

    #[test]
    fn a_guest_that_reads_nothing_holds_no_place_of_the_next_tenant() {
        let (outside, launcher) = UnixStream::pair().unwrap();
        let (near, supervisor) = UnixStream::pair().unwrap();
        let device = tempfile::tempfile().unwrap();
        let (carried, guest) = UnixStream::pair().unwrap();
        let (stream, control) = UnixStream::pair().unwrap();
        let places = Places::of_one_among(1);
        order_attach_and_end(&outside);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut body = Vec::new();
                receive(&supervisor, &mut body).unwrap().unwrap();
                let opened = Message::Stream(Stream { local: 0 });
                send(&supervisor, &opened, &[stream.as_raw_fd()]).unwrap();
                // More than the guest's socket takes.
                control.set_nonblocking(true).unwrap();
                let mut full = 0;
                while full < 100 {
                    match (&control).write(&[0; 4096]) {
                        Ok(_) => full = 0,
                        Err(_) => full += 1,
                    }
                    std::thread::sleep(Duration::from_micros(100));
                }
                drop(supervisor);
            });
            let outside = || carried.try_clone();
            serve_one(
                &launcher,
                || Ok(near),
                (outside, &places),
                device,
                || Ok(()),
            )
            .unwrap();
        });
        assert!(places.are_free());
        drop(guest);
    }

    #[test]
    fn a_window_that_stays_in_use_is_not_acknowledged() {
        let (outside, launcher) = UnixStream::pair().unwrap();
        let (near, supervisor) = UnixStream::pair().unwrap();
        let device = tempfile::tempfile().unwrap();
        send(&outside, &Message::Attach(Attach::default()), &[]).unwrap();
        // The supervisor ends the tenant by itself.
        let ending = std::thread::spawn(move || {
            let mut body = Vec::new();
            receive(&supervisor, &mut body).unwrap().is_some()
        });
        let served = serve_without_streams(&launcher, near, device, || Err(RelayError::NoTenant));
        assert!(served.is_err());
        assert!(ending.join().unwrap(), "it got the window");
        assert!(receive(&outside, &mut Vec::new()).unwrap().is_none());
    }
}
