//! Reads and writes the run file: the program, its environment, and the sinks of its output.
//!
//! The first line is the version. Each other line is a key, a space and a value. Values are bytes, with a line
//! break written as `\n` and a backslash as `\\`. Repeated keys append to a list.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use crate::{COLLECT_BYTES, Network, User};

const VERSION: &[u8] = b"wormhole-run 1";

/// Destination or source of one of the program's streams.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sink {
    /// Console of the kernel.
    Console,
    /// Connection to a port of a vsock address.
    Vsock { cid: u32, port: u32 },
    /// Character device, such as a virtio port.
    Device(PathBuf),
}

/// Size of a terminal in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TerminalSize {
    pub rows: u16,
    pub columns: u16,
}

impl TerminalSize {
    /// Number of bytes of an encoded size.
    pub const BYTES: usize = 4;

    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let [rows, columns] = [self.rows, self.columns].map(u16::to_le_bytes);
        [rows[0], rows[1], columns[0], columns[1]]
    }

    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        let [first, second, third, fourth] = bytes;
        Self {
            rows: u16::from_le_bytes([first, second]),
            columns: u16::from_le_bytes([third, fourth]),
        }
    }
}

impl std::str::FromStr for TerminalSize {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (rows, columns) = text.split_once(' ').unwrap_or((text, ""));
        Ok(Self {
            rows: rows.parse()?,
            columns: columns.parse()?,
        })
    }
}

/// A virtio file system beside that of the host's files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    /// Mount point of the volume.
    pub place: PathBuf,
    pub is_writable: bool,
}

/// Instructions for `wormhole-init`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunFile {
    /// Path of the program.
    pub program: PathBuf,
    /// Arguments of the program, from its name on; never empty.
    pub arguments: Vec<OsString>,
    /// Complete environment of the program.
    pub variables: Vec<(OsString, OsString)>,
    /// Size of the program's terminal, if it has one. Its keys come from `stdin`, and its output goes to `stdout`.
    pub terminal: Option<TerminalSize>,
    /// Identity of the program.
    pub user: User,
    /// Name of the machine, if it has one.
    pub hostname: Option<String>,
    /// Working directory of the program.
    pub directory: PathBuf,
    /// Mount point of the host's files, if any: read-only, or as the root below a writable overlay (`/`).
    pub files: Option<PathBuf>,
    /// Further folders of the host, in the order of their file systems.
    pub volumes: Vec<Volume>,
    /// Source of the program's standard input; empty if `None`.
    pub stdin: Option<Sink>,
    pub stdout: Sink,
    /// Destination of standard error; that of standard output if `None`.
    pub stderr: Option<Sink>,
    pub report: Sink,
    /// Source of signal numbers for the program, one byte each.
    pub signals: Option<Sink>,
    /// Required size of a guest's window in bytes.
    pub window: Option<u64>,
    /// Required size of each window of a backend VM in bytes.
    pub windows: Option<u64>,
    /// Networks of the interfaces `eth0`, `eth1` and so on.
    pub networks: Vec<Network>,
    /// Number of tap interfaces to make, each bridged with the `eth` interface of its number.
    pub taps: usize,
    /// I/O port to which the exit status is written as one byte.
    pub exit_port: Option<u16>,
    /// Files and folders to include in the report when the program has ended.
    pub collect: Vec<PathBuf>,
    /// Maximum bytes of them all.
    pub collect_bytes: u64,
}

/// Error from parsing a run file.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum RunFileError {
    #[error("the run file starts with {0:?} instead of its version")]
    Version(OsString),
    #[error("line {line} of the run file has the unknown key {key:?}")]
    Key { line: usize, key: OsString },
    #[error("line {line} of the run file holds no valid {what}: {value:?}")]
    Value {
        line: usize,
        what: &'static str,
        value: OsString,
    },
    #[error("the run file names no program")]
    NoProgram,
}

