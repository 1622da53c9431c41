//! Reads and writes the report: how the program ended, and the requested files.
//!
//! A first line with the version, a line with the ending, the outcome for each requested path, and the line `end`,
//! without which the report is incomplete. The content comes from the guest; its size is bounded on reading.

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read, Write};

use crate::collect::Collected;

const VERSION: &str = "wormhole-report 2";
const MAX_LINE: u64 = 256;
const MAX_MESSAGE: u64 = 64 << 10;
/// Maximum number of paths that can be requested.
pub const MAX_FILES: usize = 64;

/// End of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The program exited with this status.
    Exited(u8),
    /// This signal ended the program.
    Signalled(u8),
    /// The program did not run.
    Failed { status: u8, message: String },
}

impl Ending {
    /// Returns the status that a shell would show.
    pub fn status(&self) -> u8 {
        match *self {
            Self::Exited(status) | Self::Failed { status, .. } => status,
            Self::Signalled(signal) => signal.saturating_add(128),
        }
    }
}

/// Report of a machine at its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    pub ending: Ending,
    /// Outcomes for the requested paths, in their order. A report of a failure can have fewer.
    pub collected: Vec<Collected>,
}

/// Error from reading a report.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    #[error("the report ended before it was complete")]
    Incomplete(#[source] io::Error),
    #[error("the report has the line {0:?}, which means nothing here")]
    Line(String),
    #[error("the report announces {what} of {length}, more than the {most} that are taken")]
    TooLong {
        what: &'static str,
        length: u64,
        most: u64,
    },
    #[error("the report has a file with the name {0:?}, which can leave its folder")]
    Name(OsString),
}

impl Report {
    pub fn write(&self, mut out: impl Write) -> io::Result<()> {
        writeln!(out, "{VERSION}")?;
        match &self.ending {
            Ending::Exited(status) => writeln!(out, "exited {status}")?,
            Ending::Signalled(signal) => writeln!(out, "signalled {signal}")?,
            Ending::Failed { status, message } => {
                writeln!(out, "failed {status} {}", message.len())?;
                writeln!(out, "{message}")?;
            }
        }
        for collected in &self.collected {
            collected.write(&mut out)?;
        }
        writeln!(out, "end")?;
        out.flush()
    }

    /// Reads a report with outcomes for at most `most_paths` paths, with at most `most_bytes` of files and names.
    ///
    /// # Errors
    /// The report is incomplete, exceeds a limit, or has an invalid line.
    pub fn read(input: impl Read, most_paths: usize, most_bytes: u64) -> Result<Self, ReportError> {
        let mut input = BufReader::new(input);
        expect(&mut input, VERSION)?;
        let text = line(&mut input)?;
        let words: Vec<&str> = text.split(' ').collect();
        let byte = |word: &str| {
            word.parse::<u8>()
                .map_err(|_| ReportError::Line(text.clone()))
        };
        let ending = match words[..] {
            ["exited", status] => Ending::Exited(byte(status)?),
            ["signalled", signal] => Ending::Signalled(byte(signal)?),
            ["failed", status, length] => {
                let status = byte(status)?;
                let length = bounded(length, "a message", MAX_MESSAGE, &text)?;
                let message = String::from_utf8_lossy(&bytes(&mut input, length)?).into_owned();
                expect(&mut input, "")?;
                Ending::Failed { status, message }
            }
            _ => return Err(ReportError::Line(text)),
        };
        let mut left = most_bytes;
        let mut collected = Vec::new();
        loop {
            let text = line(&mut input)?;
            if text == "end" {
                return Ok(Self { ending, collected });
            }
            if collected.len() == most_paths {
                return Err(ReportError::Line(text));
            }
            collected.push(Collected::read_rest(&text, &mut input, &mut left)?);
        }
    }
}

pub(crate) fn line(input: &mut impl BufRead) -> Result<String, ReportError> {
    let mut text = Vec::new();
    input
        .take(MAX_LINE)
        .read_until(b'\n', &mut text)
        .map_err(ReportError::Incomplete)?;
    match text.pop() {
        Some(b'\n') => Ok(String::from_utf8_lossy(&text).into_owned()),
        Some(last) if text.len() as u64 + 1 == MAX_LINE => {
            text.push(last);
            Err(ReportError::Line(
                String::from_utf8_lossy(&text).into_owned(),
            ))
        }
        _ => Err(ReportError::Incomplete(io::ErrorKind::UnexpectedEof.into())),
    }
}

