//! Runs the program and waits for its end, reaping orphans as PID 1 must.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::Stdio;
use std::thread::{self, JoinHandle};

use wormhole_init::{Ending, Execution, NotExecuted, RESIZE, RunFile, TerminalSize, status};

use crate::InitError;
use crate::output::{OutputError, Stream};
use crate::terminal::{self, Terminal};

#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    #[error(transparent)]
    Start(#[from] NotExecuted),
    #[error("cannot enter the working directory {directory}: {source}")]
    Directory {
        directory: String,
        source: io::Error,
    },
    #[error("cannot wait for {program}: {source}")]
    Wait { program: String, source: io::Error },
}

impl ProgramError {
    /// Returns the exit status that shells use.
    pub fn status(&self) -> u8 {
        match self {
            Self::Start(error) => error.status(),
            Self::Directory { .. } | Self::Wait { .. } => status::SETUP,
        }
    }
}

/// Streams of the program.
#[derive(Debug)]
pub struct Streams {
    /// Standard input; empty if `None`.
    pub stdin: Option<File>,
    pub stdout: Stream,
    /// Standard error; as standard output if `None`.
    pub stderr: Option<Stream>,
    /// The program's terminal. Its keys come from `stdin`.
    pub terminal: Option<Terminal>,
    /// Stream of signal numbers for the program, one byte each.
    pub signals: Option<File>,
}

/// Ends of the program's streams.
struct Ends {
    /// Standard input, output and error.
    program: [Stdio; 3],
    /// Files to copy to streams.
    copied: Vec<(File, Stream)>,
    controller: Option<File>,
}

impl Ends {
    fn new(
        stdin: Option<File>,
        stdout: Stream,
        stderr: Option<Stream>,
        terminal: Option<Terminal>,
    ) -> io::Result<Self> {
        let mut copied = Vec::new();
        let mut pipe = |to: Stream| {
            let (reader, writer) = io::pipe()?;
            copied.push((File::from(OwnedFd::from(reader)), to));
            Ok::<_, io::Error>(File::from(OwnedFd::from(writer)))
        };
        let Some(terminal) = terminal else {
            let stdout = pipe(stdout)?;
            let stderr = stderr.map_or_else(|| stdout.try_clone(), pipe)?;
            let stdin = stdin.map_or_else(Stdio::null, Stdio::from);
            return Ok(Self {
                program: [stdin, stdout.into(), stderr.into()],
                copied,
                controller: None,
            });
        };
        let Terminal {
            controller,
            program,
        } = terminal;
        let stderr = stderr.map_or_else(|| program.try_clone(), pipe)?;
        copied.push((controller.try_clone()?, stdout));
        if let Some(keys) = stdin {
            terminal::type_from(keys, controller.try_clone()?);
        }
        Ok(Self {
            program: [program.try_clone()?.into(), program.into(), stderr.into()],
            copied,
            controller: Some(controller),
        })
    }
}

/// Runs the program until it ends and its output is copied.
pub fn run(run: &RunFile, streams: Streams) -> Result<Ending, InitError> {
    let Streams {
        stdin,
        stdout,
        stderr,
        terminal,
        signals,
    } = streams;
    let ends = Ends::new(stdin, stdout, stderr, terminal).map_err(OutputError::Pipe)?;

    let program = run.program.as_path();
    // The command's own error would not tell it from the program's.
    let directory = fs::metadata(&run.directory).and_then(|data| match data.is_dir() {
        true => Ok(()),
        false => Err(io::ErrorKind::NotADirectory.into()),
    });
    directory.map_err(|source| ProgramError::Directory {
        directory: run.directory.display().to_string(),
        source,
    })?;
    let mut execution = Execution::new(program, &run.arguments, run.variables.iter().cloned())
        .map_err(ProgramError::from)?
        .with_user(run.user.clone());
    if ends.controller.is_some() {
        execution = execution.leading_its_terminal();
    }
    // The command holds the program's ends: it must be dropped before the copies can end.
    let child = {
        let mut command = execution.command();
        let [stdin, stdout, stderr] = ends.program;
        command
            .current_dir(&run.directory)
            .stdin(stdin)
            .stdout(stdout)
            .stderr(stderr);
        // Signals are for everything that the program starts. The leader of a terminal's session has a group already.
        if ends.controller.is_none() {
            command.process_group(0);
        }
        command.spawn()
    };
    let copies = ends.copied.into_iter().map(|(from, to)| copy(from, to));
    let copies: Vec<JoinHandle<()>> = copies.collect();
    let ending = match child {
        Ok(child) => {
            if let Some(signals) = signals {
                pass(signals, child.id(), ends.controller);
            }
            wait_for(child.id()).map_err(|source| ProgramError::Wait {
                program: program.display().to_string(),
                source,
            })
        }
        Err(source) => Err(NotExecuted::because(program, source).into()),
    };
    // Processes that the program left behind would keep its output open.
    // SAFETY: kill takes no pointers; -1 is every process except this one.
    unsafe { libc::kill(-1, libc::SIGKILL) };
    for copy in copies {
        // A copy that panicked has already printed a message on the console.
        let _ = copy.join();
    }
    Ok(ending?)
}

/// Forwards signals from this stream to the program's process group. Signals after the program's end do not matter, since all remaining
/// processes are killed.
fn pass(mut signals: File, program: u32, controller: Option<File>) {
    let Ok(program) = libc::pid_t::try_from(program) else {
        return;
    };
    thread::spawn(move || {
        let mut signal = [0];
        while matches!(signals.read(&mut signal), Ok(1)) {
            if signal == [RESIZE] {
                let mut size = [0; TerminalSize::BYTES];
                if signals.read_exact(&mut size).is_err() {
                    break;
                }
                if let Some(controller) = &controller {
                    terminal::resize(controller, TerminalSize::from_bytes(size));
                }
                continue;
            }
            // SAFETY: kill takes no pointers; an invalid signal number is an error without effect.
            unsafe { libc::kill(-program, signal[0].into()) };
        }
    });
}

/// Waits for the child `pid` and reaps every other child that ends meanwhile.
fn wait_for(pid: u32) -> io::Result<Ending> {
    loop {
        let mut status = 0;
        // SAFETY: waitpid writes one int, to `status`.
        let ended = unsafe { libc::waitpid(-1, &raw mut status, 0) };
        if ended < 0 {
            let error = io::Error::last_os_error();
            if error.kind() == io::ErrorKind::Interrupted {
                continue;
            }
            return Err(error);
        }
        if u32::try_from(ended) != Ok(pid) {
            continue;
        }
        if libc::WIFSIGNALED(status) {
            return Ok(Ending::Signalled(
                u8::try_from(libc::WTERMSIG(status)).unwrap_or(u8::MAX),
            ));
        }
        return Ok(Ending::Exited(
            u8::try_from(libc::WEXITSTATUS(status)).unwrap_or(u8::MAX),
        ));
    }
}

/// Copies the bytes of a pipe or a terminal to a sink on a thread. Drops them after the sink has failed, so that the program does not
/// block.
fn copy(mut from: File, mut to: Stream) -> JoinHandle<()> {
    thread::spawn(move || {
        let mut buffer = vec![0; 64 << 10];
        let mut open = true;
        loop {
            match from.read(&mut buffer) {
                Ok(0) => break,
                Ok(length) => open = open && to.write_all(&buffer[..length]).is_ok(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Linux returns EIO once no process has the terminal open.
                Err(_) => break,
            }
        }
        to.finish();
    })
}
