//! The names that the guest's monitor opens: of the window, and of the socket. The process that serves the guest may not
//! remove them, so another one does when it has ended, however it ended.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use wormhole_link::made::{Made, Place};
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
    remover: Option<Child>,
}

impl Names {
    /// Makes the window's name: a symbolic link to this process's descriptor. The file itself has no name, so that it can
    /// be sealed, and its memory ends with its users. Replaces a link that leads nowhere.
    ///
    /// # Errors
    /// The place is taken, or no link can be made there.
    pub fn link(&mut self, path: &Path, window: &File) -> Result<(), NamesError> {
        let place = made(path, Place::of(path))?;
        if let Ok((left, file)) = place.made()
            && file.metadata().is_ok_and(|file| file.is_symlink())
            && !path.exists()
        {
            left.remove();
        }
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
