//! `wormhole backend`: supervisors that outlive programs and serve many tenants.

mod start;
mod usage;

use std::fmt;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::{Subcommand, ValueEnum};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde::{Deserialize, Serialize};
use wormhole_link::operator::Beyond;
use wormhole_link::users;

pub use self::usage::Client;
use crate::backend::BackendError;
use crate::backend_vm::Unserved;
use crate::installation::InstallationError;
use crate::phases::Phases;
use crate::places::{self, End, Kind, Name, PlaceError, Record};
use crate::say;
use crate::table::{self, Column};

/// Name of a backend without one.
pub const DEFAULT: &str = "default";
/// Time within which a supervisor ends on request: its workers get 60 s.
const END_LIMIT: Duration = Duration::from_secs(75);
/// Time within which a listening supervisor accepts a connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// Placement of a backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// A process of this system.
    #[default]
    Host,
    /// A VM of its own.
    Vm,
}

/// Facts of a backend that its starter writes down. The record's process is the supervisor, or the monitor of the VM in
/// which the supervisor runs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Facts {
    pub device: String,
    #[serde(default)]
    pub placement: Placement,
    /// Identity of the boot of a backend's own VM.
    #[serde(default)]
    pub boot_id: Option<String>,
    /// Hash of the message table that its workers speak.
    pub protocol: u64,
}

impl Kind for Facts {
    const NOUN: &'static str = "backend";
    const FOLDER: &'static str = "";
    const FILES: &'static [&'static str] = &[];
}

type Place = places::Place<Facts>;
type Held = places::Held<Facts>;

#[derive(Debug, Subcommand)]
#[command(arg_required_else_help = false)]
pub enum Action {
    /// Start a backend that serves programs until it is stopped.
    Start(Box<start::Options>),
    /// Stop a backend. Programs that use it get errors.
    Stop {
        #[arg(default_value = DEFAULT)]
        name: Name,
    },
    /// List the backends that run.
    List {
        /// Write JSON.
        #[arg(long)]
        json: bool,
    },
}