impl RunFile {
    /// Creates a run file for a program, with output on the console and an empty environment.
    pub fn new(program: impl Into<OsString>) -> Self {
        let program = program.into();
        Self {
            program: program.clone().into(),
            arguments: vec![program],
            variables: Vec::new(),
            terminal: None,
            user: User::default(),
            hostname: None,
            directory: PathBuf::from("/"),
            files: None,
            volumes: Vec::new(),
            stdin: None,
            stdout: Sink::Console,
            stderr: Some(Sink::Console),
            report: Sink::Console,
            signals: None,
            window: None,
            windows: None,
            networks: Vec::new(),
            taps: 0,
            exit_port: None,
            collect: Vec::new(),
            collect_bytes: COLLECT_BYTES,
        }
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let mut text = VERSION.to_vec();
        text.push(b'\n');
        line(&mut text, "program", self.program.as_os_str());
        for argument in &self.arguments {
            line(&mut text, "argument", argument);
        }
        for (name, value) in &self.variables {
            let mut pair = name.clone();
            pair.push("=");
            pair.push(value);
            line(&mut text, "variable", &pair);
        }
        if let Some(size) = self.terminal {
            let size = format!("{} {}", size.rows, size.columns);
            line(&mut text, "terminal", OsStr::new(&size));
        }
        line(&mut text, "user", OsStr::new(&self.user.to_string()));
        if let Some(name) = &self.hostname {
            line(&mut text, "hostname", OsStr::new(name));
        }
        line(&mut text, "directory", self.directory.as_os_str());
        if let Some(files) = &self.files {
            line(&mut text, "files", files.as_os_str());
        }
        for volume in &self.volumes {
            let key = match volume.is_writable {
                true => "writable-volume",
                false => "volume",
            };
            line(&mut text, key, volume.place.as_os_str());
        }
        if let Some(stdin) = &self.stdin {
            line(&mut text, "stdin", &stdin.text());
        }
        line(&mut text, "stdout", &self.stdout.text());
        if let Some(stderr) = &self.stderr {
            line(&mut text, "stderr", &stderr.text());
        }
        line(&mut text, "report", &self.report.text());
        if let Some(signals) = &self.signals {
            line(&mut text, "signals", &signals.text());
        }
        if let Some(size) = self.window {
            line(&mut text, "window", OsStr::new(&size.to_string()));
        }
        if let Some(size) = self.windows {
            line(&mut text, "windows", OsStr::new(&size.to_string()));
        }
        for network in &self.networks {
            line(&mut text, "network", OsStr::new(&network.to_string()));
        }
        if self.taps > 0 {
            line(&mut text, "taps", OsStr::new(&self.taps.to_string()));
        }
        if let Some(port) = self.exit_port {
            line(&mut text, "exit-port", OsStr::new(&port.to_string()));
        }
        for path in &self.collect {
            line(&mut text, "collect", path.as_os_str());
        }
        let bytes = self.collect_bytes.to_string();
        line(&mut text, "collect-bytes", OsStr::new(&bytes));
        text
    }

