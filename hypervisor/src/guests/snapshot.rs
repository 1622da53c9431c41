//! `wormhole guest snapshot`: saves a guest to a folder, from which `guest start --restore` goes on.
//!
//! The guest's process may open no file and accept no connection. The command opens the files of the snapshot and connects
//! to the guest's attendant, which passes the connection on. The command sends two files by it, and gets the answer.
//!
//! The guest's process, which a guest may have taken over, writes the state of the VM alone. The machine, whose paths
//! `guest start --restore` opens, is from [`machine::FILE`], which the process wrote before it was confined.

mod new_folder;

use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{CWD, FileType, Mode, OFlags, openat};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;
use wormhole_link::chain;
use wormhole_monitor::{AfterSnapshot, Snapshot, SnapshotError, SnapshotHandle, VmState};

use self::new_folder::NewFolder;
use super::machine::{self, Machine};
use super::start::END_LIMIT;
use super::{GuestsError, Place};
use crate::phases::Phases;
use crate::places::{Name, is_believed};
use crate::say;

/// Socket of a guest's folder that takes snapshots.
pub const SOCKET: &str = "snapshots";

/// File of a snapshot with the state of the VM.
const STATE: &str = "state.json";
/// File of a snapshot with the guest's memory.
const MEMORY: &str = "memory";

/// Version of [`STATE`]'s contents and of the devices that it describes.
const LAYOUT: u32 = 3;
/// Larger than any state: each of 64 vCPUs has 40 KiB of text.
const LARGEST_STATE: u64 = 64 << 20;

/// The first byte of an answer. Anything else is the reason for a refusal.
const SAVED: u8 = 0;
/// Longer than any answer.
const LONGEST_ANSWER: u64 = 64 << 10;

/// Contents of [`STATE`].
#[derive(Debug, Serialize, Deserialize)]
struct Saved {
    format: u32,
    vm: VmState,
}

/// The part of [`STATE`] that is the same in every format.
#[derive(Debug, Deserialize)]
struct Format {
    format: u32,
}

/// Reason why a snapshot cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "{} is of another kind or another user, or others can write it, so that it is not believed",
        .0.display()
    )]
    Foreign(PathBuf),
    #[error("{} is larger than {} MiB", path.display(), most >> 20)]
    Large { path: PathBuf, most: u64 },
    #[error("{} is not the {what} of a guest", path.display())]
    Contents {
        path: PathBuf,
        what: &'static str,
        #[source]
        source: serde_json::Error,
    },
    #[error(
        "{} is of another version of Wormhole: it has format {format}, and this version reads {LAYOUT}",
        path.display()
    )]
    Format { path: PathBuf, format: u32 },
}

/// Reads a snapshot: the machine, and its state.
///
/// # Errors
/// The folder has no snapshot, or one of another version. It, or a file of it, is of a user other than this one and root, or
/// others can write it.
pub fn load(folder: &Path) -> Result<(Machine, Snapshot), FolderError> {
    let folder = Folder::open(folder)?;
    let (path, text) = folder.read(STATE, LARGEST_STATE)?;
    let failed = |source| FolderError::Contents {
        path: path.clone(),
        what: "state",
        source,
    };
    let Format { format } = serde_json::from_slice(&text).map_err(failed)?;
    if format != LAYOUT {
        return Err(FolderError::Format { path, format });
    }
    let Saved { vm, .. } = serde_json::from_slice(&text).map_err(failed)?;
    let (path, text) = folder.read(machine::FILE, machine::LARGEST)?;
    let machine = serde_json::from_slice(&text).map_err(|source| FolderError::Contents {
        path,
        what: "machine",
        source,
    })?;
    let memory = folder.open_file(MEMORY)?;
    let snapshot = Snapshot { state: vm, memory };
    Ok((machine, snapshot))
}

/// Folder of a snapshot, whose files are all opened in the same one.
struct Folder {
    path: PathBuf,
    folder: OwnedFd,
}

