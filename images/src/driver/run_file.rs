//! NVIDIA's file `NVIDIA-Linux-x86_64-VERSION.run`: a script of makeself (1.6.0-nv2, which each driver contains as
//! `makeself.sh`), a program that decompresses, and a compressed archive.
//!
//! Nothing of the file is executed. The script's variables are read as text, and of the archive only the files that an
//! image needs are written. Links are left out, so that no path leads out of the folder.

use std::cell::Cell;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Component, Path, PathBuf};

use flate2::read::MultiGzDecoder;
use lzma_rust2::XzReader;
use md5::Md5;
use sha2::{Digest, Sha256};
use tar::{Archive, EntryType};

use super::parts::{Folders, Parts};
use super::{DriverError, check_version, is_version};
use crate::error::ImageError;

/// Lines of the script among which its variables are.
const VARIABLES: usize = 64;
/// Most bytes before the archive.
const MOST_SCRIPT: u64 = 16 << 20;
/// Lines before those that the script's sums count.
const UNCOUNTED: usize = 3;
/// The architecture of backend VMs.
const MACHINE: &str = "x86_64";
/// Most files, and most bytes of all files, also of those that are skipped.
const MOST_FILES: u64 = 200_000;
pub(super) const MOST_BYTES: u64 = 3 << 30;
/// Most parts of a file's path. Folders that are nested without a limit cannot be removed.
const MOST_PARTS: usize = 64;
/// Most bytes of a header that extends another by a long name, which is read into memory.
const MOST_EXTENSION: u64 = 64 << 10;
/// Most memory for the decompression, in KiB.
const MOST_MEMORY: u32 = 256 << 10;
/// Folders and files of the archive for an image.
const SOURCES: &str = "kernel-open";
const FIRMWARE: &str = "firmware";

/// NVIDIA's file, whose sum was compared.
#[derive(Debug)]
pub(crate) struct RunFile {
    path: PathBuf,
    /// The file that was read. Another one may have its name since.
    file: File,
    pub(super) version: String,
    /// SHA-256 sum of the file.
    pub(super) sum: String,
    /// Bytes before the archive.
    start: u64,
}

impl RunFile {
    /// Reads a file once, and refuses one that is damaged or no driver for backend VMs.
    pub(super) fn open(path: &Path) -> Result<Self, DriverError> {
        let read = |source| DriverError::Read {
            path: path.to_owned(),
            source,
        };
        let not_one = || DriverError::NotADriver(path.to_owned());
        // A pipe would have no end, and no second reading.
        if !fs::metadata(path).map_err(read)?.is_file() {
            return Err(not_one());
        }
        let mut file = BufReader::new(File::open(path).map_err(read)?);
        let mut header = Header::default();
        let mut counted = Counted::default();
        let mut line = Vec::new();
        let mut lines = 0;
        while header.skip == 0 || lines + 1 < header.skip {
            line.clear();
            let left = MOST_SCRIPT.saturating_sub(counted.bytes);
            let length = (&mut file).take(left).read_until(b'\n', &mut line);
            if length.map_err(read)? == 0 || line.last() != Some(&b'\n') {
                return Err(not_one());
            }
            counted.add(&line, lines);
            let is_script = lines > 0 || line.starts_with(b"#!");
            if !is_script || lines == VARIABLES && header.skip == 0 {
                return Err(not_one());
            }
            if lines < VARIABLES {
                header.read(&String::from_utf8_lossy(&line));
            }
            lines += 1;
        }
        let start = counted.bytes;
        if !header.is_drivers() {
            return Err(not_one());
        }
        if header.machine != MACHINE {
            return Err(DriverError::Machine {
                path: path.to_owned(),
                machine: header.machine,
            });
        }
        check_version(&path.display().to_string(), &header.version)?;
        let mut buffer = vec![0; 1 << 16];
        loop {
            match file.read(&mut buffer).map_err(read)? {
                0 => break,
                length => counted.add(&buffer[..length], lines),
            }
        }
        let (sum, md5) = counted.finish();
        if header.md5 != md5 {
            return Err(DriverError::Damaged(path.to_owned()));
        }
        Ok(Self {
            path: path.to_owned(),
            file: file.into_inner(),
            version: header.version,
            sum,
            start,
        })
    }

    /// Unpacks the parts for an image into an empty folder.
    pub(super) fn unpack(&self, folder: &Path) -> Result<Parts, ImageError> {
        self.unpack_within(folder, MOST_BYTES)
    }

    /// As [`unpack`](Self::unpack), with at most so many bytes.
    pub(super) fn unpack_within(&self, folder: &Path, most: u64) -> Result<Parts, ImageError> {
        self.extract(folder, most)?;
        let name = self.path.file_name().unwrap_or_default();
        let origin: String = name
            .to_string_lossy()
            .chars()
            .map(|character| match character.is_control() {
                true => '?',
                false => character,
            })
            .collect();
        let folders = Folders {
            sources: folder.join(SOURCES),
            firmware: folder.join(FIRMWARE),
            libraries: vec![folder.to_owned()],
        };
        Parts::find(folders, origin, self.version.clone())
    }

