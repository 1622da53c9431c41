//! `--collect`: copies files of a guest to the host when its program has ended.
//!
//! The launcher of a guest may not open files once the guest runs. So a process for each option is started before, and
//! receives the files on standard input. The place must be new, so that the copy neither changes a file of the caller
//! nor follows a link that a guest has made. Names in a folder are the guest's: [`Collected::read`] refuses those that
//! lead out of it. A copy that fails removes the part that it has written.
//!
//! The process survives the terminal's signals: the launcher blocks those that it passes on before it starts the process,
//! which inherits that, and the terminal sends none of the others to the process's group, as Ctrl+Z would.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Component, Path, PathBuf};
use std::process::{Child, Command, Stdio};

use clap::Args;
use rustix::fs::{Access, AtFlags, Mode, OFlags, accessat, mkdirat, openat, statat, unlinkat};
use rustix::io::Errno;
use wormhole_images::{Absence, COLLECT_BYTES, COLLECT_DEPTH, COLLECT_FILES, Collected};
use wormhole_link::tasks;

use super::parent::open_parent;
use super::record::MODE;
use crate::say;
use crate::signals::Set;

/// Most options of a run: each has a process.
const MOST: usize = 8;

/// Permissions of a new folder, less the caller's mask.
const FOLDER_MODE: Mode = Mode::from_raw_mode(0o777);

/// Files to copy, as given by `--collect`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collect {
    pub guest: PathBuf,
    pub host: PathBuf,
}

