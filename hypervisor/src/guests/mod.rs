//! `wormhole guest`: guests that have no program and run for as long as they are wanted.
//!
//! Each guest is one process, with a folder as a backend has. A second process, its attendant, keeps the console's log,
//! lets a person attach to the console, and removes the folder however the guest ends.

mod attendant;
mod console;
mod log;
mod machine;
mod serve;
mod snapshot;
mod start;

use std::io::{self, Read};
use std::path::PathBuf;
use std::time::Duration;

use clap::Subcommand;
use serde::{Deserialize, Serialize};
use wormhole_link::harmless;

use crate::attach::names::NamesError;
use crate::installation::InstallationError;
use crate::phases::Phases;
use crate::places::{self, End, Kind, Name, PlaceError, Record};
use crate::run::{RunError, USAGE};
use crate::say;
use crate::table::{self, Column};

/// Facts of a guest that its starter writes down. The record's process is the guest's.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Facts {
    /// The backend that it shares with others: a name, or `unix:` and a path.
    backend: Option<String>,
    /// The device of a backend of its own.
    device: Option<String>,
    /// Memory in bytes.
    memory: u64,
    cpus: u8,
}

/// The sentence with which a guest in the background ended, if it did not switch itself off.
const END: &str = "end";

impl Kind for Facts {
    const NOUN: &'static str = "guest";
    // No backend has this name.
    const FOLDER: &'static str = ".guests";
    const FILES: &'static [&'static str] = &[
        log::NAME,
        log::EARLIER,
        END,
        snapshot::SOCKET,
        machine::FILE,
    ];
}

type Place = places::Place<Facts>;
type Held = places::Held<Facts>;

#[derive(Debug, Subcommand)]
#[command(arg_required_else_help = false)]
pub enum Action {
    /// Boot a guest and leave it, or stay with it until it ends.
    #[command(after_help = start::STATUSES)]
    Start(Box<start::Options>),
    /// Press a guest's power button, and end a guest that does not switch itself off.
    Stop {
        name: Name,
        /// Seconds that the guest has to switch itself off.
        #[arg(long, default_value_t = 90)]
        timeout: u64,
    },
    /// List the guests that run, and those that ended by a failure.
    List {
        /// Write JSON.
        #[arg(long)]
        json: bool,
    },
    /// Attach to a guest's serial console. Ctrl-] detaches a terminal.
    Console { name: Name },
    /// Save a guest without CUDA sessions to a folder, from which `guest start NAME --restore FOLDER` goes on.
    Snapshot {
        name: Name,
        /// The folder, which is made.
        folder: PathBuf,
        /// End the guest afterwards, so that its disks stay as they are.
        #[arg(long)]
        stop: bool,
    },
    /// Print the end of what a guest has written to its serial console.
    Logs { name: Name },
}

