//! Runs the program and waits for its end, reaping orphans as PID 1 must.

use std::fs::{self, File};
use std::io::{self, PipeReader, Read, Write};
use std::process::Stdio;
use std::thread::{self, JoinHandle};

use wormhole_init::{Ending, Execution, NotExecuted, RunFile, status};

use crate::InitError;
use crate::output::{OutputError, Stream};

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
    pub stderr: Stream,
    /// Stream of signal numbers for the program, one byte each.
    pub signals: Option<File>,
}

/// Runs the program until it ends and its output is copied.
pub fn run(run: &RunFile, streams: Streams) -> Result<Ending, InitError> {
    let (stdout_reader, stdout_writer) = io::pipe().map_err(OutputError::Pipe)?;
    let (stderr_reader, stderr_writer) = io::pipe().map_err(OutputError::Pipe)?;

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
    let execution = Execution::new(program, &run.arguments, run.variables.iter().cloned())
        .map_err(ProgramError::from)?;
    // The command holds the write ends of the pipes: it must be dropped before the copies can end.
    let child = {
        let mut command = execution.command();
        command
            .current_dir(&run.directory)
            .stdin(streams.stdin.map_or_else(Stdio::null, Stdio::from))
            .stdout(stdout_writer)
            .stderr(stderr_writer);
        command.spawn()
    };
    let copies = [
        copy(stdout_reader, streams.stdout),
        copy(stderr_reader, streams.stderr),
    ];
    let ending = match child {
        Ok(child) => {
            if let Some(signals) = streams.signals {
                pass(signals, child.id());
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

/// Forwards signals from this stream to the program. Signals after the program's end do not matter, since all remaining
/// processes are killed.
fn pass(mut signals: File, program: u32) {
    let Ok(program) = libc::pid_t::try_from(program) else {
        return;
    };
    thread::spawn(move || {
        let mut signal = [0];
        while matches!(signals.read(&mut signal), Ok(1)) {
            // SAFETY: kill takes no pointers; an invalid signal number is an error without effect.
            unsafe { libc::kill(program, signal[0].into()) };
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

/// Copies a pipe's bytes to a sink on a thread. Drops them after the sink has failed, so that the program does not
/// block.
fn copy(mut from: PipeReader, mut to: Stream) -> JoinHandle<()> {
    thread::spawn(move || {
        let mut buffer = vec![0; 64 << 10];
        let mut open = true;
        loop {
            match from.read(&mut buffer) {
                Ok(0) => break,
                Ok(length) => open = open && to.write_all(&buffer[..length]).is_ok(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        to.finish();
    })
}