/// Reason why a run cannot collect files.
#[derive(Debug, thiserror::Error)]
pub enum CollectError {
    #[error("a run cannot collect {0} paths: at most {MOST} are possible")]
    Count(usize),
    #[error("--collect and another option write {}: give each a place of its own", .0.display())]
    SamePlace(PathBuf),
    #[error("--collect would overwrite {}: remove it, or name another place", .0.display())]
    Exists(PathBuf),
    #[error("cannot collect files in {}", .0.display())]
    Place(PathBuf, #[source] io::Error),
    #[error("cannot start the process that collects files")]
    Start(#[source] io::Error),
}

impl Collect {
    /// Parses `GUEST[:HOST]`. The guest's path has no colon.
    pub fn parse(text: OsString) -> Result<Self, &'static str> {
        let mut parts = text.as_bytes().splitn(2, |byte| *byte == b':');
        let guest = Path::new(OsStr::from_bytes(parts.next().unwrap_or_default()));
        let mut components = guest.components();
        let is_absolute = components.next() == Some(Component::RootDir);
        let are_names = components.all(|part| matches!(part, Component::Normal(_)));
        let Some(name) = guest.file_name().filter(|_| is_absolute && are_names) else {
            return Err(
                "write GUEST or GUEST:HOST, where GUEST is a path below / without . and ..",
            );
        };
        let host = match parts.next() {
            None => Path::new(name),
            Some(host) => Path::new(OsStr::from_bytes(host)),
        };
        if host.file_name().is_none() {
            return Err("the place on this machine needs a name of its own");
        }
        Ok(Self {
            guest: guest.components().collect(),
            host: host.to_owned(),
        })
    }

    /// Returns the text that [`parse`](Self::parse) reads.
    pub fn text(&self) -> OsString {
        [self.guest.as_os_str(), self.host.as_os_str()].join(OsStr::new(":"))
    }
}

/// Refuses options that are impossible. `others` are further files that the run writes.
pub fn check(collects: &[Collect], others: &[&Path]) -> Result<(), CollectError> {
    if collects.len() > MOST {
        return Err(CollectError::Count(collects.len()));
    }
    let hosts = collects.iter().map(|collect| collect.host.as_path());
    let all: Vec<&Path> = hosts.chain(others.iter().copied()).collect();
    let place = |path: &Path| std::path::absolute(path).ok();
    for (index, path) in all.iter().enumerate() {
        let is_same = |other: &&Path| place(other) == place(path);
        if all[..index].iter().any(is_same) {
            return Err(CollectError::SamePlace(path.to_path_buf()));
        }
    }
    Ok(())
}

/// Arguments of the process.
#[derive(Debug, Args)]
pub struct Options {
    /// Path of the files in the guest, for messages.
    guest: PathBuf,
    /// Place of the copy. Standard output is its folder.
    host: PathBuf,
}

/// Failure of a copy.
#[derive(Debug, thiserror::Error)]
#[error("cannot copy {} to {}", .guest.display(), .host.display())]
pub struct CopyError {
    guest: PathBuf,
    host: PathBuf,
    source: io::Error,
}

/// Runs as the process.
///
/// # Errors
/// The files are incomplete or cannot be written.
pub fn copy(options: &Options) -> Result<(), CopyError> {
    // A message to a terminal that stops what writes from the background (`stty tostop`) would stop this process for good.
    Set::of(&[libc::SIGTTOU]).block();
    let copied = read(io::stdin().lock()).and_then(|files| {
        files.map_or(Ok(()), |files| create(io::stdout(), &options.host, &files))
    });
    copied.map_err(|source| CopyError {
        guest: options.guest.clone(),
        host: options.host.clone(),
        source,
    })
}

/// Reads files; `None` if the launcher has none.
fn read(mut input: impl BufRead) -> io::Result<Option<Collected>> {
    if input.fill_buf()?.is_empty() {
        return Ok(None);
    }
    let mut left = COLLECT_BYTES;
    let read = Collected::read(&mut input, &mut left);
    read.map(Some).map_err(io::Error::other)
}

/// Creates a file, or a folder with its files, in the folder `parent`; on a failure neither.
fn create(parent: impl AsFd, host: &Path, collected: &Collected) -> io::Result<()> {
    let name = host.file_name().ok_or(Errno::ISDIR)?;
    match collected {
        Collected::Absent(_) => Ok(()),
        Collected::File(data) => write(parent, name, data),
        Collected::Folder(files) => {
            mkdirat(&parent, name, FOLDER_MODE)?;
            let folder = enter(&parent, name)?;
            for (written, (path, data)) in files.iter().enumerate() {
                if let Err(error) = write_below(&folder, path, data) {
                    remove(&folder, files[..=written].iter().map(|(path, _)| path));
                    // Stays if a guest has put something there.
                    let _ = unlinkat(&parent, name, AtFlags::REMOVEDIR);
                    return Err(error);
                }
            }
            Ok(())
        }
    }
}

/// Removes files of a collected folder, and the folders on their ways that are empty then. The last file is not there:
/// it could not be written.
fn remove<'a>(folder: &OwnedFd, files: impl DoubleEndedIterator<Item = &'a PathBuf>) {
    let mut is_written = false;
    for path in files.rev() {
        for part in path.ancestors() {
            let (Some(name), Some(parent)) = (part.file_name(), part.parent()) else {
                break;
            };
            let flags = match part == path {
                true if !is_written => continue,
                true => AtFlags::empty(),
                false => AtFlags::REMOVEDIR,
            };
            let removed = match parent.as_os_str().is_empty() {
                true => unlinkat(folder, name, flags),
                false => way_to(folder, parent).and_then(|above| unlinkat(above, name, flags)),
            };
            // A folder that stays has other files, or a guest has put something there. The folders above it stay as well.
            if removed.is_err() && flags == AtFlags::REMOVEDIR {
                break;
            }
        }
        is_written = true;
    }
}

/// Opens a folder of a collected folder.
fn way_to(folder: &OwnedFd, path: &Path) -> Result<OwnedFd, Errno> {
    let mut parts = path.iter();
    let first = enter(folder, parts.next().unwrap_or_default())?;
    parts.try_fold(first, enter)
}

/// Writes a file of a collected folder, whose name has no `..`, and makes the folders on the way.
fn write_below(folder: &OwnedFd, name: &Path, data: &[u8]) -> io::Result<()> {
    let mut way: Option<OwnedFd> = None;
    for part in name.parent().into_iter().flat_map(Path::iter) {
        let above = way.as_ref().unwrap_or(folder);
        match mkdirat(above, part, FOLDER_MODE) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        way = Some(enter(above, part)?);
    }
    let name = name.file_name().ok_or(Errno::ISDIR)?;
    write(way.as_ref().unwrap_or(folder), name, data)
}