impl Folder {
    fn open(path: &Path) -> Result<Self, FolderError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        let folder = open_in(CWD, path, flags, path, FileType::Directory)?;
        let path = path.to_owned();
        Ok(Self { path, folder })
    }

    /// Opens a file without waiting for the writer of a pipe.
    fn open_file(&self, name: &str) -> Result<File, FolderError> {
        let (name, path) = (Path::new(name), self.path.join(name));
        let flags = OFlags::RDONLY | OFlags::NONBLOCK;
        let file = open_in(&self.folder, name, flags, &path, FileType::RegularFile)?;
        Ok(file.into())
    }

    /// Reads a file of at most `most` bytes, and returns its path as well.
    fn read(&self, name: &str, most: u64) -> Result<(PathBuf, Vec<u8>), FolderError> {
        let file = self.open_file(name)?;
        let path = self.path.join(name);
        let mut text = Vec::new();
        match file.take(most + 1).read_to_end(&mut text) {
            Ok(length) if length as u64 > most => Err(FolderError::Large { path, most }),
            Ok(_) => Ok((path, text)),
            Err(source) => Err(FolderError::Read { path, source }),
        }
    }
}

/// Opens what this user believes and is of this kind, and follows no link to it.
fn open_in(
    folder: impl AsFd,
    name: &Path,
    flags: OFlags,
    path: &Path,
    kind: FileType,
) -> Result<OwnedFd, FolderError> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match openat(folder, name, flags, Mode::empty()) {
        Ok(file) if is_believed(&file, kind) => Ok(file),
        Ok(_) | Err(Errno::LOOP | Errno::NOTDIR) => Err(FolderError::Foreign(path.to_owned())),
        Err(error) => Err(FolderError::Read {
            path: path.to_owned(),
            source: error.into(),
        }),
    }
}

/// Saves a guest.
///
/// # Errors
/// The guest does not run, cannot be saved now, or the folder cannot be made.
pub fn save(name: &Name, folder: &Path, stop: bool) -> Result<(), GuestsError> {
    let place = Place::own(name.clone())?;
    let Some(record) = place.running()? else {
        return Err(GuestsError::NotRunning(name.clone()));
    };
    let made = NewFolder::make(folder);
    let mut made = made.map_err(|source| GuestsError::Write {
        path: folder.to_owned(),
        source,
    })?;
    let phase = Phases::of("saving the guest");
    let files = match save_in(&place, folder, &mut made, stop) {
        Ok(files) => files,
        Err(error) => {
            made.remove();
            return Err(error);
        }
    };
    phase.begin("writing the snapshot to stable storage");
    // The files stay, whatever happens from here on: a guest that has ended has no other copy.
    for file in files {
        file.sync_data().map_err(|source| GuestsError::Unsynced {
            name: name.clone(),
            folder: folder.to_owned(),
            source,
        })?;
    }
    drop(phase);
    let end = match stop {
        true => {
            // Fails only for a process of another user.
            let _ = record.process.end_after(END_LIMIT, END_LIMIT);
            ", and has ended"
        }
        false => ", and runs on",
    };
    say::result(format_args!(
        "guest {name} is saved in {}{end}",
        folder.display()
    ));
    Ok(())
}

/// Asks the guest's process for the snapshot, and returns its files. Nothing is saved if it fails.
fn save_in(
    place: &Place,
    path: &Path,
    folder: &mut NewFolder,
    stop: bool,
) -> Result<[File; 2], GuestsError> {
    let mut create = |name| {
        folder.create(name).map_err(|source| GuestsError::Write {
            path: path.join(name),
            source,
        })
    };
    let (state, memory) = (create(STATE)?, create(MEMORY)?);
    let machine = create(machine::FILE)?;
    copy_machine(place, &machine).map_err(|source| GuestsError::Machine {
        name: place.name.clone(),
        source,
    })?;
    // The guest may end with the snapshot: the names of the files are on stable storage before.
    folder.sync().map_err(|source| GuestsError::Write {
        path: path.to_owned(),
        source,
    })?;
    let failed = |source| GuestsError::Save {
        name: place.name.clone(),
        source,
    };
    let ask = || {
        let stream = UnixStream::connect(place.file(SOCKET))?;
        for (byte, file) in [(u8::from(stop), &state), (0, &memory)] {
            stream.send_with_fd(&[byte][..], file.as_raw_fd())?;
        }
        let mut answer = Vec::new();
        stream.take(LONGEST_ANSWER).read_to_end(&mut answer)?;
        Ok(answer)
    };
    let answer = ask().map_err(failed)?;
    match &answer[..] {
        [SAVED] => Ok([state, memory]),
        [] => Err(GuestsError::Unanswered(place.name.clone())),
        reason => Err(GuestsError::Unsaved {
            name: place.name.clone(),
            reason: String::from_utf8_lossy(reason).into_owned(),
        }),
    }
}

/// Copies the description of a guest's machine.
fn copy_machine(place: &Place, mut to: &File) -> io::Result<()> {
    let file = place.open(machine::FILE).map_err(io::Error::other)?;
    let mut file = file.ok_or(io::ErrorKind::NotFound)?.take(machine::LARGEST);
    io::copy(&mut file, &mut to)?;
    to.sync_data()
}

