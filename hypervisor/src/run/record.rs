//! Process that writes a run's summary to its file.
//!
//! The launcher of a guest may not open files once the guest runs. So this process is started
//! before, and receives the summary on standard input. Without a summary it writes nothing: a
//! launcher that fails leaves no file.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::process::{Child, Command, Stdio};

use clap::Args;
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, StatxFlags, fstat, openat, readlinkat, statat, statx,
    unlinkat,
};
use rustix::io::Errno;
use wormhole_link::tasks;

use super::summary::Summary;
use crate::say;

/// Limit on the size of a summary, above any real one.
const MOST_BYTES: u64 = 64 << 20;

/// Arguments of the process.
#[derive(Debug, Args)]
pub struct Options {
    /// Standard output is the file, open already. Otherwise it is the file's folder.
    #[arg(long)]
    open: bool,
    /// The file, for messages.
    path: PathBuf,
}

/// Runs as the process.
pub fn write(options: &Options) {
    let mut summary = Vec::new();
    let read = io::stdin().take(MOST_BYTES).read_to_end(&mut summary);
    if matches!(read, Ok(0)) {
        return;
    }
    let written = read.and_then(|_| match options.open {
        true => io::stdout().write_all(&summary),
        false => create(io::stdout(), &options.path).and_then(|mut file| file.write_all(&summary)),
    });
    // A failure to write does not change the exit status, which is the program's.
    if let Err(error) = written.and_then(|()| io::stdout().flush()) {
        say::line(format_args!(
            "cannot write {}: {error}",
            options.path.display()
        ));
    }
}

/// Creates the file in its folder. The guest may have made a file of that name meanwhile, or a link: neither is written.
fn create(folder: impl AsFd, path: &Path) -> io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let name = path.file_name().ok_or(Errno::ISDIR)?;
    Ok(File::from(openat(folder, name, flags, MODE)?))
}

/// Permissions of a new file, less the caller's mask.
const MODE: Mode = Mode::from_raw_mode(0o666);

/// Place of a summary. Its folder is found before a guest runs.
#[derive(Debug)]
pub struct Place {
    path: PathBuf,
    folder: OwnedFd,
    /// The file itself, if it must stay open.
    open: Option<File>,
}

impl Place {
    /// Finds the place and checks that a file can be written there. Removes the file again, so that a run that fails
    /// leaves neither an empty summary nor one of another run. A named pipe, a device or a link stays open: the reader of
    /// a pipe would otherwise see its end, and not open it a second time.
    ///
    /// Follows no link in the guest's `volumes`: it or an earlier guest can have made it.
    ///
    /// # Errors
    /// No file can be written there.
    pub fn find(path: &Path, volumes: &[&Path]) -> io::Result<Self> {
        let name = path.file_name().ok_or(Errno::ISDIR)?;
        let parent = path
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new("."));
        let (folder, is_guests) = open_folder(parent, volumes).map_err(of_links)?;
        let links = if is_guests {
            OFlags::NOFOLLOW
        } else {
            OFlags::empty()
        };
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC | links;
        let file = openat(&folder, name, flags, MODE).map_err(of_links)?;
        let data = statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let is_file = FileType::from_raw_mode(data.st_mode) == FileType::RegularFile;
        if is_file {
            unlinkat(&folder, name, AtFlags::empty())?;
        }
        Ok(Self {
            path: path.to_owned(),
            folder,
            open: (!is_file).then(|| File::from(file)),
        })
    }
}

/// Most links on the way to a folder, as of the kernel.
const MOST_LINKS: usize = 40;

/// Identity of a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    device: (u32, u32),
    inode: u64,
    /// Number of the mount by which it was reached, if the kernel tells it (Linux 5.8).
    mount: Option<u64>,
}

impl Identity {
    fn of(folder: impl AsFd, path: &Path) -> Result<Self, Errno> {
        let flags = AtFlags::EMPTY_PATH;
        let data = statx(folder, path, flags, StatxFlags::INO | StatxFlags::MNT_ID)?;
        let tells_mount = data.stx_mask & StatxFlags::MNT_ID.bits() != 0;
        Ok(Self {
            device: (data.stx_dev_major, data.stx_dev_minor),
            inode: data.stx_ino,
            mount: tells_mount.then_some(data.stx_mnt_id),
        })
    }

    /// Returns whether the folder is a volume, or may be a part of it: its file system is the volume's by another mount,
    /// which can begin anywhere below the volume.
    fn may_be_of(&self, volume: &Self) -> bool {
        let is_volume = self.inode == volume.inode;
        self.device == volume.device && (is_volume || self.mount != volume.mount)
    }
}

