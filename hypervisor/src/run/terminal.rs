//! `--tty`: the caller's terminal, which is raw while a program in a guest has it.
//!
//! The guest's terminal edits lines and makes signals of keys. A process restores the caller's, since the launcher may
//! be killed at any time.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::stdio::{stdin, stdout};
use rustix::termios::{OptionalActions, tcgetattr, tcgetwinsize, tcsetattr};
use wormhole_images::TerminalSize;
use wormhole_link::tasks;

use crate::signals::Set;

/// Returns the size of the terminal at standard input.
pub fn size() -> TerminalSize {
    let size = tcgetwinsize(stdin());
    size.map_or(
        TerminalSize {
            rows: 0,
            columns: 0,
        },
        |size| TerminalSize {
            rows: size.ws_row,
            columns: size.ws_col,
        },
    )
}

/// Launcher's handle on the process.
#[derive(Debug)]
pub struct Keeper {
    process: Child,
    stream: Option<UnixStream>,
}

/// Connection to the process.
#[derive(Debug)]
pub struct Handle(Option<UnixStream>);

impl Keeper {
    /// Starts the process for the terminal at standard input.
    ///
    /// # Errors
    /// The process cannot be created.
    pub fn start(wormhole: &Path) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let terminal = io::stdin().as_fd().try_clone_to_owned()?;
        let process = Command::new(wormhole)
            .arg("keep-terminal")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::from(terminal))
            .spawn();
        Ok(Self {
            process: process.map_err(tasks::named)?,
            stream: Some(ours),
        })
    }

    pub fn handle(&self) -> Handle {
        Handle(
            self.stream
                .as_ref()
                .and_then(|stream| stream.try_clone().ok()),
        )
    }
}

impl Drop for Keeper {
    /// Waits until the terminal is restored.
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take() {
            // Handles of threads that have not ended keep the connection open.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        let _ = self.process.wait();
    }
}

impl Handle {
    /// Makes the terminal raw, and returns once it is.
    pub fn make_raw(self) {
        if let Some(mut stream) = self.0 {
            // Without the process the terminal stays as it is.
            let _ = stream.write_all(b"!").and_then(|()| stream.read(&mut [0]));
        }
    }
}

/// Runs as the process: makes the terminal at standard output raw once the launcher asks, and restores it when the
/// launcher has closed its end, by ending as well.
pub fn keep() {
    // A process in the background stops when it changes a terminal, unless it blocks this signal.
    Set::of(&[libc::SIGTTOU]).block();
    let (Ok(before), Ok(launcher)) = (tcgetattr(stdout()), stdin().try_clone_to_owned()) else {
        return;
    };
    let mut launcher = UnixStream::from(launcher);
    if !matches!(launcher.read(&mut [0]), Ok(1)) {
        return;
    }
    let mut raw = before.clone();
    raw.make_raw();
    // Fails only if the terminal is gone.
    let _ = tcsetattr(stdout(), OptionalActions::Now, &raw);
    let _ = launcher.write_all(b"!");
    let _ = io::copy(&mut launcher, &mut io::sink());
    let _ = tcsetattr(stdout(), OptionalActions::Now, &before);
}