pub(crate) fn expect(input: &mut impl BufRead, wanted: &str) -> Result<(), ReportError> {
    let text = line(input)?;
    if text == wanted {
        Ok(())
    } else {
        Err(ReportError::Line(text))
    }
}

pub(crate) fn bounded(
    word: &str,
    what: &'static str,
    most: u64,
    text: &str,
) -> Result<u64, ReportError> {
    match word.parse::<u64>() {
        Ok(length) if length <= most => Ok(length),
        Ok(length) => Err(ReportError::TooLong { what, length, most }),
        Err(_) => Err(ReportError::Line(text.to_owned())),
    }
}

/// Reads exactly `length` bytes. Allocates memory as data arrives, not by the announced length.
pub(crate) fn bytes(input: &mut impl Read, length: u64) -> Result<Vec<u8>, ReportError> {
    let mut data = Vec::new();
    input
        .take(length)
        .read_to_end(&mut data)
        .map_err(ReportError::Incomplete)?;
    if data.len() as u64 == length {
        Ok(data)
    } else {
        Err(ReportError::Incomplete(io::ErrorKind::UnexpectedEof.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collect::{Absence, COLLECT_BYTES};

    fn read(bytes: &[u8]) -> Result<Report, ReportError> {
        Report::read(bytes, MAX_FILES, COLLECT_BYTES)
    }

    fn written(report: &Report) -> Vec<u8> {
        let mut bytes = Vec::new();
        report.write(&mut bytes).expect("a vector takes all");
        bytes
    }

    #[test]
    fn what_was_written_is_read_back() {
        for ending in [
            Ending::Exited(3),
            Ending::Signalled(9),
            Ending::Failed {
                status: 125,
                message: "two\nlines".into(),
            },
        ] {
            let report = Report {
                ending,
                collected: vec![
                    Collected::File(b"\nend\n\0".to_vec()),
                    Collected::Absent(Absence::Missing),
                    Collected::Folder(vec![("a b".into(), Vec::new())]),
                ],
            };
            assert_eq!(read(&written(&report)).expect("it is whole"), report);
        }
    }

    #[test]
    fn a_report_cut_anywhere_is_incomplete() {
        let report = Report {
            ending: Ending::Failed {
                status: 125,
                message: "why".into(),
            },
            collected: vec![Collected::Folder(vec![("a".into(), b"text".to_vec())])],
        };
        let bytes = written(&report);
        for length in 0..bytes.len() {
            assert!(
                matches!(read(&bytes[..length]), Err(ReportError::Incomplete(_))),
                "{length}"
            );
        }
    }

    #[test]
    fn hostile_reports_are_refused() {
        let read = |rest: &str| read(format!("{VERSION}\n{rest}").as_bytes());
        assert!(matches!(
            read("exited 256\nend\n"),
            Err(ReportError::Line(_))
        ));
        assert!(matches!(read("exited\nend\n"), Err(ReportError::Line(_))));
        assert!(matches!(
            read("exited 0\nfile 99999999999\n"),
            Err(ReportError::TooLong { .. })
        ));
        assert!(matches!(
            read("exited 0\nfile -1\n"),
            Err(ReportError::Line(_))
        ));
        assert!(matches!(
            read("failed 1 65537\n"),
            Err(ReportError::TooLong { .. })
        ));
        assert!(matches!(
            read(&"x".repeat(10_000)),
            Err(ReportError::Line(_))
        ));
        let many = format!("exited 0\n{}end\n", "file 0\n\n".repeat(65));
        assert!(matches!(read(&many), Err(ReportError::Line(_))));
    }

    #[test]
    fn files_that_were_not_asked_for_are_refused_before_they_are_read() {
        let announced = format!("{VERSION}\nexited 0\nfile 67108864\n");
        assert!(matches!(
            Report::read(announced.as_bytes(), 0, COLLECT_BYTES),
            Err(ReportError::Line(_))
        ));
        let none = format!("{VERSION}\nexited 0\nend\n");
        assert!(Report::read(none.as_bytes(), 0, 0).is_ok());
    }

    #[test]
    fn a_signal_shows_as_in_a_shell() {
        assert_eq!(Ending::Signalled(9).status(), 137);
        assert_eq!(Ending::Exited(7).status(), 7);
    }
}
