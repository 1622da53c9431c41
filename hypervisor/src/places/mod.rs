//! Folders of processes that outlive commands: of backends and of guests. Each has a folder of its own, with the socket,
//! the record of its process, and its logs.
//!
//! The folder is a lock as well (flock(2)), held while a command starts or stops the process.
//!
//! Files are read in folders of this user or of root alone, which no other user can write ([`Place::open`]): the facts in
//! them are processes to signal, sockets to connect to, and text for a terminal.

mod detached;
mod name;
mod process;

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::{CWD, FileType, FlockOperation, Mode, OFlags, flock, fstat, openat};
use rustix::io::Errno;
use rustix::process::geteuid;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use wormhole_link::users;

use crate::say;

pub use self::detached::{Detached, last_line, notify};
pub use self::name::Name;
pub use self::process::{End, Process};

/// Variable that names another folder.
const FOLDER_VARIABLE: &str = "WORMHOLE_RUNTIME";
/// Variable that a login sets for a user.
const USER_FOLDER_VARIABLE: &str = "XDG_RUNTIME_DIR";
/// Folder of root's processes.
const ROOT_FOLDER: &str = "/run/wormhole";

const SOCKET: &str = "socket";
const RECORD: &str = "record.json";
const LOG: &str = "log";

/// A kind of processes, with the facts of one that its starter writes down.
pub trait Kind: Clone + Serialize + DeserializeOwned {
    /// The kind's name, in errors.
    const NOUN: &'static str;
    /// Folder of this kind below that of the user.
    const FOLDER: &'static str;
    /// Files in a folder, beside the socket, the record and the log.
    const FILES: &'static [&'static str];
}

/// Reason why a folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PlaceError {
    #[error(
        "there is no folder for sockets: set {USER_FOLDER_VARIABLE}, as a login does, or {FOLDER_VARIABLE}"
    )]
    NoFolder,
    #[error("{0} is not a folder that only its owner, this user, can write: remove it")]
    Unsafe(PathBuf),
    #[error(
        "{0} is a link, of another kind or of another user, or others can write it, so that its facts are not believed: \
         remove it, or set {FOLDER_VARIABLE} to a folder of this user"
    )]
    Foreign(PathBuf),
    #[error("{path} cannot be used")]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("another command starts or stops {kind} {name}: wait for it")]
    Busy { kind: &'static str, name: Name },
    #[error("{path} is not the record of a {kind}: remove it")]
    Record {
        path: PathBuf,
        kind: &'static str,
        #[source]
        source: serde_json::Error,
    },
}

/// Facts of a process that its starter wrote down.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Record<K: Kind> {
    pub process: Process,
    /// Version of Wormhole.
    pub version: String,
    /// Time of the start, in seconds since 1970.
    pub started: u64,
    #[serde(flatten)]
    pub facts: K,
}

impl<K: Kind> Record<K> {
    /// Returns the record of a process that starts now.
    pub fn new(process: Process, facts: K) -> Self {
        Self {
            process,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            started: now(),
            facts,
        }
    }

    /// Returns the time since the start, by its two largest units.
    pub fn up(&self) -> String {
        duration(now().saturating_sub(self.started))
    }
}

/// Folder of one process.
#[derive(Clone, Debug)]
pub struct Place<K> {
    pub name: Name,
    /// Folder of all of a user's processes.
    root: PathBuf,
    kind: PhantomData<K>,
}

/// A place that no other command changes.
#[derive(Debug)]
pub struct Held<K> {
    place: Place<K>,
    _lock: File,
}

impl<K: Kind> Place<K> {
    fn below(root: &Path, name: Name) -> Self {
        Self {
            name,
            root: root.to_owned(),
            kind: PhantomData,
        }
    }

    fn folder(&self) -> PathBuf {
        self.root.join(K::FOLDER).join(self.name.as_str())
    }

    /// Returns the place of this user's process.
    ///
    /// # Errors
    /// The user has no folder.
    pub fn own(name: Name) -> Result<Self, PlaceError> {
        Ok(Self::below(&own_folder()?, name))
    }

    /// Returns the place of the process that this user can reach: the user's own, otherwise root's.
    ///
    /// # Errors
    /// There is no folder.
    pub fn find(name: &Name) -> Result<Self, PlaceError> {
        let folders = folders()?;
        let mut places = folders.iter().map(|root| Self::below(root, name.clone()));
        let there = places
            .clone()
            .find(|place| matches!(place.running(), Ok(Some(_))));
        there.or_else(|| places.next()).ok_or(PlaceError::NoFolder)
    }

