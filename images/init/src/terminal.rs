//! Terminal of the program: a pair of pseudoterminals, between which the kernel's line discipline edits lines and makes
//! signals of keys.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::thread;

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use wormhole_init::{TerminalSize, User};

#[derive(Debug, thiserror::Error)]
#[error("cannot make a terminal for the program: {0}")]
pub struct TerminalError(#[from] io::Error);

#[derive(Debug)]
pub struct Terminal {
    /// Side of this process.
    pub controller: File,
    /// Side of the program.
    pub program: File,
}

impl Terminal {
    pub fn open(size: TerminalSize, user: &User) -> Result<Self, TerminalError> {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let controller = openpt(flags).map_err(io::Error::from)?;
        grantpt(&controller).map_err(io::Error::from)?;
        unlockpt(&controller).map_err(io::Error::from)?;
        let name = ptsname(&controller, Vec::new()).map_err(io::Error::from)?;
        let name = Path::new(OsStr::from_bytes(name.as_bytes()));
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_NOCTTY);
        let program = options.open(name)?;
        // The group is that of the file system's option.
        std::os::unix::fs::chown(name, Some(user.uid), None)?;
        let controller = File::from(controller);
        resize(&controller, size);
        Ok(Self {
            controller,
            program,
        })
    }
}

/// Sets the size. The kernel signals a change to the foreground processes (SIGWINCH).
pub fn resize(controller: &File, size: TerminalSize) {
    let size = Winsize {
        ws_row: size.rows,
        ws_col: size.columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // The call fails only for a file that is no terminal.
    let _ = tcsetwinsize(controller, size);
}

/// Copies keys to the terminal until their stream ends.
pub fn type_from(mut keys: File, mut controller: File) {
    thread::spawn(move || {
        let mut buffer = [0; 4096];
        loop {
            match keys.read(&mut buffer) {
                Ok(0) => break,
                Ok(length) if controller.write_all(&buffer[..length]).is_err() => break,
                Err(error) if error.kind() != io::ErrorKind::Interrupted => break,
                _ => {}
            }
        }
    });
}
