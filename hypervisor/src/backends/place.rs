//! Folders of backends that outlive programs. Each has a folder of its own, with the socket, the
//! record of its process, and its log.
//!
//! The folder is a lock as well (flock(2)), held while a command starts or stops the backend.

use std::ffi::OsString;
use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};

use super::process::Process;

/// Variable that names another folder of backends.
pub const FOLDER_VARIABLE: &str = "WORMHOLE_RUNTIME";
/// Folder of root's backends.
const ROOT_FOLDER: &str = "/run/wormhole";

const SOCKET: &str = "socket";
const RECORD: &str = "record.json";
const LOG: &str = "log";

/// Reason why a backend's folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PlaceError {
    #[error(
        "there is no folder for backends' sockets: set XDG_RUNTIME_DIR, as a login does, or {FOLDER_VARIABLE}"
    )]
    NoFolder,
    #[error("{0} is not a folder that only its owner, this user, can write: remove it")]
    Unsafe(PathBuf),
    #[error("{path} cannot be used")]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("another command starts or stops backend {0}: wait for it")]
    Busy(Name),
    #[error("{path} is not the record of a backend: remove it")]
    Record {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
}

/// Name of a backend: part of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name(String);

impl FromStr for Name {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const LONGEST: usize = 32;
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let starts = text.starts_with(|c: char| c.is_ascii_alphanumeric());
        if starts && text.len() <= LONGEST && text.chars().all(is_plain) {
            return Ok(Self(text.to_owned()));
        }
        Err(format!(
            "a backend's name has 1 to {LONGEST} letters, digits, dots, dashes and underscores, and starts with a letter or digit"
        ))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Facts of a backend that its starter wrote down.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// The supervisor.
    pub process: Process,
    pub device: String,
    /// Version of Wormhole.
    pub version: String,
    /// Hash of the message table that its workers speak.
    pub protocol: u64,
    /// Time of the start, in seconds since 1970.
    pub started: u64,
}

/// Folder of one backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub name: Name,
    folder: PathBuf,
}

/// A place that no other command changes.
#[derive(Debug)]
pub struct Held {
    place: Place,
    _lock: File,
}

impl Place {
    /// Returns the place of this user's backend.
    ///
    /// # Errors
    /// The user has no folder for backends.
    pub fn own(name: Name) -> Result<Self, PlaceError> {
        Ok(Self {
            folder: own_folder()?.join(&name.0),
            name,
        })
    }

    /// Returns the place of the backend that this user can reach: the user's own, otherwise root's.
    ///
    /// # Errors
    /// There is no folder for backends.
    pub fn find(name: &Name) -> Result<Self, PlaceError> {
        let places = folders()?.into_iter().map(|folder| Self {
            folder: folder.join(&name.0),
            name: name.clone(),
        });
        let places: Vec<Self> = places.collect();
        let there = places
            .iter()
            .find(|place| matches!(place.running(), Ok(Some(_))));
        Ok(there.unwrap_or(&places[0]).clone())
    }

    /// Returns all places that this user can reach.
    ///
    /// # Errors
    /// A folder cannot be read.
    pub fn all() -> Result<Vec<Self>, PlaceError> {
        let mut places = Vec::new();
        for folder in folders()? {
            let entries = match fs::read_dir(&folder) {
                Ok(entries) => entries,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(source) => return Err(failed(&folder, source)),
            };
            let names = entries.flatten().filter_map(|entry| {
                let name = entry.file_name().to_str()?.parse().ok()?;
                Some(Self {
                    folder: entry.path(),
                    name,
                })
            });
            places.extend(names);
        }
        places.sort_by(|one, other| one.folder.cmp(&other.folder));
        Ok(places)
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.join(SOCKET)
    }

    pub fn log(&self) -> PathBuf {
        self.folder.join(LOG)
    }

    /// Returns the record of the backend, if its process lives.
    ///
    /// # Errors
    /// The record cannot be read, or is none.
    pub fn running(&self) -> Result<Option<Record>, PlaceError> {
        Ok(record_in(&self.folder)?.filter(|record| record.process.lives()))
    }

