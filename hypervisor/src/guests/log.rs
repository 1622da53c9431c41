//! The end of what a guest has written to its console, in two files of bounded size.

use std::fs::{self, File, OpenOptions};
use std::io::{self, IsTerminal, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use wormhole_link::harmless;

use super::Place;
use crate::places::PlaceError;

/// File of the console's last bytes.
pub const NAME: &str = "console";
/// File of the bytes before them.
pub const EARLIER: &str = "console.earlier";

/// Size at which a file becomes the earlier one, in bytes.
const LIMIT: u64 = 1 << 20;

/// Writes the files.
#[derive(Debug)]
pub struct Log {
    path: PathBuf,
    earlier: PathBuf,
    file: File,
    size: u64,
}

impl Log {
    /// Makes an empty file.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn new(place: &Place) -> io::Result<Self> {
        let path = place.file(NAME);
        Ok(Self {
            file: create(&path)?,
            earlier: place.file(EARLIER),
            path,
            size: 0,
        })
    }

    /// Adds bytes. A full disk loses those for which it has no room.
    pub fn add(&mut self, bytes: &[u8]) {
        if self.size >= LIMIT {
            // Without the room for another file this one grows no further.
            let next = fs::rename(&self.path, &self.earlier).and_then(|()| create(&self.path));
            let Ok(file) = next else { return };
            self.file = file;
            self.size = 0;
        }
        self.size += bytes.len() as u64;
        let _ = self.file.write_all(bytes);
    }
}

fn create(path: &PathBuf) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    options.open(path)
}

/// Prints what the files have. A guest does not change the state of a terminal by that.
///
/// # Errors
/// A file may be another user's.
pub fn print(place: &Place) -> Result<(), PlaceError> {
    let mut stdout = io::stdout();
    for name in [EARLIER, NAME] {
        let mut bytes = Vec::new();
        if let Some(file) = place.open(name)? {
            let _ = file.take(2 * LIMIT).read_to_end(&mut bytes);
        }
        let _ = match stdout.is_terminal() {
            true => {
                let text = String::from_utf8_lossy(&bytes).replace("\r\n", "\n");
                stdout.write_all(harmless(&text).as_bytes())
            }
            false => stdout.write_all(&bytes),
        };
    }
    Ok(())
}
