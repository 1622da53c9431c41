//! Worker processes: installed executables, starting one, and its log.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use wormhole_link::device::DeviceChoice;
use wormhole_link::log_budget::{LogBudget, Verdict};
use wormhole_sandbox::{Child, Command, Confinement, SpawnError};

use super::datagram::{self, Plain};

/// Prefix of the names of worker executables.
const NAME: &str = "wormhole-worker";
/// Time within which an executable must print its protocol.
const PROTOCOL_DEADLINE: Duration = Duration::from_secs(10);
/// Largest size of a log line in bytes.
const LINE_LIMIT: usize = 1024;
/// Bytes that the supervisor writes around a worker's line, such as its time: an empty one has them too.
const LINE_START: usize = 64;
/// Largest number of bytes of one write to a log that are passed on.
const WRITE_LIMIT: usize = 16 << 10;
/// Number of writes read from the log of an ended worker: more than its socket holds.
pub const LAST_PORTIONS: usize = 512;
/// Largest number of a worker's lines in a dump.
const DUMP_LINES: usize = 40;
/// Text by which a worker marks a line of a dump.
const DUMP_LINE: &str = " dump: ";

/// Reason why the installed workers cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ExecutablesError {
    #[error("the workers' directory {directory} cannot be read")]
    Directory {
        directory: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("no file named {NAME}* in {0} is a worker that can be started")]
    None(String),
}

/// Installed workers, by the hash of their protocol.
#[derive(Clone, Debug, Default)]
pub struct Executables {
    by_hash: BTreeMap<u64, PathBuf>,
}

impl Executables {
    /// Runs every worker in `directories`, confined, for its protocol.
    ///
    /// # Errors
    /// A directory cannot be read, or contains no worker.
    pub fn find(
        directories: &[PathBuf],
        confinement: &Confinement,
    ) -> Result<Self, ExecutablesError> {
        let mut by_hash = BTreeMap::new();
        for directory in directories {
            let failed = |cause| ExecutablesError::Directory {
                directory: directory.clone(),
                cause,
            };
            let mut files: Vec<PathBuf> = std::fs::read_dir(directory)
                .map_err(failed)?
                .flatten()
                .map(|entry| entry.path())
                .filter(|path| is_worker(path))
                .collect();
            files.sort();
            for file in files {
                // The path must stay valid after a change of directory and in another root.
                let Ok(file) = file.canonicalize() else {
                    continue;
                };
                match protocol_of(&file, confinement) {
                    Ok(hash) => {
                        tracing::debug!("{} speaks protocol {hash:016x}", file.display());
                        by_hash.entry(hash).or_insert(file);
                    }
                    Err(reason) => tracing::warn!("{} is passed over: {reason}", file.display()),
                }
            }
        }
        if by_hash.is_empty() {
            let names: Vec<String> = directories
                .iter()
                .map(|directory| directory.display().to_string())
                .collect();
            return Err(ExecutablesError::None(names.join(", ")));
        }
        Ok(Self { by_hash })
    }

    pub fn get(&self, hash: u64) -> Option<&Path> {
        self.by_hash.get(&hash).map(PathBuf::as_path)
    }

    pub fn hashes(&self) -> impl Iterator<Item = u64> {
        self.by_hash.keys().copied()
    }

    /// Returns the hashes, for a refusal.
    pub fn names(&self) -> String {
        let names: Vec<String> = self.hashes().map(|hash| format!("{hash:016x}")).collect();
        names.join(", ")
    }
}

fn is_worker(path: &Path) -> bool {
    let named = path
        .file_name()
        .and_then(|name| name.to_str())
        // Build tools leave files beside the executables.
        .is_some_and(|name| name.starts_with(NAME) && !name.ends_with(".d"));
    named
        && path
            .metadata()
            .is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}

fn protocol_of(file: &Path, confinement: &Confinement) -> Result<u64, String> {
    let (reader, writer) = io::pipe().map_err(|error| error.to_string())?;
    let null = wormhole_sandbox::null_device().map_err(|error| wormhole_link::chain(&error))?;
    let child = confinement
        .spawn(&Command {
            program: file,
            arguments: &[OsString::from("--protocol")],
            environment: &[],
            stdin: null.as_fd(),
            output: writer.as_fd(),
            descriptors: &[],
            lifeline: false,
        })
        .map_err(|error| wormhole_link::chain(&error))?;
    drop(writer);
    let text = read_until_end(OwnedFd::from(reader).into(), PROTOCOL_DEADLINE);
    child.kill();
    child.wait();
    let text = text?;
    u64::from_str_radix(text.trim(), 16)
        .map_err(|_| format!("it says \"{}\" when asked for its protocol", text.trim()))
}

fn read_until_end(mut reader: File, deadline: Duration) -> Result<String, String> {
    let end = Instant::now() + deadline;
    let mut text = Vec::new();
    let mut buffer = [0; 256];
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() || text.len() > 4096 {
            return Err("it does not say which protocol it speaks".to_owned());
        }
        // None, which waits for ever, for more seconds than a `Timespec` has.
        let left = Timespec::try_from(left).ok();
        let mut entry = [PollFd::new(&reader, PollFlags::IN)];
        if !poll(&mut entry, left.as_ref()).is_ok_and(|ready| ready > 0) {
            continue;
        }
        match reader.read(&mut buffer) {
            Ok(0) => return Ok(String::from_utf8_lossy(&text).into_owned()),
            Ok(count) => text.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.to_string()),
        }
    }
}