    pub fn parse(bytes: &[u8]) -> Result<Self, RunFileError> {
        let mut lines = bytes.split(|&byte| byte == b'\n');
        let version = lines.next().unwrap_or_default();
        if version != VERSION {
            return Err(RunFileError::Version(OsString::from_vec(version.to_vec())));
        }
        let mut run = Self::new("");
        run.arguments.clear();
        run.stderr = None;
        for (index, text) in lines.enumerate().filter(|(_, text)| !text.is_empty()) {
            let line = index + 2;
            let space = text
                .iter()
                .position(|&byte| byte == b' ')
                .unwrap_or(text.len());
            let key = &text[..space];
            let raw = text.get(space + 1..).unwrap_or_default();
            let bad = |what| RunFileError::Value {
                line,
                what,
                value: OsString::from_vec(raw.to_vec()),
            };
            let value = unescape(raw).ok_or_else(|| bad("value"))?;
            let sink = || Sink::parse(&value).ok_or_else(|| bad("sink"));
            match key {
                b"program" => run.program = value.into(),
                b"argument" => run.arguments.push(value),
                b"variable" => run
                    .variables
                    .push(pair(&value).ok_or_else(|| bad("variable"))?),
                b"terminal" => {
                    run.terminal = Some(parsed(&value).ok_or_else(|| bad("size"))?);
                }
                b"user" => run.user = parsed(&value).ok_or_else(|| bad("user"))?,
                b"hostname" => {
                    run.hostname = Some(parsed(&value).ok_or_else(|| bad("hostname"))?);
                }
                b"directory" => run.directory = value.into(),
                b"files" => run.files = Some(value.into()),
                b"volume" | b"writable-volume" => run.volumes.push(Volume {
                    place: value.into(),
                    is_writable: key == b"writable-volume",
                }),
                b"stdin" => run.stdin = Some(sink()?),
                b"stdout" => run.stdout = sink()?,
                b"stderr" => run.stderr = Some(sink()?),
                b"report" => run.report = sink()?,
                b"signals" => run.signals = Some(sink()?),
                b"window" => run.window = Some(parsed(&value).ok_or_else(|| bad("size"))?),
                b"windows" => run.windows = Some(parsed(&value).ok_or_else(|| bad("size"))?),
                b"network" => run
                    .networks
                    .push(parsed(&value).ok_or_else(|| bad("network"))?),
                b"taps" => run.taps = parsed(&value).ok_or_else(|| bad("number"))?,
                b"exit-port" => run.exit_port = Some(parsed(&value).ok_or_else(|| bad("port"))?),
                b"collect" => run.collect.push(value.into()),
                b"collect-bytes" => {
                    run.collect_bytes = parsed(&value).ok_or_else(|| bad("size"))?;
                }
                _ => {
                    return Err(RunFileError::Key {
                        line,
                        key: OsString::from_vec(key.to_vec()),
                    });
                }
            }
        }
        if run.program.as_os_str().is_empty() || run.arguments.is_empty() {
            return Err(RunFileError::NoProgram);
        }
        Ok(run)
    }
}

impl Sink {
    fn text(&self) -> OsString {
        match self {
            Self::Console => "console".into(),
            Self::Vsock { cid, port } => format!("vsock {cid} {port}").into(),
            Self::Device(path) => {
                let mut text = OsString::from("device ");
                text.push(path);
                text
            }
        }
    }

    fn parse(value: &OsStr) -> Option<Self> {
        if value == "console" {
            return Some(Self::Console);
        }
        if let Some(path) = value.as_bytes().strip_prefix(b"device /") {
            let mut whole = b"/".to_vec();
            whole.extend_from_slice(path);
            return Some(Self::Device(OsString::from_vec(whole).into()));
        }
        let (cid, port) = value.to_str()?.strip_prefix("vsock ")?.split_once(' ')?;
        Some(Self::Vsock {
            cid: cid.parse().ok()?,
            port: port.parse().ok()?,
        })
    }
}

fn line(text: &mut Vec<u8>, key: &str, value: &OsStr) {
    text.extend_from_slice(key.as_bytes());
    text.push(b' ');
    for &byte in value.as_bytes() {
        match byte {
            b'\n' => text.extend_from_slice(b"\\n"),
            b'\\' => text.extend_from_slice(b"\\\\"),
            other => text.push(other),
        }
    }
    text.push(b'\n');
}

/// Unescapes a value; `None` if it is invalid. A NUL is invalid, since neither arguments nor paths can contain one.
fn unescape(raw: &[u8]) -> Option<OsString> {
    let mut value = Vec::with_capacity(raw.len());
    let mut bytes = raw.iter();
    while let Some(&byte) = bytes.next() {
        value.push(match byte {
            0 => return None,
            b'\\' => match bytes.next()? {
                b'n' => b'\n',
                b'\\' => b'\\',
                _ => return None,
            },
            other => other,
        });
    }
    Some(OsString::from_vec(value))
}

fn pair(value: &OsStr) -> Option<(OsString, OsString)> {
    let bytes = value.as_bytes();
    let equals = bytes
        .iter()
        .position(|&byte| byte == b'=')
        .filter(|&at| at > 0)?;
    Some((
        OsStr::from_bytes(&bytes[..equals]).into(),
        OsStr::from_bytes(&bytes[equals + 1..]).into(),
    ))
}

