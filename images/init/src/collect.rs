//! Collects files at the end of a run, and passes them on in a report.
//!
//! A path is collected whole or not at all. The receiver cannot trust the sender: it limits the bytes, and names in a
//! folder are parts below that folder, without `..`.

use std::ffi::{OsStr, OsString};
use std::fs::{self, OpenOptions};
use std::io::{self, BufRead, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::report::{ReportError, bounded, bytes, expect, line};

/// Maximum bytes of all files of a guest that are collected, with their names.
pub const COLLECT_BYTES: u64 = 64 << 20;
/// Maximum number of files of one folder, and of the folders below it.
pub const COLLECT_FILES: usize = 4096;
/// Maximum number of folders on the way from a collected folder to one of its files.
pub const COLLECT_DEPTH: usize = 64;

const MAX_NAME: u64 = 4096;
/// Maximum bytes of one part of a name (`NAME_MAX` of Linux).
const MAX_PART: usize = 255;

/// Outcome for one path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Collected {
    File(Vec<u8>),
    /// Regular files of a folder and of the folders below it, with their names from it on.
    Folder(Vec<(PathBuf, Vec<u8>)>),
    Absent(Absence),
}

/// Reason why a path was not collected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Absence {
    Missing,
    /// The path is a link, a device, a socket or a pipe.
    Special,
    /// More bytes than the limit.
    Large,
    /// More files, or folders deeper in each other, than the limit.
    Many,
    Unreadable,
}

impl Absence {
    const ALL: [(Self, &'static str); 5] = [
        (Self::Missing, "missing"),
        (Self::Special, "special"),
        (Self::Large, "large"),
        (Self::Many, "many"),
        (Self::Unreadable, "unreadable"),
    ];

    fn word(self) -> &'static str {
        let found = Self::ALL.iter().find(|(absence, _)| *absence == self);
        found.map_or("", |(_, word)| word)
    }

    fn parse(word: &str) -> Option<Self> {
        let found = Self::ALL.iter().find(|(_, known)| *known == word);
        found.map(|(absence, _)| *absence)
    }
}

impl From<io::Error> for Absence {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Self::Missing,
            _ => Self::Unreadable,
        }
    }
}

impl Collected {
    /// Collects a file, or a folder's regular files, with at most `left` bytes, which it subtracts. Follows a link on the
    /// way to the path, but not one at its end or below it.
    #[must_use]
    pub fn of(path: &Path, left: &mut u64) -> Self {
        let mut rest = *left;
        match gather(path, &mut rest) {
            Ok(collected) => {
                *left = rest;
                collected
            }
            Err(absence) => Self::Absent(absence),
        }
    }

    /// Writes the outcome in the form that [`read`](Self::read) takes.
    ///
    /// # Errors
    /// The output cannot be written.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        match self {
            Self::Absent(absence) => writeln!(out, "absent {}", absence.word()),
            Self::File(data) => {
                writeln!(out, "file {}", data.len())?;
                out.write_all(data)?;
                writeln!(out)
            }
            Self::Folder(files) => {
                writeln!(out, "folder {}", files.len())?;
                for (name, data) in files {
                    let name = name.as_os_str().as_bytes();
                    writeln!(out, "entry {} {}", name.len(), data.len())?;
                    out.write_all(name)?;
                    out.write_all(data)?;
                    writeln!(out)?;
                }
                Ok(())
            }
        }
    }

    /// Reads an outcome with at most `left` bytes, which it subtracts.
    ///
    /// # Errors
    /// The input ends early, exceeds a limit, or has an invalid line or name.
    pub fn read(input: &mut impl BufRead, left: &mut u64) -> Result<Self, ReportError> {
        let text = line(input)?;
        Self::read_rest(&text, input, left)
    }

    /// Reads an outcome whose first line has been read.
    pub(crate) fn read_rest(
        text: &str,
        input: &mut impl BufRead,
        left: &mut u64,
    ) -> Result<Self, ReportError> {
        let invalid = || ReportError::Line(text.to_owned());
        let words: Vec<&str> = text.split(' ').collect();
        match words[..] {
            ["absent", word] => Absence::parse(word).map(Self::Absent).ok_or_else(invalid),
            ["file", length] => read_data(length, text, input, left).map(Self::File),
            ["folder", count] => {
                let count = bounded(count, "a folder", COLLECT_FILES as u64, text)?;
                let files = (0..count).map(|_| read_entry(input, left));
                files.collect::<Result<_, _>>().map(Self::Folder)
            }
            _ => Err(invalid()),
        }
    }
}

fn read_data(
    length: &str,
    text: &str,
    input: &mut impl BufRead,
    left: &mut u64,
) -> Result<Vec<u8>, ReportError> {
    let length = bounded(length, "a file", *left, text)?;
    *left -= length;
    let data = bytes(input, length)?;
    expect(input, "")?;
    Ok(data)
}

