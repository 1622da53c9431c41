//! Writes and compares SHA-256 sums of an image's files, in the format of `sha256sum --check`.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::error::{self, ImageError};

/// Name of the file of sums.
pub const FILE: &str = "SHA256SUMS";

/// A difference between an image and its state when it was built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Damage {
    /// The file of sums is missing: the image is damaged, or was built before images had sums.
    NoSums,
    /// The file is missing.
    Missing(&'static str),
    /// The file's sum differs or is not in the file of sums.
    Changed(&'static str),
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSums => write!(f, "it has no {FILE}"),
            Self::Missing(name) => write!(f, "{name} is missing"),
            Self::Changed(name) => write!(f, "{name} is not as it was built"),
        }
    }
}

/// Writes the sums of the files `names` in `folder`.
pub fn write(folder: &Path, names: &[&'static str]) -> Result<(), ImageError> {
    let mut text = String::new();
    for name in names {
        let path = folder.join(name);
        text.push_str(&line(&path, name).map_err(error::io("read", &path))?);
    }
    let path = folder.join(FILE);
    fs::write(&path, text).map_err(error::io("write", &path))
}

/// Compares the files `names` in `folder` with its sums and returns the first difference.
pub fn compare(folder: &Path, names: &[&'static str]) -> Result<Option<Damage>, ImageError> {
    let path = folder.join(FILE);
    let sums = match fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Some(Damage::NoSums)),
        read => read.map_err(error::io("read", &path))?,
    };
    for name in names {
        let path = folder.join(name);
        let line = match line(&path, name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Some(Damage::Missing(name)));
            }
            read => read.map_err(error::io("read", &path))?,
        };
        let known = sums.split_inclusive(|&byte| byte == b'\n');
        if !known.into_iter().any(|known| known == line.as_bytes()) {
            return Ok(Some(Damage::Changed(name)));
        }
    }
    Ok(None)
}

fn line(path: &Path, name: &str) -> io::Result<String> {
    let (sum, _) = of_all(&mut File::open(path)?)?;
    Ok(format!("{sum}  {name}\n"))
}

/// The sum of all that a reader has, and its bytes.
pub fn of_all(reader: &mut impl Read) -> io::Result<(String, u64)> {
    let mut sum = Sha256::new();
    let bytes = io::copy(reader, &mut Sum(&mut sum))?;
    Ok((digits(sum), bytes))
}

/// The sum of `data`.
pub fn of(data: &[u8]) -> String {
    digits(Sha256::new_with_prefix(data))
}

fn digits(sum: Sha256) -> String {
    let bytes = sum.finalize();
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Writer that feeds a hash.
struct Sum<'a>(&'a mut Sha256);

impl io::Write for Sum<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_tool_agrees() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("a"), vec![7; 100_000]).expect("a file");
        write(folder.path(), &["a"]).expect("it is read");
        let tool = std::process::Command::new("sha256sum")
            .args(["--check", "--status", FILE])
            .current_dir(folder.path())
            .status();
        assert!(tool.expect("coreutils are there").success());
        assert_eq!(compare(folder.path(), &["a"]).expect("it is read"), None);
    }
}