    /// Makes the folder, and holds it against other commands.
    ///
    /// # Errors
    /// The folder cannot be made safely, or another command holds it.
    pub fn hold(&self) -> Result<Held, PlaceError> {
        loop {
            if let Some(parent) = self.folder.parent() {
                make(parent, 0o755)?;
            }
            // Other users may search it, since the socket in it has an access list. They may not open
            // it: whoever can open a folder can lock it.
            make(&self.folder, 0o711)?;
            let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let lock = match rustix::fs::open(&self.folder, flags, Mode::empty()) {
                // Another command has stopped the backend and removed the folder.
                Err(Errno::NOENT) => continue,
                opened => File::from(opened.map_err(|error| failed(&self.folder, error.into()))?),
            };
            match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Err(Errno::WOULDBLOCK) => return Err(PlaceError::Busy(self.name.clone())),
                locked => locked.map_err(|error| failed(&self.folder, error.into()))?,
            }
            let identity = |data: fs::Metadata| (data.dev(), data.ino());
            let held = lock.metadata().map(identity).ok();
            if held == fs::symlink_metadata(&self.folder).map(identity).ok() {
                return Ok(Held {
                    place: self.clone(),
                    _lock: lock,
                });
            }
        }
    }
}

impl Held {
    /// Opens an empty log.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn open_log(&self) -> Result<File, PlaceError> {
        let path = self.place.log();
        let _ = fs::remove_file(&path);
        let mut options = OpenOptions::new();
        let log = options.append(true).create_new(true).mode(0o600);
        log.open(&path).map_err(|source| failed(&path, source))
    }

    /// Writes the record, whole or not at all.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, record: &Record) -> Result<(), PlaceError> {
        let (path, new) = (self.path(RECORD), self.path("record.new"));
        let text = serde_json::to_vec_pretty(record).unwrap_or_default();
        let _ = fs::remove_file(&new);
        let mut options = OpenOptions::new();
        let written = options
            .write(true)
            .create_new(true)
            .mode(0o644)
            .open(&new)
            .and_then(|mut file| file.write_all(&text))
            .and_then(|()| fs::rename(&new, &path));
        written.map_err(|source| failed(&path, source))
    }

    /// Returns whether no process but this one has its record here.
    pub fn is_of(&self, process: Process) -> bool {
        let record = record_in(&self.place.folder);
        record.is_ok_and(|record| record.is_none_or(|record| record.process == process))
    }

    /// Removes the folder.
    pub fn remove(self) {
        for file in [SOCKET, RECORD, LOG] {
            let _ = fs::remove_file(self.path(file));
        }
        // Fails if the folder has files of others, which stay.
        let _ = fs::remove_dir(&self.place.folder);
    }

    fn path(&self, file: &str) -> PathBuf {
        self.place.folder.join(file)
    }
}

/// Returns the record that lies in a folder, if there is one. Does not wait for the writer of a pipe.
///
/// # Errors
/// It cannot be read, or is none.
fn record_in(folder: &Path) -> Result<Option<Record>, PlaceError> {
    /// Longer than any record.
    const LONGEST: u64 = 64 << 10;
    let path = folder.join(RECORD);
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let text = match rustix::fs::open(&path, flags, Mode::empty()) {
        Ok(file) => io::read_to_string(io::Read::take(File::from(file), LONGEST)),
        Err(Errno::NOENT) => return Ok(None),
        Err(error) => Err(error.into()),
    };
    let text = text.map_err(|source| failed(&path, source))?;
    let record = serde_json::from_str(&text);
    record
        .map(Some)
        .map_err(|source| PlaceError::Record { path, source })
}