/// Reason why a command on guests fails.
#[derive(Debug, thiserror::Error)]
pub enum GuestsError {
    #[error(transparent)]
    Place(#[from] PlaceError),
    #[error(transparent)]
    Run(#[from] RunError),
    #[error(transparent)]
    Installation(#[from] InstallationError),
    #[error(transparent)]
    Names(#[from] NamesError),
    #[error(transparent)]
    Folder(#[from] snapshot::FolderError),
    #[error("guest {name} cannot be saved")]
    Save {
        name: Name,
        #[source]
        source: io::Error,
    },
    #[error(
        "cannot copy the description of the machine of guest {name}, which `guest start` wrote"
    )]
    Machine {
        name: Name,
        #[source]
        source: io::Error,
    },
    /// The text is the guest's process's.
    #[error("guest {name} is not saved: {reason}")]
    Unsaved { name: Name, reason: String },
    #[error("guest {0} has ended, or took no request: nothing is saved")]
    Unanswered(Name),
    #[error(
        "guest {name} is saved in {}, but may be lost if this machine loses power now",
        folder.display()
    )]
    Unsynced {
        name: Name,
        folder: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("no guest {0} is running: `wormhole guest start {0}` starts one")]
    NotRunning(Name),
    #[error("guest {name} is running already, as process {pid}")]
    Running { name: Name, pid: u32 },
    #[error("cannot start the process of guest {name}")]
    Start {
        name: Name,
        #[source]
        source: io::Error,
    },
    /// The text is the guest's process's.
    #[error("guest {name} does not start: {reason}")]
    Ended { name: Name, reason: String },
    #[error("cannot start the process that attends to the console of guest {name}")]
    Attendant {
        name: Name,
        #[source]
        source: io::Error,
    },
    #[error("cannot write {}", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("guest {name} cannot be stopped")]
    Stop {
        name: Name,
        #[source]
        source: io::Error,
    },
    #[error("cannot attach to the console of guest {name}")]
    Console {
        name: Name,
        #[source]
        source: io::Error,
    },
    #[error(
        "the console of guest {name} is that of user {user}, who would read all input: attach to a guest of this user"
    )]
    Foreign { name: Name, user: u32 },
    /// The text is the attendant's.
    #[error("{0}")]
    Attached(String),
}

impl GuestsError {
    /// Returns the names of the options that the error is about.
    pub fn options(&self) -> Vec<&'static str> {
        match self {
            Self::Run(error) => error.options(),
            _ => Vec::new(),
        }
    }

    /// Returns the exit status of a command with this error.
    pub fn status(&self) -> u8 {
        match self {
            Self::Run(error) => error.status(),
            _ => USAGE,
        }
    }

    /// Returns whether the process that failed has printed the cause already.
    pub fn is_said(&self) -> bool {
        matches!(self, Self::Run(error) if error.is_said())
    }
}

/// Commands that this one starts itself.
#[derive(Debug, Subcommand)]
pub enum Process {
    /// Boot a guest in the background; `guest start` starts this.
    #[command(hide = true)]
    ServeGuest(Box<start::Options>),
    /// Attend to a guest's console and folder; the guest's process starts this.
    #[command(hide = true)]
    AttendGuest(attendant::Options),
}

/// Runs as a process of a guest, and returns its exit status.
pub fn run_process(process: Process) -> Result<u8, GuestsError> {
    match process {
        Process::ServeGuest(options) => serve::run(&options),
        Process::AttendGuest(options) => attendant::run(&options).map(|()| 0),
    }
}

/// Runs a command on guests, and returns its exit status.
pub fn run(action: Action) -> Result<u8, GuestsError> {
    match action {
        Action::Start(options) => return start::run(&options),
        Action::Stop { name, timeout } => stop(&name, timeout),
        Action::List { json } => list(json),
        Action::Console { name } => console::attach(&name),
        Action::Snapshot { name, folder, stop } => snapshot::save(&name, &folder, stop),
        Action::Logs { name } => logs(name),
    }
    .map(|()| 0)
}

fn stop(name: &Name, timeout: u64) -> Result<(), GuestsError> {
    let place = Place::own(name.clone())?;
    if place.record()?.is_none() {
        return Err(GuestsError::NotRunning(name.clone()));
    }
    let held = place.hold()?;
    let phase = Phases::of("waiting until the guest switches itself off");
    let ended = match place.record()? {
        None => Ok(End::Gone),
        Some(record) => record.process.end(Duration::from_secs(timeout)),
    };
    let ended = ended.map_err(|source| GuestsError::Stop {
        name: name.clone(),
        source,
    })?;
    drop(phase);
    let sentence = sentence_of(&place);
    held.remove();
    match (ended, sentence) {
        (End::Gone, None) => return Err(GuestsError::NotRunning(name.clone())),
        (End::Gone, Some(end)) => say::result(format_args!("guest {name} had ended: {end}")),
        (End::Ended, Some(end)) => say::result(format_args!("guest {name} ended: {end}")),
        (End::Ended, None) => say::result(format_args!("guest {name} switched itself off")),
        (End::Killed, _) => say::result(format_args!(
            "guest {name} is killed: it did not switch itself off within {timeout} s of its power button"
        )),
    }
    Ok(())
}

