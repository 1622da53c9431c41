//! Executes programs with execve(2) and determines the cause of a failure.
//!
//! `execvp`, which the standard library uses, runs a file that the kernel does not support (ENOEXEC) with `/bin/sh`:
//! a program of another architecture would run as a shell script. Here ENOEXEC is an error, also for a script without
//! `#!`.

use std::ffi::{CString, NulError, OsStr, OsString};
use std::fmt;
use std::fs::{self, File, FileType};
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Seek, SeekFrom};
use std::mem;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;

use crate::{User, status};

/// Maximum bytes of a script's first line that the kernel reads (`BINPRM_BUF_SIZE` of Linux).
const SCRIPT_LINE: u64 = 256;

/// Machines in the header of an ELF file whose programs a guest executes: EM_386 and EM_X86_64.
const MACHINES: [u16; 2] = [3, 62];

/// Maximum bytes of an interpreter's path (`PATH_MAX`).
const LONGEST_PATH: u64 = 4096;

/// Error from executing a program.
#[derive(Debug, thiserror::Error)]
pub enum NotExecuted {
    #[error("cannot run a program whose name is empty")]
    NoName,
    #[error("cannot run {0}: there is no such program in PATH")]
    NotInPath(String),
    #[error("cannot run {program}: it is {what}, not a program")]
    Kind { program: String, what: &'static str },
    #[error("cannot run {0}: it is not executable")]
    Permission(String),
    #[error("cannot run {program}: its interpreter {} is {fault}", .interpreter.display())]
    Interpreter {
        program: String,
        interpreter: PathBuf,
        fault: InterpreterFault,
    },
    #[error("cannot run {program}: Exec format error: it is {what}")]
    Format { program: String, what: &'static str },
    #[error("cannot run {program}: an argument or a variable holds a NUL byte")]
    Nul { program: String },
    #[error("cannot run {program}: {source}")]
    System { program: String, source: io::Error },
}

/// Reason why an interpreter cannot be executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InterpreterFault {
    Missing,
    /// Names the kind of file that stands there in place of a program.
    Kind(&'static str),
    NotExecutable,
}

impl InterpreterFault {
    /// The fault of the file at a path; none if it may be executed.
    #[must_use]
    pub fn of(interpreter: &Path) -> Option<Self> {
        match fs::metadata(interpreter) {
            Err(error) if error.kind() == ErrorKind::NotFound => Some(Self::Missing),
            // The error of execve(2) says it.
            Err(_) => None,
            Ok(data) => match not_a_program(data.file_type()) {
                Some(what) => Some(Self::Kind(what)),
                None => is_not_executable(interpreter).then_some(Self::NotExecutable),
            },
        }
    }
}

impl fmt::Display for InterpreterFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("not there"),
            Self::Kind(what) => write!(f, "{what}, not a program"),
            Self::NotExecutable => f.write_str("not executable"),
        }
    }
}

impl NotExecuted {
    /// Returns the exit status that shells use: 127 if the program or its interpreter is missing, 126 otherwise.
    #[must_use]
    pub fn status(&self) -> u8 {
        match self {
            Self::NoName
            | Self::NotInPath(_)
            | Self::Interpreter {
                fault: InterpreterFault::Missing,
                ..
            } => status::NOT_FOUND,
            Self::System { source, .. } if source.kind() == ErrorKind::NotFound => {
                status::NOT_FOUND
            }
            _ => status::NOT_EXECUTABLE,
        }
    }

    /// Determines the cause of the error with which execve(2) or an access to the file failed.
    #[must_use]
    pub fn because(program: &Path, source: io::Error) -> Self {
        let name = || program.display().to_string();
        if program.as_os_str().is_empty() {
            return Self::NoName;
        }
        let kind = fs::metadata(program).map(|data| data.file_type());
        if let Some(what) = kind.ok().and_then(not_a_program) {
            return Self::Kind {
                program: name(),
                what,
            };
        }
        match source.raw_os_error() {
            Some(libc::EACCES) if is_not_executable(program) => Self::Permission(name()),
            Some(libc::ENOENT | libc::EACCES) => match interpreter(program) {
                Ok(Some((interpreter, fault))) => Self::Interpreter {
                    program: name(),
                    interpreter,
                    fault,
                },
                _ => Self::System {
                    program: name(),
                    source,
                },
            },
            // Linux returns EIO for a file that is shorter than its header requires.
            Some(libc::ENOEXEC | libc::EIO) => Self::format(program),
            _ => Self::System {
                program: name(),
                source,
            },
        }
    }