    /// Returns all places that this user can reach.
    ///
    /// # Errors
    /// A folder cannot be read, or may be written by another user.
    pub fn all() -> Result<Vec<Self>, PlaceError> {
        let mut places = Vec::new();
        for root in folders()? {
            places.extend(believed(Self::all_below(&root))?);
        }
        places.sort_by_key(Self::folder);
        Ok(places)
    }

    fn all_below(root: &Path) -> Result<Vec<Self>, PlaceError> {
        let path = root.join(K::FOLDER);
        let Some(folder) = open_folders([root, Path::new(K::FOLDER)], OFlags::RDONLY)? else {
            return Ok(Vec::new());
        };
        let entries = rustix::fs::Dir::new(folder);
        let entries = entries.map_err(|error| failed(&path, error.into()))?;
        let names = entries.flatten().filter_map(|entry| {
            let name = entry.file_name().to_str().ok()?.parse().ok()?;
            Some(Self::below(root, name))
        });
        Ok(names.collect())
    }

    pub fn socket(&self) -> PathBuf {
        self.file(SOCKET)
    }

    pub fn log(&self) -> PathBuf {
        self.file(LOG)
    }

    /// Returns the path of another file of the place.
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder().join(name)
    }

    /// Returns the record of the process, if there is one. The process may have ended.
    ///
    /// # Errors
    /// The file cannot be read, is no record, or may be another user's.
    pub fn record(&self) -> Result<Option<Record<K>>, PlaceError> {
        /// Longer than any record.
        const LONGEST: u64 = 64 << 10;
        let Some(file) = self.open(RECORD)? else {
            return Ok(None);
        };
        let path = self.file(RECORD);
        let text = io::read_to_string(io::Read::take(file, LONGEST));
        let text = text.map_err(|source| failed(&path, source))?;
        let record = serde_json::from_str(&text);
        record.map(Some).map_err(|source| PlaceError::Record {
            path,
            kind: K::NOUN,
            source,
        })
    }

    /// Opens a file of the place for reading, if it is there. Follows no link, and does not wait for the writer of a pipe.
    ///
    /// # Errors
    /// The file cannot be opened. It, or a folder on the way from that of the user's processes, is of a user other than
    /// this one and root, or others can write it.
    pub fn open(&self, name: &str) -> Result<Option<File>, PlaceError> {
        let path = self.file(name);
        let parts = [
            self.root.as_path(),
            Path::new(K::FOLDER),
            Path::new(self.name.as_str()),
        ];
        // Other users may search root's folders, and may not list them.
        let Some(folder) = open_folders(parts, OFlags::PATH)? else {
            return Ok(None);
        };
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match openat(&folder, name, flags, Mode::empty()) {
            Err(Errno::NOENT) => Ok(None),
            Err(Errno::LOOP) => Err(PlaceError::Foreign(path)),
            Err(error) => Err(failed(&path, error.into())),
            Ok(file) if is_believed(&file, FileType::RegularFile) => Ok(Some(file.into())),
            Ok(_) => Err(PlaceError::Foreign(path)),
        }
    }

    /// Returns the record of the process, if it lives.
    ///
    /// # Errors
    /// The file cannot be read, or is no record.
    pub fn running(&self) -> Result<Option<Record<K>>, PlaceError> {
        Ok(self.record()?.filter(|record| record.process.lives()))
    }

    /// Returns the record for a list. A process whose facts are not believed is left out with a line that says so.
    ///
    /// # Errors
    /// Those of [`Self::record`], except for facts that are not believed.
    pub fn listed(&self) -> Result<Option<Record<K>>, PlaceError> {
        believed(self.record())
    }

    /// Makes the folder, and holds it against other commands.
    ///
    /// # Errors
    /// The folder cannot be made safely, or another command holds it.
    pub fn hold(&self) -> Result<Held<K>, PlaceError> {
        let folder = self.folder();
        loop {
            make(&self.root, 0o755)?;
            make(&self.root.join(K::FOLDER), 0o755)?;
            // Other users may search it, since a backend's socket has an access list. They may not open it: a
            // user who can open a folder can lock it.
            make(&folder, 0o711)?;
            let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let lock = match rustix::fs::open(&folder, flags, Mode::empty()) {
                // Another command has stopped the process and removed the folder.
                Err(Errno::NOENT) => continue,
                opened => File::from(opened.map_err(|error| failed(&folder, error.into()))?),
            };
            match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Err(Errno::WOULDBLOCK) => {
                    return Err(PlaceError::Busy {
                        kind: K::NOUN,
                        name: self.name.clone(),
                    });
                }
                locked => locked.map_err(|error| failed(&folder, error.into()))?,
            }
            let identity = |data: fs::Metadata| (data.dev(), data.ino());
            let held = lock.metadata().map(identity).ok();
            if held == fs::symlink_metadata(&folder).map(identity).ok() {
                return Ok(Held {
                    place: self.clone(),
                    _lock: lock,
                });
            }
        }
    }
}