/// Returns the sentence with which a guest has ended by a failure.
fn sentence_of(place: &Place) -> Option<String> {
    /// Longer than a sentence.
    const LONGEST: u64 = 64 << 10;
    let file = place.open(END).ok().flatten()?;
    let text = io::read_to_string(file.take(LONGEST)).ok()?;
    (!text.is_empty()).then(|| harmless(&text).replace('\n', " "))
}

/// A guest in the list.
#[derive(Debug, Serialize)]
pub struct Entry {
    pub name: String,
    pub pid: u32,
    /// Reason for the guest's end. None while it runs.
    pub end: Option<String>,
    pub backend: Option<String>,
    pub device: Option<String>,
    pub memory: u64,
    pub cpus: u8,
    pub version: String,
    /// Seconds since 1970.
    pub started: u64,
    pub socket: PathBuf,
    #[serde(skip)]
    pub up: String,
}

impl Entry {
    /// Returns the guest's backend: one that it shares, or the device of its own.
    pub fn place_of_work(&self) -> String {
        let own = || {
            let device = self.device.as_ref();
            device.map(|device| format!("its own ({device})"))
        };
        self.backend.clone().or_else(own).unwrap_or_default()
    }

    /// Returns the state: running, or the reason for its end.
    pub fn state(&self) -> &str {
        self.end.as_deref().unwrap_or("running")
    }
}

/// Returns the guests that this user can see: those that run, and those that ended by a failure.
pub fn entries() -> Result<Vec<Entry>, GuestsError> {
    let mut entries = Vec::new();
    for place in Place::all()? {
        let Some(record) = place.listed()? else {
            continue;
        };
        let lives = record.process.lives();
        let end = match lives {
            true => None,
            false => sentence_of(&place),
        };
        if !lives && end.is_none() {
            continue;
        }
        let (up, socket) = (record.up(), place.socket());
        let Record {
            process,
            version,
            started,
            facts,
        } = record;
        entries.push(Entry {
            name: place.name.to_string(),
            pid: process.pid,
            end,
            backend: facts.backend,
            device: facts.device,
            memory: facts.memory,
            cpus: facts.cpus,
            version,
            started,
            socket,
            up,
        });
    }
    Ok(entries)
}

fn list(json: bool) -> Result<(), GuestsError> {
    let entries = entries()?;
    if json {
        let text = serde_json::to_string_pretty(&entries).unwrap_or_default();
        say::result(format_args!("{text}"));
        return Ok(());
    }
    say::result(format_args!("{}", text("NAME", &entries).trim_end()));
    Ok(())
}

/// Returns a list for people. `name` is the title of the column of names.
pub fn text(name: &'static str, entries: &[Entry]) -> String {
    let rows: Vec<_> = entries
        .iter()
        .map(|guest| {
            [
                guest.name.clone(),
                guest.pid.to_string(),
                guest.up.clone(),
                guest.cpus.to_string(),
                table::bytes(guest.memory),
                guest.place_of_work(),
                guest.state().to_owned(),
            ]
        })
        .collect();
    table::format(
        [
            Column::Text(name),
            Column::Number("PID"),
            Column::Number("UP"),
            Column::Number("CPUS"),
            Column::Number("MEMORY"),
            Column::Text("BACKEND"),
            Column::Text("STATE"),
        ],
        &rows,
    )
}

fn logs(name: Name) -> Result<(), GuestsError> {
    let place = Place::own(name)?;
    if place.record()?.is_none() {
        return Err(GuestsError::NotRunning(place.name));
    }
    Ok(log::print(&place)?)
}
