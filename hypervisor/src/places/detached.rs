//! Processes that outlive their starter.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};

use rustix::process::{Signal, getppid, set_parent_process_death_signal, setsid};
use wormhole_link::tasks;

use super::{FOLDER_VARIABLE, USER_FOLDER_VARIABLE};
use crate::say;
use crate::signals::Set;

/// Relation of a process to its starter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detached {
    /// The process outlives its starter.
    Wholly,
    /// SIGTERM is sent to the process when its starter ends.
    Until,
}

impl Detached {
    /// Starts a process that no signal of a terminal reaches. It receives the signals `watched`, which this thread may
    /// block, and has the part of the environment that is for it.
    ///
    /// # Errors
    /// The process cannot be created.
    pub fn spawn(self, command: &mut Command, watched: Set) -> io::Result<Child> {
        let variables = std::env::vars_os().filter(|(name, _)| is_passed(name));
        command.env_clear().envs(variables);
        let starter = rustix::process::getpid();
        // SAFETY: between fork and exec this makes system calls and allocates nothing.
        unsafe {
            command.pre_exec(move || {
                // The process must not hold locks and pipes of its starter. Kernels before 5.11 lack the call.
                let all = libc::c_uint::MAX;
                libc::syscall(libc::SYS_close_range, 3, all, libc::CLOSE_RANGE_CLOEXEC);
                setsid()?;
                if self == Self::Until {
                    set_parent_process_death_signal(Some(Signal::TERM))?;
                    if getppid() != Some(starter) {
                        return Err(io::ErrorKind::BrokenPipe.into());
                    }
                }
                watched.unblock();
                Ok(())
            });
        }
        command.spawn().map_err(tasks::named)
    }
}

/// Returns whether the process, or a device's driver in its workers, reads a variable. The others of the starter's
/// environment may be secrets, and would stay for as long as the process.
fn is_passed(name: &OsStr) -> bool {
    const NAMES: [&str; 6] = [
        "PATH",
        "HOME",
        "LD_LIBRARY_PATH",
        "WORMHOLE_LOG",
        FOLDER_VARIABLE,
        USER_FOLDER_VARIABLE,
    ];
    let name = name.to_string_lossy();
    NAMES.contains(&name.as_ref())
        || ["CUDA_", "NVIDIA_"]
            .iter()
            .any(|prefix| name.starts_with(prefix))
}

/// Returns the last line of a log, without the name of the command that wrote it.
pub fn last_line(log: &Path, command: &str) -> Option<String> {
    /// Longer than a last line.
    const END: u64 = 8 << 10;
    let mut file = File::open(log).ok()?;
    let size = fs::metadata(log).ok()?.len();
    file.seek(SeekFrom::Start(size.saturating_sub(END))).ok()?;
    let mut end = Vec::new();
    file.take(END).read_to_end(&mut end).ok()?;
    let text = String::from_utf8_lossy(&end);
    let line = text.lines().rfind(|line| !line.trim().is_empty())?;
    let line = line.trim_start_matches(&format!("{command}: "));
    Some(line.to_owned())
}

/// Notifies the service manager, if there is one, that the service is ready (sd_notify(3)).
pub fn notify() {
    let Some(socket) = std::env::var_os("NOTIFY_SOCKET") else {
        return;
    };
    let sent = || -> io::Result<usize> {
        let address = match socket.as_bytes().split_first() {
            Some((b'@', name)) => SocketAddr::from_abstract_name(name)?,
            _ => SocketAddr::from_pathname(&socket)?,
        };
        UnixDatagram::unbound()?.send_to_addr(b"READY=1", &address)
    };
    if let Err(error) = sent() {
        say::line(format_args!(
            "the service manager cannot be notified: {error}"
        ));
    }
}