fn parsed<T: std::str::FromStr>(value: &OsStr) -> Option<T> {
    value.to_str()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full() -> RunFile {
        RunFile {
            program: "/bin/real program".into(),
            arguments: vec![
                "/bin/a b".into(),
                "".into(),
                "two\nlines \\n".into(),
                OsString::from_vec(vec![0xff, b' ']),
            ],
            variables: vec![("A".into(), "1=2".into()), ("EMPTY".into(), "".into())],
            user: "1000:100:4,27".parse().expect("a user"),
            hostname: Some("guest".to_owned()),
            directory: "/work here".into(),
            files: Some("/host".into()),
            volumes: [("/data one", false), ("/data two", true), ("/three", false)]
                .map(|(place, is_writable)| Volume {
                    place: place.into(),
                    is_writable,
                })
                .into(),
            stdin: Some(Sink::Vsock { cid: 2, port: 9005 }),
            stdout: Sink::Vsock { cid: 2, port: 9001 },
            stderr: Some(Sink::Device("/dev/vport0p2".into())),
            terminal: Some(TerminalSize {
                rows: 24,
                columns: 300,
            }),
            report: Sink::Console,
            signals: Some(Sink::Device("/dev/vport0p4".into())),
            window: Some(256 << 20),
            windows: Some(128 << 20),
            networks: vec![
                "address=10.0.0.2/24,gateway=10.0.0.1,dns=9.9.9.9"
                    .parse()
                    .expect("a network"),
            ],
            taps: 2,
            exit_port: Some(0x501),
            collect: vec!["/run/summary.json".into()],
            collect_bytes: 3 << 20,
        }
    }

    #[test]
    fn what_was_written_is_read_back() {
        assert_eq!(RunFile::parse(&full().to_bytes()), Ok(full()));
    }

    #[test]
    fn a_file_cut_anywhere_is_an_error_or_a_shorter_file_but_no_panic() {
        let bytes = full().to_bytes();
        for length in 0..bytes.len() {
            if let Ok(run) = RunFile::parse(&bytes[..length]) {
                assert!(!run.arguments.is_empty());
            }
        }
    }

    #[test]
    fn bad_lines_are_refused_with_their_number() {
        let parse = |lines: &str| {
            RunFile::parse(format!("wormhole-run 1\nprogram /x\n{lines}\n").as_bytes())
        };
        for (lines, what) in [
            ("variable noequals", "variable"),
            ("variable =x", "variable"),
            ("window -1", "size"),
            ("windows x", "size"),
            ("window 18446744073709551616", "size"),
            ("collect-bytes many", "size"),
            ("exit-port 65536", "port"),
            ("network address=10.0.0.2", "network"),
            ("taps -1", "number"),
            ("user 1000", "user"),
            ("terminal 24", "size"),
            ("terminal 24 65536", "size"),
            ("stdout vsock 2", "sink"),
            ("stdout device relative", "sink"),
            ("stdout", "sink"),
            ("argument \\", "value"),
            ("argument \\x", "value"),
            ("argument a\0b", "value"),
        ] {
            let error = parse(lines).expect_err(lines);
            assert!(
                matches!(&error, RunFileError::Value { line: 3, what: found, .. } if *found == what),
                "{lines}: {error}"
            );
        }
        assert!(matches!(
            parse("what ever"),
            Err(RunFileError::Key { line: 3, .. })
        ));
    }

    #[test]
    fn a_file_without_version_or_program_is_refused() {
        assert!(matches!(RunFile::parse(b""), Err(RunFileError::Version(_))));
        assert!(matches!(
            RunFile::parse(b"wormhole-run 2\nargument /x\n"),
            Err(RunFileError::Version(_))
        ));
        assert_eq!(
            RunFile::parse(b"wormhole-run 1\n"),
            Err(RunFileError::NoProgram)
        );
        for incomplete in ["argument /x", "program /x", "program \nargument /x"] {
            let text = format!("wormhole-run 1\n{incomplete}\n");
            let parsed = RunFile::parse(text.as_bytes());
            assert_eq!(parsed, Err(RunFileError::NoProgram), "{incomplete}");
        }
    }
}