impl<K: Kind> Held<K> {
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
    pub fn write(&self, record: &Record<K>) -> Result<(), PlaceError> {
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
        let record = self.place.record();
        record.is_ok_and(|record| record.is_none_or(|record| record.process == process))
    }

    /// Removes the files of an earlier process.
    pub fn clear(&self) {
        for file in [SOCKET, RECORD, LOG].iter().chain(K::FILES) {
            let _ = fs::remove_file(self.path(file));
        }
    }

    /// Removes the folder.
    pub fn remove(self) {
        self.clear();
        // Fails if the folder has files of others, which stay.
        let _ = fs::remove_dir(self.place.folder());
    }

    fn path(&self, file: &str) -> PathBuf {
        self.place.file(file)
    }
}

/// Opens a path of folders, one after the other, and the last one with the flags `last`. Returns `None` if a folder is
/// missing. Skips empty names.
///
/// # Errors
/// A folder cannot be opened, or is not believed.
fn open_folders<'a>(
    parts: impl IntoIterator<Item = &'a Path>,
    last: OFlags,
) -> Result<Option<OwnedFd>, PlaceError> {
    let (mut path, mut above) = (PathBuf::new(), None::<OwnedFd>);
    let parts = parts
        .into_iter()
        .filter(|part| !part.as_os_str().is_empty());
    for part in parts {
        path.push(part);
        // The user may have made the first one a link.
        let links = above.as_ref().map_or(OFlags::empty(), |_| OFlags::NOFOLLOW);
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC | links;
        let opened = match &above {
            Some(above) => openat(above, part, flags, Mode::empty()),
            None => openat(CWD, part, flags, Mode::empty()),
        };
        match opened {
            Ok(folder) if is_believed(&folder, FileType::Directory) => above = Some(folder),
            Ok(_) | Err(Errno::LOOP | Errno::NOTDIR) => return Err(PlaceError::Foreign(path)),
            Err(Errno::NOENT) => return Ok(None),
            Err(error) => return Err(failed(&path, error.into())),
        }
    }
    let Some(folder) = above else {
        return Ok(None);
    };
    if last.contains(OFlags::PATH) {
        return Ok(Some(folder));
    }
    let opened = openat(
        &folder,
        ".",
        last | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    );
    opened
        .map(Some)
        .map_err(|error| failed(&path, error.into()))
}

/// Returns whether an open file is of this kind, and neither its content nor its owner is another user's.
pub fn is_believed(file: &OwnedFd, kind: FileType) -> bool {
    fstat(file).is_ok_and(|data| {
        let is_kind = FileType::from_raw_mode(data.st_mode) == kind;
        is_kind && users::is_believed(data.st_uid) && data.st_mode & 0o022 == 0
    })
}

/// Prints an error about facts that are not believed, and returns the default, so that a list goes on with other processes.
fn believed<T: Default>(found: Result<T, PlaceError>) -> Result<T, PlaceError> {
    match found {
        Err(error @ PlaceError::Foreign(_)) => {
            say::line(format_args!("{error}"));
            Ok(T::default())
        }
        found => found,
    }
}

/// Returns the folder of this user's processes: [`FOLDER_VARIABLE`], otherwise `/run/wormhole` for
/// root and `$XDG_RUNTIME_DIR/wormhole` for others.
fn own_folder() -> Result<PathBuf, PlaceError> {
    let named = |name| std::env::var_os(name).filter(|value: &OsString| !value.is_empty());
    if let Some(folder) = named(FOLDER_VARIABLE) {
        return std::path::absolute(&folder).map_err(|source| failed(Path::new(&folder), source));
    }
    if geteuid().is_root() {
        return Ok(ROOT_FOLDER.into());
    }
    let folder = named(USER_FOLDER_VARIABLE).map(PathBuf::from);
    let folder = folder.filter(|folder| folder.is_absolute());
    Ok(folder.ok_or(PlaceError::NoFolder)?.join("wormhole"))
}

/// Returns the folders of the processes that this user can reach: the user's own, and root's.
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