fn read_entry(input: &mut impl BufRead, left: &mut u64) -> Result<(PathBuf, Vec<u8>), ReportError> {
    let text = line(input)?;
    let words: Vec<&str> = text.split(' ').collect();
    let ["entry", name, length] = words[..] else {
        return Err(ReportError::Line(text));
    };
    let size = bounded(name, "a name", MAX_NAME.min(*left), &text)?;
    *left -= size;
    let name = OsString::from_vec(bytes(input, size)?);
    if !is_below(&name) {
        return Err(ReportError::Name(name));
    }
    Ok((name.into(), read_data(length, &text, input, left)?))
}

/// Returns whether a name leads to a file below a folder, part by part.
fn is_below(name: &OsStr) -> bool {
    let is_part = |part: &[u8]| {
        !matches!(part, b"" | b"." | b"..") && part.len() <= MAX_PART && !part.contains(&0)
    };
    let mut parts = name.as_bytes().split(|&byte| byte == b'/');
    parts.clone().count() <= COLLECT_DEPTH + 1 && parts.all(is_part)
}

fn gather(path: &Path, left: &mut u64) -> Result<Collected, Absence> {
    let kind = fs::symlink_metadata(path)?.file_type();
    if kind.is_file() {
        return read_file(path, left).map(Collected::File);
    }
    if !kind.is_dir() {
        return Err(Absence::Special);
    }
    let mut files = Vec::new();
    let mut folders = vec![(PathBuf::new(), 0)];
    let mut visited = 0;
    while let Some((folder, depth)) = folders.pop() {
        for entry in fs::read_dir(path.join(&folder))? {
            let entry = entry?;
            let kind = entry.file_type()?;
            let name = folder.join(entry.file_name());
            if kind.is_dir() {
                visited += 1;
                if depth == COLLECT_DEPTH || visited > COLLECT_FILES {
                    return Err(Absence::Many);
                }
                folders.push((name, depth + 1));
            } else if kind.is_file() {
                let size = name.as_os_str().len() as u64;
                if files.len() == COLLECT_FILES || size > MAX_NAME {
                    return Err(Absence::Many);
                }
                *left = left.checked_sub(size).ok_or(Absence::Large)?;
                let data = read_file(&entry.path(), left)?;
                files.push((name, data));
            }
        }
    }
    files.sort();
    Ok(Collected::Folder(files))
}