/// Reason why a command on backends fails.
#[derive(Debug, thiserror::Error)]
pub enum BackendsError {
    #[error(transparent)]
    Place(#[from] PlaceError),
    #[error(transparent)]
    Installation(#[from] InstallationError),
    #[error("no backend {0} is running: `wormhole backend start {0}` starts one")]
    NotRunning(Name),
    #[error("no backend is there: nothing listens on {0}")]
    NoListener(PathBuf),
    #[error("the backend at {0} has not accepted a connection within {limit} s", limit = CONNECT_LIMIT.as_secs())]
    NoAnswer(PathBuf),
    #[error(
        "the backend at {path} is that of user {user}, who would see the program's data: name one of root or of this user"
    )]
    Foreign { path: PathBuf, user: u32 },
    #[error("cannot connect to the backend at {path}")]
    Connect {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "the backend at {path} is of another version (wormhole {theirs}): stop it and start it with this one ({})",
        env!("CARGO_PKG_VERSION")
    )]
    Version { path: PathBuf, theirs: String },
    #[error("backend {name} is running already, as process {pid}")]
    Running { name: Name, pid: u32 },
    #[error("the backend at {path} does not tell of its tenants")]
    Usage {
        path: PathBuf,
        #[source]
        source: BackendError,
    },
    #[error(
        "backend {0} runs in a VM and serves guests alone: choose --placement host, or another backend"
    )]
    InVm(Name),
    #[error(transparent)]
    Vm(#[from] Unserved),
    #[error(transparent)]
    Operator(#[from] Beyond),
    #[error("cannot start the supervisor")]
    Start(#[source] io::Error),
    #[error("backend {name} does not start")]
    Unfit {
        name: Name,
        #[source]
        source: BackendError,
    },
    #[error("the supervisor ended and printed the reason")]
    Said,
    /// The text is the supervisor's.
    #[error("backend {name} does not start: {reason}")]
    Ended { name: Name, reason: String },
    #[error("the supervisor of backend {0} failed ({1})")]
    Failed(Name, std::process::ExitStatus),
    #[error("backend {name} cannot be stopped")]
    Stop {
        name: Name,
        #[source]
        source: io::Error,
    },
}

impl BackendsError {
    /// Returns the names of the options that the error is about.
    pub fn options(&self) -> Vec<&'static str> {
        match self {
            Self::Operator(Beyond { part, whole }) => vec![part, whole],
            Self::Vm(error) => error.options(),
            _ => Vec::new(),
        }
    }

    /// Returns whether the process that failed has printed the cause already.
    pub fn is_said(&self) -> bool {
        matches!(self, Self::Said)
    }
}

/// Runs a command on backends.
pub fn run(action: Action) -> Result<(), BackendsError> {
    match action {
        Action::Start(options) => start::run(&options),
        Action::Stop { name } => stop(name),
        Action::List { json } => list(json),
    }
}

fn stop(name: Name) -> Result<(), BackendsError> {
    let place = Place::own(name.clone())?;
    let held = place.hold()?;
    let phase = Phases::of("waiting until the backend ends");
    let stopped = match place.running()? {
        None => Ok(End::Gone),
        Some(record) => record.process.end(END_LIMIT),
    };
    let stopped = stopped.map_err(|source| BackendsError::Stop {
        name: name.clone(),
        source,
    })?;
    drop(phase);
    held.remove();
    if stopped == End::Gone {
        return Err(BackendsError::NotRunning(name));
    }
    say::result(format_args!("backend {name} is stopped"));
    Ok(())
}

/// A connection to an existing backend.
#[derive(Debug)]
pub struct Connected {
    pub stream: UnixStream,
    /// Placement of the backend. A socket does not tell it: a backend VM refuses windows that it cannot serve.
    pub placement: Placement,
    /// Identity of the boot of the backend's own VM.
    pub boot_id: Option<String>,
}

/// A backend in the list.
#[derive(Clone, Debug, Serialize)]
pub struct Entry {
    pub name: String,
    pub pid: u32,
    pub device: String,
    pub placement: Placement,
    pub boot_id: Option<String>,
    pub version: String,
    /// Seconds since 1970.
    pub started: u64,
    pub socket: PathBuf,
    #[serde(skip)]
    pub up: String,
}

/// Returns the backends that run and that this user can reach.
pub fn entries() -> Result<Vec<Entry>, BackendsError> {
    let mut entries = Vec::new();
    for place in Place::all()? {
        let socket = place.socket();
        let record = place.listed()?.filter(|record| record.process.lives());
        entries.extend(record.map(|record| Entry {
            name: place.name.to_string(),
            pid: record.process.pid,
            up: record.up(),
            device: record.facts.device,
            placement: record.facts.placement,
            boot_id: record.facts.boot_id,
            version: record.version,
            started: record.started,
            socket,
        }));
    }
    Ok(entries)
}

fn list(json: bool) -> Result<(), BackendsError> {
    let entries = entries()?;
    if json {
        let text = serde_json::to_string_pretty(&entries).unwrap_or_default();
        say::result(format_args!("{text}"));
        return Ok(());
    }
    say::result(format_args!("{}", text(&entries).trim_end()));
    Ok(())
}

/// Returns the list for people.
fn text(entries: &[Entry]) -> String {
    let rows: Vec<_> = entries
        .iter()
        .map(|entry| {
            [
                entry.name.clone(),
                entry.pid.to_string(),
                entry.up.clone(),
                entry.device.clone(),
                entry.socket.display().to_string(),
            ]
        })
        .collect();
    table::format(
        [
            Column::Text("NAME"),
            Column::Number("PID"),
            Column::Number("UP"),
            Column::Text("DEVICE"),
            Column::Text("SOCKET"),
        ],
        &rows,
    )
}

/// An existing backend, as given by `--backend`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Chosen {
    Name(Name),
    Socket(PathBuf),
}

impl FromStr for Chosen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("unix:") {
            Some("") => Err("unix: needs the path of a socket".to_owned()),
            Some(path) => Ok(Self::Socket(path.into())),
            None => text
                .parse()
                .map(Self::Name)
                .map_err(|error| format!("{error}; a socket is written unix:PATH")),
        }
    }
}