/// Returns the seconds since 1970.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// Formats a number of seconds by its two largest units.
fn duration(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m{:02}s", seconds % 60),
        (0, ..) => format!("{hours}h{:02}m", minutes % 60),
        _ => format!("{days}d{:02}h", hours % 24),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[derive(Clone, Debug, Serialize, Deserialize)]
    struct Facts {
        protocol: u64,
    }

    impl Kind for Facts {
        const NOUN: &'static str = "thing";
        const FOLDER: &'static str = ".things";
        const FILES: &'static [&'static str] = &["console"];
    }

    fn place(folder: &Path) -> Place<Facts> {
        Place::below(&folder.join("all"), "one".parse().unwrap())
    }

    #[test]
    fn one_command_holds_a_place_and_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let place = place(folder.path());
        let held = place.hold().unwrap();
        assert!(matches!(place.hold(), Err(PlaceError::Busy { .. })));
        held.open_log().unwrap();
        let process = Process::of(std::process::id()).unwrap();
        held.write(&Record::new(process, Facts { protocol: u64::MAX }))
            .unwrap();
        let running = place.running().unwrap().unwrap();
        assert_eq!(running.facts.protocol, u64::MAX);
        assert!(running.started > 0 && held.is_of(process));
        fs::write(place.file("console"), "").unwrap();
        held.remove();
        assert!(!place.folder().exists());
        assert!(place.running().unwrap().is_none());
        drop(place.hold().unwrap());
    }

    #[test]
    fn a_folder_that_others_write_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let place = place(folder.path());
        drop(place.hold().unwrap());
        for above in [place.root.clone(), place.root.join(Facts::FOLDER)] {
            fs::set_permissions(&above, Permissions::from_mode(0o777)).unwrap();
            assert!(matches!(place.hold(), Err(PlaceError::Unsafe(_))));
            fs::set_permissions(&above, Permissions::from_mode(0o755)).unwrap();
        }
        fs::remove_dir(place.folder()).unwrap();
        symlink("/tmp", place.folder()).unwrap();
        assert!(matches!(place.hold(), Err(PlaceError::Unsafe(_))));
    }

    /// A place with a record and a socket's file.
    fn recorded(folder: &Path) -> Place<Facts> {
        let place = place(folder);
        let process = Process::of(std::process::id()).unwrap();
        let held = place.hold().unwrap();
        held.write(&Record::new(process, Facts { protocol: 1 }))
            .unwrap();
        place
    }

    fn is_foreign<T>(read: Result<T, PlaceError>) -> bool {
        matches!(read, Err(PlaceError::Foreign(_)))
    }

    #[test]
    fn facts_that_another_user_can_write_are_not_believed() {
        let folder = tempfile::tempdir().unwrap();
        let place = recorded(folder.path());
        let kind = place.root.join(Facts::FOLDER);
        assert!(place.running().unwrap().is_some());
        for path in [&place.root, &kind, &place.folder(), &place.file(RECORD)] {
            let mode = fs::metadata(path).unwrap().permissions();
            for bit in [0o020, 0o002] {
                let wider = Permissions::from_mode(mode.mode() | bit);
                fs::set_permissions(path, wider).unwrap();
                assert!(is_foreign(place.running()), "{path:?}");
            }
            fs::set_permissions(path, mode).unwrap();
        }
        for path in [&place.root, &kind] {
            fs::set_permissions(path, Permissions::from_mode(0o757)).unwrap();
            assert!(is_foreign(Place::<Facts>::all_below(&place.root)));
            fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
        }
        let all = Place::<Facts>::all_below(&place.root).unwrap();
        assert_eq!(all.len(), 1);
        // A link leads to files that are another's.
        let moved = place.root.join("moved");
        fs::rename(place.folder(), &moved).unwrap();
        symlink(&moved, place.folder()).unwrap();
        assert!(is_foreign(place.running()));
    }

    #[test]
    fn facts_of_another_user_are_not_believed() {
        if !geteuid().is_root() {
            eprintln!("skipped: only root gives files to another user");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let place = recorded(folder.path());
        let kind = place.root.join(Facts::FOLDER);
        for path in [&place.root, &kind, &place.folder(), &place.file(RECORD)] {
            std::os::unix::fs::chown(path, Some(65534), None).unwrap();
            assert!(is_foreign(place.running()), "{path:?}");
            std::os::unix::fs::chown(path, Some(0), None).unwrap();
        }
        assert!(place.running().unwrap().is_some());
        std::os::unix::fs::chown(&kind, Some(65534), None).unwrap();
        assert!(is_foreign(Place::<Facts>::all_below(&place.root)));
    }

    #[test]
    fn a_time_has_two_units() {
        for (seconds, text) in [
            (0, "0s"),
            (59, "59s"),
            (61, "1m01s"),
            (7260, "2h01m"),
            (90_000, "1d01h"),
        ] {
            assert_eq!(duration(seconds), text);
        }
    }
}
