//! Process that writes a run's summary to its file.
//!
//! The launcher of a guest may not open files once the guest runs. So this process is started
//! before, and receives the summary on standard input. Without a summary it writes nothing: a
//! launcher that fails leaves no file.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use clap::Args;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, openat, statat, unlinkat};
use rustix::io::Errno;
use wormhole_link::tasks;

use super::parent::{of_links, open_parent};
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
pub const MODE: Mode = Mode::from_raw_mode(0o666);

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
        let (folder, is_guests) = open_parent(path, volumes)?;
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