impl fmt::Display for Chosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => name.fmt(f),
            Self::Socket(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl Chosen {
    /// Refuses a backend that serves no processes of this system.
    ///
    /// # Errors
    /// The backend runs in a VM.
    pub fn expect_processes(&self) -> Result<(), BackendsError> {
        let Self::Name(name) = self else {
            return Ok(());
        };
        let record = Place::find(name)?.running()?;
        match record.map(|record| record.facts.placement) {
            Some(Placement::Vm) => Err(BackendsError::InVm(name.clone())),
            _ => Ok(()),
        }
    }

    /// Connects to the backend.
    ///
    /// # Errors
    /// The backend does not run, has another version, or refuses the connection.
    pub fn connect(&self) -> Result<Connected, BackendsError> {
        let name = match self {
            Self::Socket(path) => {
                return Ok(Connected {
                    stream: connect_to(path)?,
                    placement: Placement::Host,
                    boot_id: None,
                });
            }
            Self::Name(name) => name,
        };
        let place = Place::find(name)?;
        match place.running()? {
            None => Err(BackendsError::NotRunning(name.clone())),
            Some(Record { facts, version, .. })
                if facts.protocol != wormhole_api::PROTOCOL_HASH =>
            {
                Err(BackendsError::Version {
                    path: place.socket(),
                    theirs: version,
                })
            }
            Some(record) => Ok(Connected {
                stream: connect_to(&place.socket())?,
                placement: record.facts.placement,
                boot_id: record.facts.boot_id,
            }),
        }
    }
}

/// Connects to a socket of root or of this user: a backend sees the data of its programs. Waits a
/// bounded time for a supervisor that has many connections to accept.
fn connect_to(path: &Path) -> Result<UnixStream, BackendsError> {
    let connected = || {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        set_socket_timeout(&socket, Timeout::Send, Some(CONNECT_LIMIT))?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        set_socket_timeout(&socket, Timeout::Send, None)?;
        Ok(UnixStream::from(socket))
    };
    let stream = connected().map_err(|error| match error {
        Errno::AGAIN => BackendsError::NoAnswer(path.to_owned()),
        Errno::NOENT | Errno::CONNREFUSED => BackendsError::NoListener(path.to_owned()),
        error => BackendsError::Connect {
            path: path.to_owned(),
            source: error.into(),
        },
    })?;
    let peer = users::peer_of(&stream).map_err(|source| BackendsError::Connect {
        path: path.to_owned(),
        source,
    })?;
    match users::is_believed(peer.user) {
        true => Ok(stream),
        false => Err(BackendsError::Foreign {
            path: path.to_owned(),
            user: peer.user,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_longest_word() {
        let entry = |name: &str, device: &str| Entry {
            name: name.to_owned(),
            pid: 4711,
            device: device.to_owned(),
            placement: Placement::Host,
            boot_id: None,
            version: "0.1.0".to_owned(),
            started: 1,
            socket: format!("/run/wormhole/{name}/socket").into(),
            up: "59s".to_owned(),
        };
        let entries = [entry("a", "cpu"), entry("gpu", "cuda:0,cuda:1,cuda:2")];
        let lines = "\
NAME   PID   UP  DEVICE                SOCKET
a     4711  59s  cpu                   /run/wormhole/a/socket
gpu   4711  59s  cuda:0,cuda:1,cuda:2  /run/wormhole/gpu/socket
";
        assert_eq!(text(&entries), lines);
        assert_eq!(text(&[]), "NAME  PID  UP  DEVICE  SOCKET\n");
    }

    #[test]
    fn a_backend_is_chosen_by_name_or_by_socket() {
        assert_eq!("gpu".parse(), Ok(Chosen::Name("gpu".parse().unwrap())));
        let socket = Chosen::Socket("run/backend.socket".into());
        assert_eq!("unix:run/backend.socket".parse(), Ok(socket));
        for bad in ["", "unix:", "/run/backend.socket", "tcp:1"] {
            assert!(bad.parse::<Chosen>().is_err(), "{bad}");
        }
    }
}
