//! Writes cpio archives in the "newc" format, which the kernel unpacks as its initramfs
//! (Documentation/driver-api/early-userspace/buffer-format.rst of Linux).
//!
//! An archive depends only on its content: it has no times and no owners, and its inode numbers are in the
//! order of the entries. Paths are bytes. Archives can be concatenated; a later one overrides earlier ones.

use std::collections::BTreeSet;

use crate::error::ImageError;

const FOLDER: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const LINK: u32 = 0o120_000;
const CHARACTER_DEVICE: u32 = 0o020_000;

/// Granularity of an archive's size, so that another one can follow.
const BLOCK: usize = 512;

/// An archive under construction. Paths are relative to the root: `usr/bin/true`.
#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    names: BTreeSet<Vec<u8>>,
}

impl Archive {
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns whether the archive has an entry with this path.
    pub fn contains(&self, path: impl AsRef<[u8]>) -> bool {
        self.names.contains(path.as_ref())
    }

    /// Adds a folder and its parents.
    pub fn folder(&mut self, path: impl AsRef<[u8]>) {
        let path = path.as_ref();
        self.parents(path);
        self.entry(path, FOLDER | 0o755, (0, 0), &[]);
    }

    /// Adds a file with these permissions. Ignores a second file with the same path.
    pub fn file(
        &mut self,
        path: impl AsRef<[u8]>,
        permissions: u32,
        data: &[u8],
    ) -> Result<(), ImageError> {
        let path = path.as_ref();
        if u32::try_from(data.len()).is_err() {
            return Err(ImageError::FileTooLarge {
                path: String::from_utf8_lossy(path).into_owned(),
                bytes: data.len(),
            });
        }
        self.parents(path);
        self.entry(path, FILE | permissions, (0, 0), data);
        Ok(())
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, path: impl AsRef<[u8]>, target: impl AsRef<[u8]>) {
        let path = path.as_ref();
        self.parents(path);
        self.entry(path, LINK | 0o777, (0, 0), target.as_ref());
    }

    /// Adds a character device.
    pub fn character_device(
        &mut self,
        path: impl AsRef<[u8]>,
        permissions: u32,
        major: u32,
        minor: u32,
    ) {
        let path = path.as_ref();
        self.parents(path);
        self.entry(path, CHARACTER_DEVICE | permissions, (major, minor), &[]);
    }

    /// Finishes the archive and returns its bytes.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry(b"TRAILER!!!", 0, (0, 0), &[]);
        self.pad(BLOCK);
        self.bytes
    }

    fn parents(&mut self, path: &[u8]) {
        let slashes = path.iter().enumerate().filter(|(_, byte)| **byte == b'/');
        for (at, _) in slashes {
            self.entry(&path[..at], FOLDER | 0o755, (0, 0), &[]);
        }
    }

    fn entry(&mut self, path: &[u8], mode: u32, device: (u32, u32), data: &[u8]) {
        if !self.names.insert(path.to_owned()) {
            return;
        }
        let links = if mode & FOLDER == FOLDER { 2 } else { 1 };
        let fields = [
            self.names.len(),
            mode as usize,
            0, // user
            0, // group
            links,
            0, // time
            data.len(),
            0, // device that holds the file, major
            0, // and minor
            device.0 as usize,
            device.1 as usize,
            path.len() + 1,
            0, // checksum, unused in this form
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes
                .extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(path);
        self.bytes.push(0);
        self.pad(4);
        self.bytes.extend_from_slice(data);
        self.pad(4);
    }

    fn pad(&mut self, multiple: usize) {
        self.bytes
            .resize(self.bytes.len().next_multiple_of(multiple), 0);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::{Command, Stdio};

    use super::*;

    fn sample() -> Vec<u8> {
        let mut archive = Archive::new();
        archive.character_device("dev/console", 0o600, 5, 1);
        archive.link("lib", "usr/lib");
        archive
            .file("usr/lib/five", 0o755, b"12345")
            .expect("it is small");
        archive
            .file("usr/lib/empty", 0o644, b"")
            .expect("it is small");
        archive.folder("tmp");
        archive.finish()
    }

    /// Parses an archive by the format's definition.
    fn entries(mut bytes: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let mut found = Vec::new();
        let whole = bytes.len();
        loop {
            assert_eq!(&bytes[..6], b"070701");
            let field = |index: usize| {
                let text = std::str::from_utf8(&bytes[6 + 8 * index..14 + 8 * index])
                    .expect("hexadecimal");
                usize::from_str_radix(text, 16).expect("hexadecimal")
            };
            let (mode, size, name_size) = (field(1), field(6), field(11));
            let name = String::from_utf8(bytes[110..110 + name_size - 1].to_vec()).expect("a name");
            let data = (110 + name_size).next_multiple_of(4);
            if name == "TRAILER!!!" {
                return found;
            }
            found.push((
                name,
                u32::try_from(mode).expect("a mode"),
                bytes[data..data + size].to_vec(),
            ));
            let end = (data + size).next_multiple_of(4);
            assert_eq!((whole - bytes.len()) % 4, 0);
            bytes = &bytes[end..];
        }
    }

    #[test]
    fn entries_are_read_back_in_order_and_folders_come_before_what_they_hold() {
        let names: Vec<String> = entries(&sample())
            .into_iter()
            .map(|(name, ..)| name)
            .collect();
        assert_eq!(
            names,
            [
                "dev",
                "dev/console",
                "lib",
                "usr",
                "usr/lib",
                "usr/lib/five",
                "usr/lib/empty",
                "tmp"
            ]
        );
        let five = entries(&sample())
            .into_iter()
            .find(|(name, ..)| name == "usr/lib/five")
            .expect("it is there");
        assert_eq!((five.1, five.2), (0o100_755, b"12345".to_vec()));
    }

    #[test]
    fn archives_are_whole_blocks_and_the_same_every_time() {
        assert_eq!(sample().len() % BLOCK, 0);
        assert_eq!(sample(), sample());
    }

    #[test]
    fn a_path_is_written_once() {
        let mut archive = Archive::new();
        archive.file("a", 0o644, b"first").expect("it is small");
        archive.file("a", 0o644, b"second").expect("it is small");
        let all = entries(&archive.finish());
        assert_eq!(all.len(), 1);
        assert_eq!(all[0].2, b"first");
    }

    #[test]
    fn the_system_tool_reads_it() {
        let Ok(mut tool) = Command::new("cpio")
            .args(["--list", "--quiet"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
        else {
            // The tool is optional; the tests above check the same by the format's definition.
            return;
        };
        tool.stdin
            .take()
            .expect("it is piped")
            .write_all(&sample())
            .expect("cpio reads");
        let output = tool.wait_with_output().expect("cpio ends");
        let text = String::from_utf8(output.stdout).expect("names");
        assert!(output.status.success());
        assert_eq!(text.lines().count(), 8, "{text}");
    }
}