/// A worker that was just started.
#[derive(Debug)]
pub struct Started {
    pub child: Child,
    /// Supervisor's end of the worker's stream.
    pub socket: OwnedFd,
    /// Supervisor's end of the worker's log.
    pub log: OwnedFd,
}

/// Starts a worker on `device`.
///
/// # Errors
/// The process cannot be created or confined.
pub fn start(
    program: &Path,
    device: DeviceChoice,
    environment: &[(OsString, OsString)],
    confinement: &Confinement,
) -> Result<Started, SpawnError> {
    let prepare = |what| move |cause| SpawnError::Prepare { what, cause };
    let (near, far) = UnixStream::pair().map_err(prepare("a stream"))?;
    let (log, writer) = datagram::pair().map_err(prepare("a socket for its log"))?;
    let null = wormhole_sandbox::null_device()?;
    let child = confinement.spawn(&Command {
        program,
        arguments: &[OsString::from("--device"), device.to_string().into()],
        environment,
        stdin: null.as_fd(),
        output: writer.as_fd(),
        descriptors: &[far.as_fd(), writer.as_fd()],
        lifeline: true,
    })?;
    Ok(Started {
        child,
        socket: near.into(),
        log,
    })
}

/// Result of one read of a worker's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Portion {
    Data,
    /// No data now; a process still holds the other end.
    Empty,
    Closed,
    /// The worker has sent descriptors, which wait in the socket.
    Descriptors,
}

/// A worker's log, passed on line by line as far as a budget permits.
///
/// The log is a socket and no pipe: a write to a pipe holds a lock while it copies from the writer's
/// memory, and a read waits for that lock. A worker can make the copy take long.
#[derive(Debug)]
pub struct Log {
    socket: OwnedFd,
    line: Vec<u8>,
    /// Number of a dump's lines still expected.
    awaited: usize,
}

impl Log {
    pub fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            line: Vec::new(),
            awaited: 0,
        }
    }

    pub fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// Passes the last line on although it may not be over, and returns the socket.
    pub fn finish(mut self, pid: i32, budget: &mut LogBudget) -> OwnedFd {
        if !self.line.is_empty() {
            self.pass_on(pid, budget);
        }
        self.socket
    }

    /// Returns the socket, which may contain descriptors.
    pub fn into_socket(self) -> OwnedFd {
        self.socket
    }

    /// Expects the worker's lines of a dump, which are as important as the supervisor's own.
    pub fn await_dump(&mut self) {
        self.awaited = DUMP_LINES;
    }

    /// Reads once, without blocking, and passes lines on. Spends their bytes from the budget of the
    /// worker's tenant.
    pub fn read(&mut self, pid: i32, budget: &mut LogBudget) -> Portion {
        let mut buffer = [0; WRITE_LIMIT];
        let (count, is_cut) = match datagram::receive_plain(&self.socket, &mut buffer) {
            Ok(Plain::Descriptors) => return Portion::Descriptors,
            Ok(Plain::Bytes { count: 0, .. }) => return Portion::Closed,
            Ok(Plain::Bytes { count, is_cut }) => (count, is_cut),
            Err(Errno::AGAIN | Errno::INTR) => return Portion::Empty,
            Err(_) => return Portion::Closed,
        };
        for &byte in &buffer[..count] {
            if byte == b'\n' || self.line.len() == LINE_LIMIT {
                self.pass_on(pid, budget);
            }
            if byte != b'\n' {
                self.line.push(byte);
            }
        }
        if is_cut {
            self.line.extend_from_slice(b" [cut]");
            self.pass_on(pid, budget);
        }
        Portion::Data
    }

    fn pass_on(&mut self, pid: i32, budget: &mut LogBudget) {
        let cost = u32::try_from(LINE_START + self.line.len()).unwrap_or(u32::MAX);
        let verdict = budget.spend_all(cost, Instant::now());
        if let Verdict::After(count) = verdict {
            tracing::warn!("{count} lines of worker {pid} and others of its tenant were left out");
        }
        if verdict != Verdict::Drop {
            let text = wormhole_link::harmless_bytes(&self.line);
            let text = text.trim();
            if self.awaited > 0 && text.contains(DUMP_LINE) {
                self.awaited -= 1;
                tracing::warn!("worker {pid}: {text}");
            } else {
                tracing::info!("worker {pid}: {text}");
            }
        }
        if verdict == Verdict::Last {
            tracing::warn!(
                "worker {pid} and others of its tenant write too much: most of their logs is left out"
            );
        }
        self.line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_lines_of_a_worker_do_not_fill_the_log() {
        let (near, far) = datagram::pair().unwrap();
        let mut log = Log::new(near);
        let mut budget = LogBudget::of_workers(Instant::now());
        rustix::io::write(&far, &[b'\n'; WRITE_LIMIT]).unwrap();
        let subscriber = tracing::subscriber::NoSubscriber::default();
        let portion = tracing::subscriber::with_default(subscriber, || log.read(7, &mut budget));
        assert_eq!(portion, Portion::Data);
        assert!(budget.left(Instant::now()) < 64 << 10);
    }
}