    fn extract(&self, folder: &Path, most: u64) -> Result<(), DriverError> {
        let broken = |source| DriverError::Unpack {
            path: self.path.clone(),
            source,
        };
        let mut file = self.file.try_clone().map_err(broken)?;
        file.seek(SeekFrom::Start(self.start)).map_err(broken)?;
        let content = decompressed(BufReader::new(file)).map_err(broken)?;
        extract(&self.path, content, folder, most, |path| {
            let mut parts = path.components();
            let first = parts.next().map(|part| part.as_os_str().to_string_lossy());
            let is_library = |name: &str| name.ends_with(&format!(".so.{}", self.version));
            first.is_some_and(|first| match parts.next() {
                Some(_) => first == SOURCES || first == FIRMWARE,
                None => is_library(&first),
            })
        })
    }
}

/// Writes those files of an archive that are `wanted` below a folder. Links, devices and other files are left out. All files
/// together have at most so many bytes.
pub(super) fn extract(
    path: &Path,
    content: impl Read,
    folder: &Path,
    most: u64,
    wanted: impl Fn(&Path) -> bool,
) -> Result<(), DriverError> {
    let broken = |source| DriverError::Unpack {
        path: path.to_owned(),
        source,
    };
    let too_large = || DriverError::TooLarge {
        path: path.to_owned(),
        most: MOST_FILES,
        bytes: most,
    };
    let (mut files, mut bytes) = (0, 0u64);
    // Skipped files take time as well.
    let budget = Cell::new(MOST_EXTENSION);
    let content = Metered {
        content: content.take(most),
        budget: &budget,
    };
    let mut archive = Archive::new(content);
    for entry in archive.entries().map_err(broken)? {
        let mut entry = entry.map_err(broken)?;
        // It has another size than the bytes that are there, and no driver contains one.
        if entry.header().entry_type() == EntryType::GNUSparse {
            return Err(broken(io::Error::other("a file in it is sparse")));
        }
        // Behind the headers is the file, which is read or skipped before the next header.
        budget.set(entry.size().saturating_add(MOST_EXTENSION));
        files += 1;
        bytes = bytes.saturating_add(entry.size());
        if files > MOST_FILES || bytes > most {
            return Err(too_large());
        }
        let name = entry.path().map_err(broken)?.into_owned();
        let inside =
            |part: &Component<'_>| matches!(part, Component::Normal(_) | Component::CurDir);
        if !name.components().all(|part| inside(&part)) {
            let path = path.to_owned();
            return Err(DriverError::Outside { path, name });
        }
        let name: PathBuf = name
            .components()
            .filter(|part| matches!(part, Component::Normal(_)))
            .collect();
        if name.components().count() > MOST_PARTS {
            return Err(broken(io::Error::other("a file in it lies too deep")));
        }
        if entry.header().entry_type() == EntryType::Regular && wanted(&name) {
            entry.unpack_in(folder).map_err(broken)?;
        }
    }
    Ok(())
}

/// A reader with a budget of bytes. Between a file and the next one the archive's reader takes headers into memory, as many
/// bytes as they say.
struct Metered<'a, R> {
    content: R,
    budget: &'a Cell<u64>,
}

impl<R: Read> Read for Metered<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.content.read(buffer)?;
        let left = self.budget.get().checked_sub(length as u64);
        let left = left.ok_or_else(|| io::Error::other("a name in it is too long"))?;
        self.budget.set(left);
        Ok(length)
    }
}

/// Decompresses an archive by the way that its first bytes name.
pub(super) fn decompressed(mut content: impl BufRead + 'static) -> io::Result<Box<dyn Read>> {
    let start = content.fill_buf()?;
    Ok(if start.starts_with(b"\xfd7zXZ\0") {
        Box::new(XzReader::new_mem_limit(content, true, MOST_MEMORY))
    } else if start.starts_with(b"\x28\xb5\x2f\xfd") {
        let decoder = ruzstd::decoding::StreamingDecoder::new(content);
        Box::new(decoder.map_err(io::Error::other)?)
    } else if start.starts_with(b"\x1f\x8b") {
        Box::new(MultiGzDecoder::new(content))
    } else {
        Box::new(content)
    })
}

/// Variables of the script.
#[derive(Debug, Default)]
struct Header {
    /// Number of the archive's first line, from 1 on.
    skip: usize,
    md5: String,
    label: String,
    version: String,
    machine: String,
}

impl Header {
    fn read(&mut self, line: &str) {
        let Some((name, value)) = line.trim_end().split_once('=') else {
            return;
        };
        let value = value.trim_matches('"');
        match name {
            "skip" => self.skip = value.parse().unwrap_or(0),
            "MD5" => value.clone_into(&mut self.md5),
            "label" => value.clone_into(&mut self.label),
            "version_string" => value.clone_into(&mut self.version),
            "TARGET_ARCH" => value.clone_into(&mut self.machine),
            _ => {}
        }
    }

    fn is_drivers(&self) -> bool {
        self.label.starts_with("NVIDIA ") && is_version(&self.version)
    }
}

/// Sums of a file as it is read.
#[derive(Default)]
struct Counted {
    bytes: u64,
    sha256: Sha256,
    md5: Md5,
}

impl Counted {
    /// Adds bytes behind this many whole lines.
    fn add(&mut self, bytes: &[u8], lines: usize) {
        self.bytes += bytes.len() as u64;
        self.sha256.update(bytes);
        if lines >= UNCOUNTED {
            self.md5.update(bytes);
        }
    }

    fn finish(self) -> (String, String) {
        let digits = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        (
            digits(&self.sha256.finalize()),
            digits(&self.md5.finalize()),
        )
    }
}