/// Opens a folder part by part. Returns it, and whether it may lie in one of the volumes. Follows links outside of these.
fn open_folder(folder: &Path, volumes: &[&Path]) -> Result<(OwnedFd, bool), Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let root = || openat(CWD, "/", flags, Mode::empty());
    let volumes = volumes.iter().map(|volume| Identity::of(CWD, volume));
    let volumes: Vec<Identity> = volumes.flatten().collect();
    let absolute = std::path::absolute(folder).map_err(|_| Errno::NOENT)?;
    let mut parts: Vec<OsString> = parts_of(&absolute);
    // The folders on the way, each with whether it lies in a volume.
    let mut way = vec![(root()?, false)];
    let mut links = 0;
    while let Some(part) = parts.pop() {
        if part == ".." {
            if way.len() > 1 {
                way.pop();
            }
            continue;
        }
        let (above, is_in) = way.last().ok_or(Errno::NOENT)?;
        let found = openat(above, &part, flags, Mode::empty())?;
        let data = fstat(&found)?;
        if FileType::from_raw_mode(data.st_mode) != FileType::Symlink {
            let own = Identity::of(&found, Path::new(""))?;
            let is_in = *is_in || volumes.iter().any(|volume| own.may_be_of(volume));
            way.push((found, is_in));
            continue;
        }
        links += 1;
        if *is_in || links > MOST_LINKS {
            return Err(Errno::LOOP);
        }
        let target = readlinkat(above, &part, Vec::new())?;
        let target = Path::new(OsStr::from_bytes(target.to_bytes()));
        if target.is_absolute() {
            way = vec![(root()?, false)];
        }
        parts.extend(parts_of(target));
    }
    let (found, is_in) = way.pop().ok_or(Errno::NOENT)?;
    match FileType::from_raw_mode(fstat(&found)?.st_mode) {
        FileType::Directory => Ok((found, is_in)),
        _ => Err(Errno::NOTDIR),
    }
}

/// Returns the parts of a path, the first one last.
fn parts_of(path: &Path) -> Vec<OsString> {
    let parts = path.components().filter_map(|part| match part {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::Prefix(_) | Component::RootDir | Component::CurDir => None,
    });
    let mut parts: Vec<OsString> = parts.collect();
    parts.reverse();
    parts
}

/// Returns the error of an open that met a link which it does not follow.
fn of_links(error: Errno) -> io::Error {
    match error {
        Errno::LOOP => io::Error::other(
            "a link in a volume of the guest is on the way; remove it or name another file",
        ),
        error => error.into(),
    }
}

/// Launcher's handle on the process.
#[derive(Debug)]
pub struct Record(Child);

impl Record {
    /// Starts the process for a summary at this place.
    ///
    /// # Errors
    /// The process cannot be created.
    pub fn start(wormhole: &Path, place: Place) -> io::Result<Self> {
        let Place { path, folder, open } = place;
        let process = Command::new(wormhole)
            .arg("record")
            .args(open.is_some().then_some("--open"))
            .arg("--")
            .arg(path)
            .stdin(Stdio::piped())
            .stdout(open.map_or_else(|| Stdio::from(folder), Stdio::from))
            .spawn();
        process.map(Self).map_err(tasks::named)
    }

    /// Sends the summary, and waits until it is written.
    pub fn write(mut self, summary: &Summary) {
        let text = serde_json::to_vec_pretty(summary).unwrap_or_default();
        if let Some(mut input) = self.0.stdin.take() {
            // A process that has ended has printed the reason.
            let _ = input.write_all(&text);
        }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_in_a_volume_are_not_followed_before_a_run() {
        let folder = tempfile::tempdir().expect("a folder");
        let (volume, other) = (folder.path().join("volume"), folder.path().join("other"));
        fs::create_dir_all(volume.join("in")).expect("a volume");
        fs::create_dir(&other).expect("a folder");
        fs::write(other.join("file"), "precious").expect("a file");
        symlink(other.join("file"), volume.join("summary.json")).expect("a link");
        symlink(&other, volume.join("out")).expect("a link");
        symlink(&volume, folder.path().join("to_volume")).expect("a link");
        symlink("volume/in", folder.path().join("by_link")).expect("a link");
        symlink(other.join("file"), volume.join("in/summary.json")).expect("a link");
        let find = |name: &str| Place::find(&folder.path().join(name), &[&volume]);
        for name in [
            "volume/summary.json",
            "volume/in/../summary.json",
            "to_volume/summary.json",
            "volume/out/file",
            "volume/out/new",
            "by_link/summary.json",
            "by_link/../out/file",
        ] {
            let refused = find(name).expect_err(name).to_string();
            assert!(refused.contains("a link in a volume"), "{name}: {refused}");
        }
        let kept = fs::read(other.join("file")).expect("the file");
        assert_eq!(kept, b"precious");
        assert!(!other.join("new").exists());
        for name in ["volume/new.json", "volume/in/new.json", "other/file"] {
            find(name).expect(name);
            assert!(!folder.path().join(name).exists(), "{name} was left");
        }
        // Links elsewhere are the caller's own.
        let own = folder.path().join("own.json");
        symlink(other.join("target"), &own).expect("a link");
        assert!(find("own.json").expect("a link").open.is_some());
    }

    #[test]
    fn what_a_guest_made_at_the_place_meanwhile_is_not_written() {
        let folder = tempfile::tempdir().expect("a folder");
        let (volume, other) = (folder.path().join("volume"), folder.path().join("other"));
        fs::create_dir_all(volume.join("in")).expect("a volume");
        fs::create_dir(&other).expect("a folder");
        let path = volume.join("in/summary.json");
        let place = Place::find(&path, &[&volume]).expect("a place");
        // The guest replaces the folder.
        fs::rename(volume.join("in"), volume.join("moved")).expect("move");
        symlink(&other, volume.join("in")).expect("a link");
        create(&place.folder, &path).expect("a file in the folder of before");
        assert!(volume.join("moved/summary.json").is_file());
        assert!(!other.join("summary.json").exists());
        fs::remove_file(volume.join("moved/summary.json")).expect("remove");
        symlink(other.join("new"), volume.join("moved/summary.json")).expect("a link");
        let refused = create(&place.folder, &path).expect_err("a link");
        assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists);
        assert!(!other.join("new").exists());
    }
}
