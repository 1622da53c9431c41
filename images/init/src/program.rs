//! Runs the program and waits for its end, as the first process has to: reaping everybody else's orphans.

use std::io::{self, PipeReader, Read, Write};
use std::process::{Command, Stdio};
use std::thread::{self, JoinHandle};

use wormhole_init::{Ending, RunFile, status};

use crate::InitError;
use crate::output::{OutputError, Stream};

#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    #[error("cannot run {program}: {source}")]
    Start { program: String, source: io::Error },
    #[error("lost sight of {program}: {source}")]
    Wait { program: String, source: io::Error },
}

impl ProgramError {
    /// As shells have it.
    pub fn status(&self) -> u8 {
        match self {
            Self::Start { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                status::NOT_FOUND
            }
            Self::Start { .. } => status::NOT_EXECUTABLE,
            Self::Wait { .. } => status::SETUP,
        }
    }
}

pub fn run(run: &RunFile, stdout: Stream, stderr: Stream) -> Result<Ending, InitError> {
    let (stdout_reader, stdout_writer) = io::pipe().map_err(OutputError::Pipe)?;
    let (stderr_reader, stderr_writer) = io::pipe().map_err(OutputError::Pipe)?;

    let name = run.arguments[0].display().to_string();
    // The command holds the writing ends of the pipes: it must be gone before the copies can end.
    let child = {
        let mut command = Command::new(&run.arguments[0]);
        command
            .args(&run.arguments[1..])
            .env_clear()
            .envs(run.variables.iter().map(|(name, value)| (name, value)))
            .current_dir(&run.directory)
            .stdin(Stdio::null())
            .stdout(stdout_writer)
            .stderr(stderr_writer);
        command.spawn()
    };
    let copies = [copy(stdout_reader, stdout), copy(stderr_reader, stderr)];
    let ending = match child {
        Ok(child) => wait_for(child.id()).map_err(|source| ProgramError::Wait {
            program: name,
            source,
        }),
        Err(source) => Err(ProgramError::Start {
            program: name,
            source,
        }),
    };
    // What the program left behind would keep its output open.
    // SAFETY: kill takes no pointers; -1 is every process but this one.
    unsafe { libc::kill(-1, libc::SIGKILL) };
    for copy in copies {
        // A copy that panicked has already said so on the console.
        let _ = copy.join();
    }
    Ok(ending?)
}

/// Waits for one child among all.
fn wait_for(pid: u32) -> io::Result<Ending> {
    loop {
        let mut status = 0;
        // SAFETY: waitpid writes one int, which `status` is.
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

/// Carries a pipe's bytes to a sink. A sink that is gone must not stop the program: its output is dropped.
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