fn enter(above: impl AsFd, name: &OsStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(above, name, flags, Mode::empty())
}

/// Writes a new file; on a failure there is none.
fn write(folder: impl AsFd, name: &OsStr, data: &[u8]) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(openat(&folder, name, flags, MODE)?);
    let written = file.write_all(data);
    if written.is_err() {
        let _ = unlinkat(folder, name, AtFlags::empty());
    }
    written
}

/// Launcher's handle on the processes, one for each option.
#[derive(Debug)]
pub struct Collectors(Vec<Collector>);

#[derive(Debug)]
struct Collector {
    guest: PathBuf,
    process: Child,
}

impl Collectors {
    /// Finds each place and starts its process. Follows no link in the guest's `volumes`.
    ///
    /// # Errors
    /// A place is there already, its folder cannot be written, or a process cannot be created.
    pub fn start(
        wormhole: &Path,
        collects: &[Collect],
        volumes: &[&Path],
    ) -> Result<Self, CollectError> {
        // All places are found before the first process starts.
        let folders = collects
            .iter()
            .map(|collect| find(&collect.host, volumes))
            .collect::<Result<Vec<OwnedFd>, _>>()?;
        let collectors = collects.iter().zip(folders).map(|(collect, folder)| {
            let process = Command::new(wormhole)
                .args(["collect", "--"])
                .args([&collect.guest, &collect.host])
                .stdin(Stdio::piped())
                .stdout(folder)
                .process_group(0)
                .spawn();
            Ok(Collector {
                guest: collect.guest.clone(),
                process: process.map_err(|error| CollectError::Start(tasks::named(error)))?,
            })
        });
        collectors.collect::<Result<_, _>>().map(Self)
    }

    /// Copies the files. Returns whether all of them were there and are written. Otherwise a line on standard error says
    /// why. `is_absence_said`: a command on the emulated host has printed why a path that it should have written is missing.
    pub fn copy(self, collected: Vec<Collected>, is_absence_said: bool) -> bool {
        let mut all = true;
        let mut collected = collected.into_iter();
        for collector in self.0 {
            let guest = collector.guest.clone();
            let why = match collected.next() {
                Some(Collected::Absent(absence)) => NotCollected::Absent(absence),
                Some(files) => {
                    all &= collector.copy(&files);
                    continue;
                }
                None => NotCollected::Unreported,
            };
            all = false;
            let is_said = matches!(why, NotCollected::Absent(Absence::Missing)) && is_absence_said;
            if !is_said {
                say::line(format_args!("cannot collect {}: {why}", guest.display()));
            }
        }
        all
    }
}

impl Collector {
    /// Sends the files, and waits until they are written. Returns whether they are.
    fn copy(mut self, files: &Collected) -> bool {
        if let Some(mut input) = self.process.stdin.take() {
            // A process that has ended has printed the reason.
            let _ = files.write(&mut input);
        }
        self.process.wait().is_ok_and(|status| status.success())
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}

/// Returns the folder of a new file or folder, in which the caller may make one.
fn find(host: &Path, volumes: &[&Path]) -> Result<OwnedFd, CollectError> {
    let failed = |error| CollectError::Place(host.to_owned(), error);
    let (folder, _) = open_parent(host, volumes).map_err(failed)?;
    let name = host.file_name().unwrap_or_default();
    match statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => {}
        Ok(_) => return Err(CollectError::Exists(host.to_owned())),
        Err(error) => return Err(failed(error.into())),
    }
    let access = accessat(
        &folder,
        ".",
        Access::WRITE_OK | Access::EXEC_OK,
        AtFlags::EACCESS,
    );
    access.map_err(|error| failed(error.into()))?;
    Ok(folder)
}

/// Reason why a path of the guest was not copied.
#[derive(Clone, Copy, Debug)]
enum NotCollected {
    Absent(Absence),
    /// The guest was killed, or its report says nothing of the path.
    Unreported,
}