    /// Finds out from its file whether a guest's kernel will execute a program. A file that cannot be read, or has
    /// another fault, is for the kernel to judge.
    ///
    /// # Errors
    /// The kernel does not know the program's format, or the interpreter is missing.
    pub fn expect(program: &Path) -> Result<(), Self> {
        if let Ok(Some((interpreter, fault))) = interpreter(program) {
            return Err(Self::Interpreter {
                program: program.display().to_string(),
                interpreter,
                fault,
            });
        }
        let mut start = Vec::new();
        let read = File::open(program).and_then(|file| file.take(20).read_to_end(&mut start));
        let is_executed = match &start[..] {
            [b'#', b'!', ..] => true,
            [0x7f, b'E', b'L', b'F', .., low, high] if start.len() == 20 => {
                MACHINES.contains(&u16::from_le_bytes([*low, *high]))
            }
            _ => false,
        };
        match read.is_err() || is_executed {
            true => Ok(()),
            false => Err(Self::format(program)),
        }
    }

    /// Returns the error for a file in a format that the kernel cannot execute.
    #[must_use]
    pub fn format(program: &Path) -> Self {
        let mut magic = [0; 4];
        let elf = File::open(program)
            .and_then(|mut file| file.read_exact(&mut magic))
            .is_ok()
            && magic == *b"\x7fELF";
        Self::Format {
            program: program.display().to_string(),
            what: if elf {
                "for another machine, or damaged"
            } else {
                "neither a program nor a script whose first line is #! and its interpreter"
            },
        }
    }
}

/// A program to execute, with all arguments of execve(2).
#[derive(Clone)]
pub struct Execution {
    program: PathBuf,
    path: CString,
    arguments: Vec<CString>,
    variables: Vec<CString>,
    ends_with_parent: bool,
    /// Signals that the parent blocks and the program unblocks.
    unblocked: libc::sigset_t,
    /// The program's identity, if it is not the parent's.
    user: Option<User>,
    leads_terminal: bool,
}

impl fmt::Debug for Execution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Execution")
            .field("program", &self.program)
            .field("arguments", &self.arguments)
            .finish_non_exhaustive()
    }
}

impl Execution {
    /// Prepares an execution. `arguments` begin with the program's name (`argv[0]`).
    pub fn new<'a>(
        program: &Path,
        arguments: impl IntoIterator<Item = &'a OsString>,
        variables: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Self, NotExecuted> {
        if program.as_os_str().is_empty() {
            return Err(NotExecuted::NoName);
        }
        let text = |text: &OsStr| CString::new(text.as_bytes());
        let pair = |(name, value): (OsString, OsString)| {
            CString::new([name.as_bytes(), b"=", value.as_bytes()].concat())
        };
        let make = || -> Result<Self, NulError> {
            Ok(Self {
                program: program.to_owned(),
                path: text(program.as_os_str())?,
                arguments: arguments
                    .into_iter()
                    .map(|argument| text(argument))
                    .collect::<Result<_, _>>()?,
                variables: variables.into_iter().map(pair).collect::<Result<_, _>>()?,
                ends_with_parent: false,
                unblocked: set(&[]),
                user: None,
                leads_terminal: false,
            })
        };
        make().map_err(|_| NotExecuted::Nul {
            program: program.display().to_string(),
        })
    }

    /// Lets the kernel kill the program when the thread that started it ends (PR_SET_PDEATHSIG).
    #[must_use]
    pub fn ending_with_its_parent(mut self) -> Self {
        self.ends_with_parent = true;
        self
    }

    /// Unblocks signals that the parent blocks. The program inherits the rest of the parent's signal mask.
    #[must_use]
    pub fn unblocking(mut self, signals: &[libc::c_int]) -> Self {
        self.unblocked = set(signals);
        self
    }

    /// Executes the program with another identity. The parent must be privileged.
    #[must_use]
    pub fn with_user(mut self, user: User) -> Self {
        self.user = Some(user);
        self
    }

    /// Makes the terminal at standard input the controlling one of the program, which leads a session.
    #[must_use]
    pub fn leading_its_terminal(mut self) -> Self {
        self.leads_terminal = true;
        self
    }

