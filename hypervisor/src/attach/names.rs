//! The names that the guest's monitor opens: of the window, and of the socket. The process that serves the guest may not
//! remove them, so another one does when it has ended, however it ended.

use std::fs::{File, remove_file, symlink_metadata};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::SystemTime;

use clap::Args;
use wormhole_link::tasks;

use crate::{listener, private};

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

/// Arguments of the process that removes names.
#[derive(Debug, Args)]
pub struct Options {
    paths: Vec<PathBuf>,
}

/// Runs as the process: removes the names when standard input ends, unless others have taken their places.
pub fn remove(options: &Options) {
    let made: Vec<Made> = options.paths.iter().map(|path| Made::at(path)).collect();
    // The other end sends no byte; an error is an end as well.
    let _ = io::stdin().read(&mut [0]);
    made.iter().for_each(Made::remove);
}

/// A name that was made, with the file that it is of.
#[derive(Debug)]
struct Made {
    path: PathBuf,
    file: Option<Identity>,
}

impl Made {
    fn at(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            file: identity(path),
        }
    }

    /// Removes the name, unless another process has taken its place.
    fn remove(&self) {
        if self.file.is_some() && self.file == identity(&self.path) {
            drop(remove_file(&self.path));
        }
    }
}

/// Device and number of a file, and the time at which it was made, since numbers are used again. Some file systems have no
/// such time.
type Identity = (u64, u64, Option<SystemTime>);

/// Returns the identity of the file at a path.
fn identity(path: &Path) -> Option<Identity> {
    let file = symlink_metadata(path).ok()?;
    Some((file.dev(), file.ino(), file.created().ok()))
}

/// Names, removed on drop.
#[derive(Debug, Default)]
pub struct Names {
    made: Vec<Made>,
    remover: Option<Child>,
}

impl Names {
    /// Makes the window's name: a symbolic link to this process's descriptor. The file itself has no name, so that it can
    /// be sealed, and its memory ends with its users. Replaces a link that leads nowhere.
    ///
    /// # Errors
    /// The place is taken, or no link can be made there.
    pub fn link(&mut self, path: &Path, window: &File) -> Result<(), NamesError> {
        let is_link = symlink_metadata(path).is_ok_and(|it| it.is_symlink());
        if is_link && !path.exists() {
            made(path, remove_file(path))?;
        }
        let target = format!("/proc/{}/fd/{}", std::process::id(), window.as_raw_fd());
        made(path, symlink(target, path))?;
        self.made.push(Made::at(path));
        Ok(())
    }

    /// Binds a socket. Replaces one without a listener.
    ///
    /// # Errors
    /// The place is taken, or no socket can be made there.
    pub fn bind(&mut self, path: &Path) -> Result<UnixListener, NamesError> {
        if listener::is_left(path) {
            made(path, remove_file(path))?;
        }
        // The socket is the user's alone: its first peer is taken for the guest's monitor.
        let listener = made(path, private::listener(path))?;
        self.made.push(Made::at(path));
        Ok(listener)
    }

    /// Starts the process that removes the names after this one.
    ///
    /// # Errors
    /// No process can be started.
    pub fn hand_over(&mut self) -> Result<(), NamesError> {
        let wormhole = std::env::current_exe().map_err(NamesError::Start)?;
        let process = Command::new(wormhole)
            .args(["remove", "--"])
            .args(self.made.iter().map(|made| &made.path))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .map_err(tasks::named);
        self.remover = Some(process.map_err(NamesError::Start)?);
        Ok(())
    }
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
    use super::*;

    #[test]
    fn the_link_leads_to_the_window_and_goes_away() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("window");
        let window = tempfile::tempfile().unwrap();
        window.set_len(4096).unwrap();
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
