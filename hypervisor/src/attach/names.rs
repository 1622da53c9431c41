//! The names that the guest's monitor opens: of the window, and of the socket. The process that serves the guest may not
//! remove them, so another one does when it has ended, however it ended.

use std::fs::{File, read_link};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::{Resource, getrlimit};
use rustix::rand::{GetRandomFlags, getrandom};
use wormhole_link::made::{Made, Place};
use wormhole_link::{raise_descriptor_limit, tasks};

use crate::backend::WINDOW;
use crate::{listener, private};

/// One more than the highest number of the descriptor to which the window's name leads. The kernel's table of a process with such
/// a number takes 512 KiB.
const HIGHEST: u64 = 1 << 16;

/// Reason why a name cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum NamesError {
    #[error("{} is there already: name another place, or remove it", .0.display())]
    Taken(PathBuf),
    #[error("cannot make {}", path.display())]
    Make {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot start the process that removes the window's name")]
    Start(#[source] io::Error),
}

/// Runs as the process: reads the names, and removes them when standard input ends, unless others have taken their places.
pub fn remove() {
    let mut input = BufReader::new(io::stdin());
    let mut line = Vec::new();
    let read = input.read_until(b'\n', &mut line);
    let made = read.map(|_| serde_json::from_slice::<Vec<Made>>(&line));
    let Ok(Ok(made)) = made else {
        // The process that made them has ended.
        return;
    };
    // The other end sends no more; an error is an end as well.
    let _ = input.read(&mut [0]);
    made.iter().for_each(Made::remove);
}

/// Names, removed on drop.
#[derive(Debug, Default)]
pub struct Names {
    made: Vec<Made>,
    /// The descriptor to which the window's name leads.
    window: Option<OwnedFd>,
    remover: Option<Child>,
}

impl Names {
    /// Makes the window's name: a symbolic link to this process's descriptor. The file itself has no name, so that it can
    /// be sealed, and its memory ends with its users. Replaces a link that leads nowhere, or to what is no window, since the
    /// process of its number is a later one.
    ///
    /// The name is left behind if the process that removes it is killed too. So that it leads to no file of a later process, such
    /// as another guest's window, the descriptor has a high number by chance.
    ///
    /// # Errors
    /// The place is taken, or no link can be made there.
    pub fn link(&mut self, path: &Path, window: &File) -> Result<(), NamesError> {
        let place = made(path, Place::of(path))?;
        if let Ok((left, file)) = place.made()
            && file.metadata().is_ok_and(|file| file.is_symlink())
            && is_left(path)
        {
            left.remove();
        }
        let window = self.window.insert(made(path, high(window))?);
        let target = format!("/proc/{}/fd/{}", std::process::id(), window.as_raw_fd());
        made(path, symlink(target, path))?;
        self.made.push(made(path, place.made())?.0);
        Ok(())
    }

    /// Binds a socket. Replaces one without a listener.
    ///
    /// # Errors
    /// The place is taken, or no socket can be made there.
    pub fn bind(&mut self, path: &Path) -> Result<UnixListener, NamesError> {
        let place = made(path, Place::of(path))?;
        if let Ok((left, _)) = place.made()
            && listener::is_left(path)
        {
            left.remove();
        }
        // The socket is the user's alone: its first peer is taken for the guest's monitor.
        let listener = made(path, private::listener(path))?;
        self.made.push(made(path, place.made())?.0);
        Ok(listener)
    }

    /// Starts the process that removes the names after this one.
    ///
    /// # Errors
    /// No process can be started.
    pub fn hand_over(&mut self) -> Result<(), NamesError> {
        let wormhole = std::env::current_exe().map_err(NamesError::Start)?;
        let process = Command::new(wormhole)
            .arg("remove")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .map_err(tasks::named);
        let remover = self.remover.insert(process.map_err(NamesError::Start)?);
        let line = serde_json::to_string(&self.made).unwrap_or_default() + "\n";
        let told = remover
            .stdin
            .as_mut()
            .map(|stdin| stdin.write_all(line.as_bytes()));
        told.unwrap_or(Ok(())).map_err(NamesError::Start)
    }
}

/// Returns whether a link leads nowhere, or to a descriptor of a process that is not that of a window.
fn is_left(link: &Path) -> bool {
    let Ok(target) = read_link(link) else {
        return false;
    };
    let mut parts = target.iter();
    let is_descriptor =
        parts.by_ref().take(2).eq(["/", "proc"]) && parts.nth(1) == Some("fd".as_ref());
    let is_window = || {
        let name = format!("/memfd:{WINDOW} ");
        read_link(&target)
            .is_ok_and(|file| file.as_os_str().as_bytes().starts_with(name.as_bytes()))
    };
    !link.exists() || is_descriptor && !is_window()
}

/// Returns another descriptor of a file, with a random number among the higher ones that this process may have.
fn high(file: &File) -> io::Result<OwnedFd> {
    // A process that may not raise its limit chooses among the numbers that it has.
    let _ = raise_descriptor_limit();
    let most = getrlimit(Resource::Nofile).current;
    let most = most.map_or(HIGHEST, |most| most.min(HIGHEST));
    let mut random = [0; size_of::<u32>()];
    getrandom(&mut random, GetRandomFlags::empty())?;
    let number = most / 2 + u64::from(u32::from_ne_bytes(random)) % (most / 4).max(1);
    let number = i32::try_from(number).map_err(io::Error::other)?;
    Ok(fcntl_dupfd_cloexec(file, number)?)
}

fn made<T>(path: &Path, made: io::Result<T>) -> Result<T, NamesError> {
    made.map_err(|source| match source.kind() {
        io::ErrorKind::AlreadyExists | io::ErrorKind::AddrInUse => {
            NamesError::Taken(path.to_owned())
        }
        _ => NamesError::Make {
            path: path.to_owned(),
            source,
        },
    })
}

impl Drop for Names {
    fn drop(&mut self) {
        match &mut self.remover {
            Some(process) => {
                drop(process.stdin.take());
                drop(process.wait());
            }
            None => self.made.iter().for_each(Made::remove),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::symlink_metadata;

    use wormhole_monitor::sealed_file;

    use super::*;

    #[test]
    fn the_link_leads_to_the_window_and_goes_away() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("window");
        let window = File::from(sealed_file(WINDOW, 4096).unwrap());
        symlink("/proc/none/fd/3", &path).unwrap();
        let mut names = Names::default();
        names.link(&path, &window).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 4096);
        let taken = Names::default().link(&path, &window).unwrap_err();
        assert!(matches!(taken, NamesError::Taken(_)), "{taken}");
        drop(names);
        assert!(symlink_metadata(path).is_err());
    }

    #[test]
    fn a_link_that_was_left_is_replaced_where_a_later_process_has_its_number() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("window");
        let window = File::from(sealed_file(WINDOW, 4096).unwrap());
        let other = File::from(sealed_file("other", 4096).unwrap());
        let link = |file: &File| {
            let target = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
            symlink(target, &path).unwrap();
        };
        link(&other);
        let mut names = Names::default();
        names.link(&path, &window).unwrap();
        let number = names.window.as_ref().unwrap().as_raw_fd();
        assert!(number > window.as_raw_fd());
        let taken = Names::default().link(&path, &window).unwrap_err();
        assert!(matches!(taken, NamesError::Taken(_)), "{taken}");
        drop(names);
        // A person's own link is no left one, unless it leads nowhere.
        symlink("/dev/null", &path).unwrap();
        let taken = Names::default().link(&path, &window).unwrap_err();
        assert!(matches!(taken, NamesError::Taken(_)), "{taken}");
    }

    #[test]
    fn a_socket_that_nobody_listens_on_is_replaced_and_another_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vsock");
        drop(UnixListener::bind(&path).unwrap());
        let mut names = Names::default();
        let listener = names.bind(&path).unwrap();
        let taken = Names::default().bind(&path).unwrap_err();
        assert!(matches!(taken, NamesError::Taken(_)), "{taken}");
        drop((names, listener));
        assert!(!path.exists());
    }

    #[test]
    fn a_name_that_another_process_has_taken_over_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let mut late = Names::default();
        drop(late.bind(&path).unwrap());
        // The file systems' clock has ticks of some milliseconds.
        std::thread::sleep(std::time::Duration::from_millis(50));
        let mut next = Names::default();
        let _listener = next.bind(&path).unwrap();
        drop(late);
        assert!(path.exists());
        drop(next);
        assert!(!path.exists());
    }
}