impl fmt::Display for NotCollected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreported => f.write_str("the guest ended before it reported this path"),
            Self::Absent(Absence::Missing) => {
                f.write_str("the program has left no such file or folder")
            }
            Self::Absent(Absence::Special) => {
                f.write_str("it is neither a regular file nor a folder")
            }
            Self::Absent(Absence::Unreadable) => f.write_str("the guest cannot read it"),
            Self::Absent(Absence::Large) => write!(
                f,
                "a run collects at most {} MiB; have the program write more to a folder of --volume",
                COLLECT_BYTES >> 20
            ),
            Self::Absent(Absence::Many) => write!(
                f,
                "it has more than {COLLECT_FILES} files, or folders more than {COLLECT_DEPTH} deep; have the program \
                 write them to a folder of --volume"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, symlink};

    use rustix::process::{Pid, getpgid};
    use wormhole_link::chain;

    use super::*;
    use crate::signals::PASSED;

    fn folder(files: &[(&str, &str)]) -> Collected {
        let files = files
            .iter()
            .map(|(name, data)| (name.into(), data.as_bytes().into()));
        Collected::Folder(files.collect())
    }

    fn open(path: &Path) -> OwnedFd {
        File::open(path).expect("a folder").into()
    }

    #[test]
    fn an_option_is_read_back() {
        for (text, guest, host) in [
            ("/tmp/out", "/tmp/out", "out"),
            ("/tmp//out/", "/tmp/out", "out"),
            ("/tmp/out:a:b", "/tmp/out", "a:b"),
            ("/a:../b/c/", "/a", "../b/c/"),
        ] {
            let collect = Collect::parse(text.into()).expect(text);
            assert_eq!(collect.guest, Path::new(guest), "{text}");
            assert_eq!(collect.host, Path::new(host), "{text}");
            assert_eq!(Collect::parse(collect.text()), Ok(collect));
        }
    }

    #[test]
    fn files_have_the_places_of_their_names() {
        let host = tempfile::tempdir().expect("a folder");
        let at = |name: &str| host.path().join(name);
        let files = folder(&[("a/b/c", "deep"), ("a/d", ""), ("e", "flat")]);
        create(open(host.path()), Path::new("no/matter/out"), &files).expect("a copy");
        let read = |name: &str| fs::read_to_string(at(name)).expect(name);
        assert_eq!(
            ["out/a/b/c", "out/a/d", "out/e"].map(read),
            ["deep", "", "flat"]
        );
        create(open(host.path()), Path::new("empty"), &folder(&[])).expect("a copy");
        assert!(at("empty").is_dir());
        let file = Collected::File(b"text".to_vec());
        create(open(host.path()), Path::new("file"), &file).expect("a copy");
        assert_eq!(read("file"), "text");
        assert_eq!(at("file").metadata().expect("a file").mode() & 0o111, 0);
    }

    #[test]
    fn a_place_that_is_there_is_neither_changed_nor_followed() {
        let host = tempfile::tempdir().expect("a folder");
        let at = |name: &str| host.path().join(name);
        fs::create_dir(at("other")).expect("a folder");
        fs::write(at("file"), "precious").expect("a file");
        symlink(at("other"), at("to_folder")).expect("a link");
        symlink(at("new"), at("to_none")).expect("a link");
        for name in ["other", "file", "to_folder", "to_none"] {
            let found = find(&at(name), &[]).expect_err(name);
            assert!(matches!(found, CollectError::Exists(_)), "{name}: {found}");
            // As if a guest had made it meanwhile.
            for files in [folder(&[("a", "text")]), Collected::File(b"text".to_vec())] {
                let refused = create(open(host.path()), Path::new(name), &files);
                let refused = refused.expect_err(name);
                assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists, "{name}");
            }
        }
        assert_eq!(fs::read(at("file")).expect("the file"), b"precious");
        assert!(!at("other/a").exists() && !at("new").exists());
        // A name below one that is a file, and one that comes twice.
        let twice = [("a", "1"), ("a", "2")];
        let below = [("a", "1"), ("a/b", "2")];
        for (name, files) in [("twice", twice), ("below", below)] {
            create(open(host.path()), Path::new(name), &folder(&files)).expect_err(name);
            assert!(!at(name).exists(), "a part of {name} is left");
        }
    }

    #[test]
    fn a_copy_that_fails_leaves_no_part() {
        let host = tempfile::tempdir().expect("a folder");
        let at = |name: &str| host.path().join(name);
        // The last path is too long for the file system.
        let long = format!("c/{}", "x".repeat(300));
        let files = folder(&[("a/b/1", "1"), ("a/2", "2"), ("3", "3"), (&long, "4")]);
        create(open(host.path()), Path::new("out"), &files).expect_err("a long name");
        assert_eq!(fs::read_dir(host.path()).expect("a folder").count(), 0);
        // Other files stay.
        fs::create_dir_all(at("out/a")).expect("folders");
        fs::write(at("out/a/own"), "text").expect("a file");
        fs::write(at("out/a/2"), "text").expect("a file");
        let paths = ["a/2", "a/unwritten"].map(PathBuf::from);
        remove(&open(&at("out")), paths.iter());
        let left = fs::read_dir(at("out/a")).expect("a folder");
        let left: Vec<_> = left
            .map(|entry| entry.expect("an entry").file_name())
            .collect();
        assert_eq!(left, ["own"]);
    }

    #[test]
    fn the_terminals_signals_do_not_reach_the_process() {
        let host = tempfile::tempdir().expect("a folder");
        let collect = Collect {
            guest: "/out".into(),
            host: host.path().join("out"),
        };
        // As the launcher does first of all.
        Set::of(&PASSED).block();
        let program = Path::new("/bin/true");
        let collectors = Collectors::start(program, &[collect], &[]).expect("a process");
        let process = collectors.0[0].process.id();
        let pid = Pid::from_raw(process.cast_signed());
        assert_eq!(getpgid(pid).expect("a process"), pid.expect("a number"));
        let status = fs::read_to_string(format!("/proc/{process}/status"));
        let status = status.expect("a process");
        let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:"));
        let blocked = u64::from_str_radix(blocked.expect("a mask").trim(), 16).expect("a number");
        for signal in PASSED {
            assert_ne!(blocked & 1 << (signal - 1), 0, "{signal}");
        }
        Set::of(&PASSED).unblock();
    }

    #[test]
    fn a_link_that_comes_into_the_folder_is_not_followed() {
        let host = tempfile::tempdir().expect("a folder");
        let at = |name: &str| host.path().join(name);
        fs::create_dir(at("out")).expect("a folder");
        fs::create_dir(at("other")).expect("a folder");
        symlink(at("other"), at("out/a")).expect("a link");
        symlink(at("other/new"), at("out/b")).expect("a link");
        for name in ["a/file", "b"] {
            write_below(&open(&at("out")), Path::new(name), b"text").expect_err(name);
        }
        assert_eq!(fs::read_dir(at("other")).expect("a folder").count(), 0);
    }

    #[test]
    fn places_are_found_before_a_run() {
        let host = tempfile::tempdir().expect("a folder");
        let at = |name: &str| host.path().join(name);
        fs::create_dir_all(at("volume/in")).expect("folders");
        symlink(host.path(), at("volume/out")).expect("a link");
        let volume = at("volume");
        find(&at("volume/in/new"), &[&volume]).expect("a place in a volume");
        let refused = find(&at("volume/out/new"), &[&volume]).expect_err("a link");
        assert!(chain(&refused).contains("a link in a volume"), "{refused}");
        for name in ["none/new", "volume/in/../../none/new"] {
            let refused = find(&at(name), &[]).expect_err(name);
            assert!(
                matches!(refused, CollectError::Place(..)),
                "{name}: {refused}"
            );
        }
    }

    #[test]
    fn files_that_end_early_are_not_written() {
        assert!(read(&b""[..]).expect("a launcher that failed").is_none());
        assert!(read(&b"file 3\nab"[..]).is_err());
        let read = read(&b"file 3\nabc\n"[..]).expect("a file");
        assert_eq!(read, Some(Collected::File(b"abc".to_vec())));
    }
}