    /// Returns a command whose process executes the program. The caller may set streams, working directory and process
    /// group, but not arguments and environment.
    #[must_use]
    pub fn command(self) -> Command {
        let pointers = |texts: &[CString]| {
            let ends = texts.iter().map(|text| text.as_ptr().addr());
            ends.chain([ptr::null::<libc::c_char>().addr()])
                .collect::<Vec<usize>>()
        };
        let (arguments, variables) = (pointers(&self.arguments), pointers(&self.variables));
        let mut command = Command::new(&self.program);
        // SAFETY: between fork and exec the closure only makes system calls and reads errno. Both lists end with a null
        // pointer, and the closure owns the strings that they point to.
        unsafe {
            command.pre_exec(move || {
                let owned = &self;
                let unblocked = &raw const owned.unblocked;
                if libc::sigprocmask(libc::SIG_UNBLOCK, unblocked, ptr::null_mut()) != 0
                    || owned.leads_terminal
                        && (libc::setsid() < 0 || libc::ioctl(0, libc::TIOCSCTTY, 0) != 0)
                    || owned.user.as_ref().is_some_and(|user| {
                        libc::setgroups(user.groups.len(), user.groups.as_ptr()) != 0
                            || libc::setgid(user.gid) != 0
                            || libc::setuid(user.uid) != 0
                    })
                    || owned.ends_with_parent
                        && libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0
                {
                    return Err(io::Error::last_os_error());
                }
                libc::execve(
                    owned.path.as_ptr(),
                    arguments.as_ptr().cast(),
                    variables.as_ptr().cast(),
                );
                Err(io::Error::last_os_error())
            });
        }
        command
    }
}

fn set(signals: &[libc::c_int]) -> libc::sigset_t {
    // SAFETY: all zeroes is a valid sigset_t; the functions write only to it and reject invalid signal numbers.
    unsafe {
        let mut set = mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for &signal in signals {
            libc::sigaddset(&raw mut set, signal);
        }
        set
    }
}

/// Returns the kind of a file that cannot be a program; `None` for a regular file.
#[must_use]
pub fn not_a_program(kind: FileType) -> Option<&'static str> {
    if kind.is_file() {
        None
    } else if kind.is_dir() {
        Some("a folder")
    } else if kind.is_fifo() {
        Some("a named pipe")
    } else if kind.is_socket() {
        Some("a socket")
    } else {
        Some("a device")
    }
}

fn is_not_executable(program: &Path) -> bool {
    fs::metadata(program).is_ok_and(|data| data.permissions().mode() & 0o111 == 0)
}

/// Number of scripts that the kernel follows, one after another, to an interpreter.
const SCRIPTS: u32 = 5;

/// Returns the interpreter in a script's first line or a program's PT_INTERP if it does not exist. The interpreter of a
/// script may be a script whose interpreter is missing.
fn interpreter(program: &Path) -> io::Result<Option<(PathBuf, InterpreterFault)>> {
    interpreter_within(SCRIPTS, program)
}

fn interpreter_within(
    scripts: u32,
    program: &Path,
) -> io::Result<Option<(PathBuf, InterpreterFault)>> {
    let mut file = File::open(program)?;
    let Some(named) = script_interpreter(&mut file)?.or(elf_interpreter(&mut file)?) else {
        return Ok(None);
    };
    Ok(match InterpreterFault::of(&named) {
        Some(fault) => Some((named, fault)),
        // The kernel says ELOOP of scripts that name each other.
        None => match scripts.checked_sub(1) {
            Some(left) => interpreter_within(left, &named)?,
            None => None,
        },
    })
}

fn script_interpreter(file: &mut File) -> io::Result<Option<PathBuf>> {
    file.rewind()?;
    let mut line = Vec::new();
    BufReader::new(file.take(SCRIPT_LINE)).read_until(b'\n', &mut line)?;
    let Some(rest) = line.strip_prefix(b"#!") else {
        return Ok(None);
    };
    let mut words = rest
        .split(|byte| matches!(byte, b' ' | b'\t' | b'\n'))
        .filter(|word| !word.is_empty());
    Ok(words
        .next()
        .map(|word| OsString::from_vec(word.to_vec()).into()))
}

/// Returns the path in the program header of type PT_INTERP of an ELF64 file (elf(5)).
fn elf_interpreter(file: &mut File) -> io::Result<Option<PathBuf>> {
    const HEADER: usize = 64;
    const ENTRY: usize = 56;
    const PT_INTERP: u64 = 3;
    let mut header = [0; HEADER];
    file.rewind()?;
    if file.read_exact(&mut header).is_err() || !header.starts_with(b"\x7fELF\x02\x01") {
        return Ok(None);
    }
    let start = number(&header, 32, 8);
    for index in 0..number(&header, 56, 2) {
        let mut entry = [0; ENTRY];
        file.seek(SeekFrom::Start(
            start.saturating_add(index * number(&header, 54, 2)),
        ))?;
        file.read_exact(&mut entry)?;
        if number(&entry, 0, 4) == PT_INTERP {
            file.seek(SeekFrom::Start(number(&entry, 8, 8)))?;
            let mut path = Vec::new();
            let length = number(&entry, 32, 8).min(LONGEST_PATH);
            file.take(length).read_to_end(&mut path)?;
            path.truncate(
                path.iter()
                    .position(|&byte| byte == 0)
                    .unwrap_or(path.len()),
            );
            return Ok(Some(OsString::from_vec(path).into()));
        }
    }
    Ok(None)
}