/// Serves the requests of snapshots in the guest's process, until the attendant has ended.
#[derive(Debug)]
pub struct Server {
    /// Brings the connections of commands.
    pub attendant: UnixStream,
    pub snapshots: SnapshotHandle,
    /// Set when the guest ends after a snapshot.
    pub is_saved: Arc<AtomicBool>,
}

impl Server {
    pub fn run(self) {
        for connection in connections(&self.attendant) {
            self.serve(connection);
        }
    }

    fn serve(&self, mut stream: UnixStream) {
        let (Some((stop, Some(state))), Some((_, Some(memory)))) =
            (receive(&stream), receive(&stream))
        else {
            return;
        };
        let Ok(copied) = memory.try_clone() else {
            return;
        };
        let is_saved = Arc::clone(&self.is_saved);
        let conclude = move |vm: Result<VmState, SnapshotError>| {
            let saved = vm.map(|vm| Saved { format: LAYOUT, vm });
            let (answer, after) = store(saved, &state, &copied, stop != 0);
            if after == AfterSnapshot::Stop {
                is_saved.store(true, Ordering::SeqCst);
            }
            // A command that was killed has no use for the answer.
            let _ = stream.write_all(&answer);
            after
        };
        self.snapshots.request(memory, Box::new(conclude));
    }
}

/// Returns the connections of commands, until the attendant has ended.
fn connections(attendant: &UnixStream) -> impl Iterator<Item = UnixStream> {
    let messages = std::iter::from_fn(|| receive(attendant));
    // A message comes without its connection where this process has no descriptor free.
    messages.filter_map(|(_, connection)| Some(OwnedFd::from(connection?).into()))
}

/// Receives one byte and the file beside it. Returns none at the end of the stream.
fn receive(stream: &UnixStream) -> Option<(u8, Option<File>)> {
    let mut byte = [0];
    loop {
        match stream.recv_with_fd(&mut byte) {
            Ok((1, file)) => return Some((byte[0], file)),
            Err(error) if error.errno() == libc::EINTR => {}
            _ => return None,
        }
    }
}

/// Stores the state of a guest, whose memory is in its file already. Returns the answer to the command, and how the guest goes
/// on: with `stop` it ends, unless its state or its memory cannot be brought to stable storage.
fn store(
    saved: Result<impl Serialize, SnapshotError>,
    state: &File,
    memory: &File,
    stop: bool,
) -> (Vec<u8>, AfterSnapshot) {
    let stored = saved.map_err(|error| refusal(&error)).and_then(|saved| {
        let stored = write(state, &saved).and_then(|()| match stop {
            true => state.sync_data().and_then(|()| memory.sync_data()),
            false => Ok(()),
        });
        stored.map_err(|error| format!("the host cannot store it: {error}"))
    });
    match stored {
        Ok(()) if stop => (vec![SAVED], AfterSnapshot::Stop),
        Ok(()) => (vec![SAVED], AfterSnapshot::Continue),
        Err(reason) => (reason.into_bytes(), AfterSnapshot::Continue),
    }
}

fn write(mut file: &File, saved: &impl Serialize) -> io::Result<()> {
    let mut writer = BufWriter::new(&mut file);
    serde_json::to_writer(&mut writer, saved)?;
    writer.flush()
}