fn read_file(path: &Path, left: &mut u64) -> Result<Vec<u8>, Absence> {
    // Some files of the kernel are regular ones, and wait for their content without this flag.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)?;
    if file.metadata()?.len() > *left {
        return Err(Absence::Large);
    }
    let mut data = Vec::new();
    file.take(left.saturating_add(1)).read_to_end(&mut data)?;
    *left = left.checked_sub(data.len() as u64).ok_or(Absence::Large)?;
    Ok(data)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use super::*;

    fn collect(path: &Path) -> Collected {
        Collected::of(path, &mut { COLLECT_BYTES })
    }

    fn absent(absence: Absence) -> Collected {
        Collected::Absent(absence)
    }

    #[test]
    fn a_folder_is_collected_with_its_regular_files_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        fs::create_dir_all(at("out/a/b")).expect("folders");
        fs::create_dir(at("out/empty")).expect("a folder");
        fs::write(at("out/a/b/deep"), "deep").expect("a file");
        fs::write(at("out/a.txt"), "flat").expect("a file");
        fs::write(at("secret"), "secret").expect("a file");
        symlink(at("secret"), at("out/link")).expect("a link");
        symlink(folder.path(), at("out/around")).expect("a link");
        let _socket = UnixListener::bind(at("out/socket")).expect("a socket");
        let mut left = 100;
        let collected = Collected::of(&at("out"), &mut left);
        let files = [("a/b/deep", "deep"), ("a.txt", "flat")];
        let files = files.map(|(name, data)| (name.into(), data.into()));
        assert_eq!(collected, Collected::Folder(files.into()));
        assert_eq!(left, 100 - 8 - 4 - 5 - 4);
        assert_eq!(collect(&at("out/empty")), Collected::Folder(Vec::new()));
        assert_eq!(collect(&at("secret")), Collected::File("secret".into()));
    }

    #[test]
    fn a_path_that_is_no_file_has_a_reason() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        fs::write(at("file"), "text").expect("a file");
        symlink(at("file"), at("link")).expect("a link");
        for (name, absence) in [
            ("none", Absence::Missing),
            ("file/none", Absence::Missing),
            ("link", Absence::Special),
        ] {
            assert_eq!(collect(&at(name)), absent(absence), "{name}");
        }
        assert_eq!(collect(Path::new("/dev/null")), absent(Absence::Special));
    }

    #[test]
    fn the_limit_of_bytes_holds_for_all_files_together() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("out")).expect("a folder");
        for name in ["a", "b"] {
            fs::write(at("out").join(name), [7; 10]).expect("a file");
        }
        let mut left = 21;
        assert_eq!(Collected::of(&at("out"), &mut left), absent(Absence::Large));
        assert_eq!(left, 21, "a path that is left out takes nothing");
        assert_ne!(
            Collected::of(&at("out"), &mut { 22 }),
            absent(Absence::Large)
        );
        // A hole is not read.
        let hole = fs::File::create(at("hole")).expect("a file");
        hole.set_len(1 << 40).expect("a size");
        assert_eq!(collect(&at("hole")), absent(Absence::Large));
        // A file of the kernel does not tell its size.
        let size = Collected::of(Path::new("/proc/self/status"), &mut { 10 });
        assert_eq!(size, absent(Absence::Large));
    }

    #[test]
    fn folders_too_deep_or_with_too_many_files_are_left_out() {
        let folder = tempfile::tempdir().expect("a folder");
        let deep: PathBuf = (0..COLLECT_DEPTH).map(|_| "d").collect();
        let deep = folder.path().join("deep").join(deep);
        fs::create_dir_all(&deep).expect("folders");
        fs::write(deep.join("file"), "").expect("a file");
        let collected = collect(&folder.path().join("deep"));
        let mut bytes = Vec::new();
        collected.write(&mut bytes).expect("memory");
        let read = Collected::read(&mut &bytes[..], &mut { COLLECT_BYTES });
        assert_eq!(read.expect("the receiver has the same limit"), collected);
        fs::create_dir(deep.join("d")).expect("a folder");
        let many = absent(Absence::Many);
        assert_eq!(collect(&folder.path().join("deep")), many);
        fs::create_dir(folder.path().join("many")).expect("a folder");
        for number in 0..=COLLECT_FILES {
            let name = format!("many/{number}");
            fs::write(folder.path().join(name), "").expect("a file");
        }
        assert_eq!(collect(&folder.path().join("many")), many);
    }

    #[test]
    fn each_outcome_is_read_back() {
        let folder = vec![
            ("a/b".into(), b"\nend\n".to_vec()),
            ("c".into(), Vec::new()),
        ];
        let all = [
            Collected::File(b"text".to_vec()),
            Collected::Folder(folder),
            Collected::Folder(Vec::new()),
        ];
        let absences = Absence::ALL.map(|(absence, _)| absent(absence));
        for collected in all.iter().chain(&absences) {
            let mut bytes = Vec::new();
            collected.write(&mut bytes).expect("memory");
            let read = Collected::read(&mut &bytes[..], &mut { 20 });
            assert_eq!(&read.expect("it is whole"), collected);
        }
    }

    #[test]
    fn names_that_leave_the_folder_are_refused() {
        let read = |name: &str| {
            let text = format!("folder 1\nentry {} 0\n{name}\n", name.len());
            Collected::read(&mut text.as_bytes(), &mut { COLLECT_BYTES })
        };
        for name in ["a", "a/b", "..a", "a b", &"x".repeat(MAX_PART)] {
            read(name).expect(name);
        }
        let deep = "a/".repeat(COLLECT_DEPTH + 1) + "a";
        let long = "x".repeat(MAX_PART + 1);
        for name in [
            "",
            "/",
            "/etc/passwd",
            "..",
            "../a",
            "a/..",
            "a/../../b",
            ".",
            "./a",
            "a/./b",
            "a//b",
            "a/",
            "a\0b",
            &deep,
            &long,
        ] {
            let refused = read(name).expect_err(name);
            assert!(matches!(refused, ReportError::Name(_)), "{name}: {refused}");
        }
    }

    #[test]
    fn announced_sizes_above_a_limit_are_refused_before_they_are_read() {
        for text in [
            "file 21\n",
            "folder 4097\n",
            "folder 1\nentry 21 0\n",
            "folder 1\nentry 1 20\na",
            "folder 2\nentry 1 10\na0123456789\nentry 1 9\nb",
        ] {
            let read = Collected::read(&mut text.as_bytes(), &mut { 20 });
            let refused = read.expect_err(text);
            assert!(
                matches!(refused, ReportError::TooLong { .. }),
                "{text}: {refused}"
            );
        }
        for text in ["absent\n", "absent why\n", "file\n", "folder 1\nfile 0\n"] {
            let read = Collected::read(&mut text.as_bytes(), &mut { 20 });
            assert!(matches!(read, Err(ReportError::Line(_))), "{text}");
        }
    }
}