/// Returns the folder of this user's backends: [`FOLDER_VARIABLE`], otherwise `/run/wormhole` for
/// root and `$XDG_RUNTIME_DIR/wormhole` for others.
fn own_folder() -> Result<PathBuf, PlaceError> {
    let named = |name| std::env::var_os(name).filter(|value: &OsString| !value.is_empty());
    if let Some(folder) = named(FOLDER_VARIABLE) {
        return std::path::absolute(&folder).map_err(|source| failed(Path::new(&folder), source));
    }
    if geteuid().is_root() {
        return Ok(ROOT_FOLDER.into());
    }
    let folder = named("XDG_RUNTIME_DIR").map(PathBuf::from);
    let folder = folder.filter(|folder| folder.is_absolute());
    Ok(folder.ok_or(PlaceError::NoFolder)?.join("wormhole"))
}

/// Returns the folders of the backends that this user can reach: the user's own, and root's.
fn folders() -> Result<Vec<PathBuf>, PlaceError> {
    let roots = PathBuf::from(ROOT_FOLDER);
    match own_folder() {
        Ok(own) if own == roots || std::env::var_os(FOLDER_VARIABLE).is_some() => Ok(vec![own]),
        Ok(own) => Ok(vec![own, roots]),
        Err(PlaceError::NoFolder) => Ok(vec![roots]),
        Err(error) => Err(error),
    }
}

/// Makes a folder that only this user can write, unless it is there, and gives it the mode.
fn make(folder: &Path, mode: u32) -> Result<(), PlaceError> {
    match DirBuilder::new().mode(mode).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(failed(folder, error));
        }
        _ => {}
    }
    let data = match fs::symlink_metadata(folder) {
        // Another command has removed it.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        data => data.map_err(|source| failed(folder, source))?,
    };
    let is_own = data.is_dir() && data.uid() == geteuid().as_raw();
    if !is_own || data.mode() & 0o022 != 0 {
        return Err(PlaceError::Unsafe(folder.to_owned()));
    }
    if data.mode() & 0o777 == mode {
        return Ok(());
    }
    // The umask may have made it narrower, or an earlier version wider.
    match fs::set_permissions(folder, Permissions::from_mode(mode)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(folder, error)),
        _ => Ok(()),
    }
}

fn failed(path: &Path, source: io::Error) -> PlaceError {
    PlaceError::Io {
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn place(folder: &Path) -> Place {
        Place {
            name: "one".parse().unwrap(),
            folder: folder.join("all/one"),
        }
    }

    #[test]
    fn a_name_is_one_part_of_a_path() {
        for good in ["default", "a", "0.gpu-1_x", &"n".repeat(32)] {
            assert!(good.parse::<Name>().is_ok(), "{good}");
        }
        for bad in [
            "",
            ".",
            "..",
            ".x",
            "-x",
            "a/b",
            "a b",
            "ä",
            &"n".repeat(33),
        ] {
            assert!(bad.parse::<Name>().is_err(), "{bad}");
        }
    }

    #[test]
    fn one_command_holds_a_place_and_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let place = place(folder.path());
        let held = place.hold().unwrap();
        assert!(matches!(place.hold(), Err(PlaceError::Busy(_))));
        held.open_log().unwrap();
        let record = Record {
            process: Process::of(std::process::id()).unwrap(),
            device: "cpu".to_owned(),
            version: String::new(),
            protocol: u64::MAX,
            started: 1,
        };
        held.write(&record).unwrap();
        let running = place.running().unwrap().unwrap();
        assert_eq!((running.protocol, running.started), (u64::MAX, 1));
        held.remove();
        assert!(!place.folder.exists());
        assert!(place.running().unwrap().is_none());
        drop(place.hold().unwrap());
    }

    #[test]
    fn a_folder_that_others_write_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let place = place(folder.path());
        drop(place.hold().unwrap());
        let parent = place.folder.parent().unwrap();
        fs::set_permissions(parent, Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(place.hold(), Err(PlaceError::Unsafe(_))));
        fs::set_permissions(parent, Permissions::from_mode(0o755)).unwrap();
        fs::remove_dir(&place.folder).unwrap();
        symlink("/tmp", &place.folder).unwrap();
        assert!(matches!(place.hold(), Err(PlaceError::Unsafe(_))));
    }
}