/// Returns the reason for which a guest is not saved, by the words of its user: the guest's connections are of sessions.
fn refusal(error: &SnapshotError) -> String {
    let SnapshotError::Connections(open) = error else {
        return chain(error);
    };
    let ports: Vec<_> = open
        .iter()
        .map(|connection| connection.guest_port.to_string())
        .collect();
    let (sessions, port) = match ports.len() {
        1 => ("a program of it has a CUDA session", "port"),
        _ => ("programs of it have CUDA sessions", "ports"),
    };
    format!(
        "{sessions} open, which cannot be saved: end it first. `ss --vsock --processes` in the guest shows the processes \
         by their {port}: {}",
        ports.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;
    use wormhole_monitor::OpenConnection;

    fn refused(folder: &Path) -> String {
        chain(&load(folder).expect_err("no snapshot"))
    }

    #[test]
    fn a_folder_without_a_snapshot_is_refused_by_its_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let state = folder.path().join(STATE);
        assert!(refused(folder.path()).contains("state.json"));
        for (text, words) in [
            ("", "is not the state of a guest"),
            ("[]", "is not the state of a guest"),
            (r#"{"format": -1}"#, "is not the state of a guest"),
            (
                r#"{"format": 1, "vm": 7}"#,
                "it has format 1, and this version reads 3",
            ),
            (r#"{"format": 3}"#, "is not the state of a guest"),
        ] {
            fs::write(&state, text).expect("room");
            let refused = refused(folder.path());
            assert!(refused.contains(words), "{text}: {refused}");
        }
        let large = File::options().write(true).open(&state).expect("a file");
        large.set_len(LARGEST_STATE + 1).expect("room");
        assert!(refused(folder.path()).contains("larger than 64 MiB"));
        fs::remove_file(&state).expect("it is there");
        fs::create_dir(&state).expect("a folder");
        assert!(refused(folder.path()).contains("is not believed"));
    }

    #[test]
    fn a_snapshot_that_others_can_write_is_not_believed() {
        let folder = tempfile::tempdir().expect("a folder");
        let state = folder.path().join(STATE);
        fs::write(&state, r#"{"format": 1}"#).expect("room");
        for (path, mode) in [(state.as_path(), 0o600), (folder.path(), 0o700)] {
            let set = |mode| fs::set_permissions(path, Permissions::from_mode(mode));
            for bit in [0o020, 0o002] {
                set(mode | bit).expect("it is ours");
                let refused = refused(folder.path());
                let words = format!("{} is of another kind", path.display());
                assert!(refused.starts_with(&words), "{refused}");
            }
            set(mode).expect("it is ours");
            assert!(refused(folder.path()).contains("it has format 1"));
        }
        let link = folder.path().join("link");
        symlink(folder.path(), &link).expect("room");
        assert!(refused(&link).contains("is not believed"));
        let moved = folder.path().join("moved");
        fs::rename(&state, &moved).expect("it is ours");
        symlink(&moved, &state).expect("room");
        assert!(refused(folder.path()).contains("is not believed"));
    }

    #[test]
    fn open_sessions_are_found_by_their_ports() {
        let open = |ports: &[u32]| {
            let open = ports.iter().map(|&guest_port| OpenConnection {
                guest_port,
                host_port: 1,
            });
            refusal(&SnapshotError::Connections(open.collect()))
        };
        let one = open(&[1034]);
        assert!(
            one.contains("a program of it has a CUDA session open"),
            "{one}"
        );
        assert!(one.contains("port: 1034"), "{one}");
        let two = open(&[1034, 1035]);
        assert!(two.contains("ports: 1034, 1035"), "{two}");
        assert_eq!(refusal(&SnapshotError::Ended), "the guest has ended");
    }

    #[test]
    fn a_guest_whose_snapshot_does_not_reach_stable_storage_runs_on() {
        let file = tempfile::tempfile().expect("a file");
        // Takes what is written to it, and cannot be brought to stable storage.
        let zero = File::options().write(true).open("/dev/zero");
        let zero = zero.expect("a device");
        let unsynced = io::Error::from_raw_os_error(libc::EINVAL);
        let unsynced = format!("the host cannot store it: {unsynced}");
        for (state, memory) in [(&zero, &file), (&file, &zero)] {
            let (answer, after) = store(Ok("a state"), state, memory, true);
            assert_eq!(String::from_utf8(answer).expect("text"), unsynced);
            assert_eq!(after, AfterSnapshot::Continue);
            let runs_on = store(Ok("a state"), state, memory, false);
            assert_eq!(runs_on, (vec![SAVED], AfterSnapshot::Continue));
        }
        let ended = store(Ok("a state"), &file, &file, true);
        assert_eq!(ended, (vec![SAVED], AfterSnapshot::Stop));
    }

    #[test]
    fn a_message_without_a_connection_is_not_the_last_one() {
        let (mut ours, theirs) = UnixStream::pair().expect("a pair");
        let (command, _) = UnixStream::pair().expect("a pair");
        ours.write_all(&[0]).expect("room");
        ours.send_with_fd(&[0u8][..], command.as_raw_fd())
            .expect("sent");
        drop(ours);
        assert_eq!(connections(&theirs).count(), 1);
    }

    #[test]
    fn a_byte_comes_with_its_file() {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let file = tempfile::tempfile().expect("a file");
        ours.send_with_fd(&[7u8][..], file.as_raw_fd())
            .expect("sent");
        assert!(matches!(receive(&theirs), Some((7, Some(_)))));
        drop(ours);
        assert!(receive(&theirs).is_none());
    }
}