/// Reads a little-endian number of up to eight bytes, which must lie within `data`.
fn number(data: &[u8], at: usize, bytes: usize) -> u64 {
    data[at..at + bytes]
        .iter()
        .rev()
        .fold(0, |sum, &byte| sum << 8 | u64::from(byte))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::process::Stdio;

    use super::*;

    /// Executes a file and returns its status, or the error.
    fn execute(program: &Path) -> Result<Option<i32>, NotExecuted> {
        let arguments = [program.as_os_str().to_owned(), "argument".into()];
        let execution = Execution::new(program, &arguments, [("A".into(), "B=C".into())])?;
        execution
            .command()
            .stdin(Stdio::null())
            .status()
            .map(|status| status.code())
            .map_err(|source| NotExecuted::because(program, source))
    }

    fn executable(path: &Path, content: &[u8]) {
        let source = path.with_extension("source");
        fs::write(&source, content).expect("it is written");
        // A process of its own writes the file: a fork of another test could hold a writer of this process open, and
        // execve(2) would fail with ETXTBSY.
        let mut install = Command::new("install");
        let made = install.args(["-m", "755"]).args([&source, path]).status();
        assert!(made.expect("it is there").success());
    }

    fn refused(program: &Path, status: u8, words: &str) {
        let error = execute(program).expect_err(words);
        assert_eq!(error.status(), status, "{error}");
        assert!(error.to_string().contains(words), "{error}");
    }

    #[test]
    fn a_program_has_its_arguments_and_its_environment() {
        let folder = tempfile::tempdir().expect("a folder");
        let script = folder.path().join("script");
        executable(
            &script,
            b"#!/bin/sh\ntest \"$1\" = argument && test \"$A\" = B=C && exit 7\n",
        );
        assert_eq!(execute(&script).expect("it runs"), Some(7));
    }

    #[test]
    fn the_kernel_decides_about_formats_and_no_shell_does() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file");
        let shell = fs::read("/bin/sh").expect("every machine has a shell");
        let mut foreign = shell.clone();
        // EM_AARCH64.
        foreign[18..20].copy_from_slice(&[183, 0]);
        for content in [&foreign[..], &shell[..100], &shell[..20]] {
            executable(&path, content);
            refused(
                &path,
                126,
                "Exec format error: it is for another machine, or damaged",
            );
        }
        for content in [&b"exit 0\n"[..], b"", b"\0\0"] {
            executable(&path, content);
            refused(&path, 126, "Exec format error: it is neither a program nor");
        }
    }

    #[test]
    fn causes_are_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        // Also before the kernel has refused them.
        for (name, other) in [("first", "second"), ("second", "first")] {
            let line = format!("#!{}\n", path(other).display());
            executable(&path(name), line.as_bytes());
        }
        NotExecuted::expect(&path("first")).expect("both are there");
        refused(&path("first"), 126, "Too many levels of symbolic links");
        refused(Path::new(""), 127, "name is empty");
        refused(&path("missing"), 127, "No such file");
        refused(folder.path(), 126, "it is a folder");
        symlink(path("loop"), path("loop")).expect("a link");
        refused(&path("loop"), 126, "Too many levels of symbolic links");
        let made = Command::new("mkfifo").arg(path("fifo")).status();
        assert!(made.expect("it is there").success());
        refused(&path("fifo"), 126, "it is a named pipe");
        fs::write(path("text"), "#!/bin/sh\n").expect("it is written");
        refused(&path("text"), 126, "it is not executable");
        refused(&path("text").join("below"), 126, "Not a directory");
        executable(&path("script"), b"#! /no/such/shell -e\n");
        refused(
            &path("script"),
            127,
            "its interpreter /no/such/shell is not there",
        );
        let chain = format!("#!{}\n", path("script").display());
        executable(&path("second"), chain.as_bytes());
        refused(&path("second"), 127, "/no/such/shell is not there");
        executable(&path("script"), b"#!/tmp\n");
        for script in ["script", "second"] {
            let words = "its interpreter /tmp is a folder, not a program";
            refused(&path(script), 126, words);
        }
        let text = path("text").display().to_string();
        executable(&path("script"), format!("#!{text}\n").as_bytes());
        let words = format!("its interpreter {text} is not executable");
        refused(&path("script"), 126, &words);
    }

    #[test]
    fn a_missing_loader_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("program");
        let mut program = fs::read("/bin/sh").expect("every machine has a shell");
        let loader = b"/lib64/ld-linux-x86-64.so.2\0";
        let at = program
            .windows(loader.len())
            .position(|window| window == loader)
            .expect("it is linked dynamically");
        program[at + 1] = b'X';
        executable(&path, &program);
        refused(
            &path,
            127,
            "its interpreter /Xib64/ld-linux-x86-64.so.2 is not there",
        );
    }
}
