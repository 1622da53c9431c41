//! Runs other programs and reports their failures.

use std::fmt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::LazyLock;
use std::time::Instant;

/// Error of a failed step, as a sentence.
#[derive(Debug)]
pub struct Failure(String);

impl Failure {
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The time of the first step.
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Prints the current step to the developer, with the seconds since the first one.
pub fn step(what: &str) {
    eprintln!("xtask: {} s: {what}", START.elapsed().as_secs());
}

/// A command to run.
#[derive(Debug)]
pub struct Run(Command);

impl Run {
    pub fn new(program: impl AsRef<std::ffi::OsStr>) -> Self {
        Self(Command::new(program))
    }

    pub fn args<A: AsRef<std::ffi::OsStr>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.0.args(args);
        self
    }

    pub fn env(mut self, key: &str, value: impl AsRef<std::ffi::OsStr>) -> Self {
        self.0.env(key, value);
        self
    }

    pub fn dir(mut self, folder: &Path) -> Self {
        self.0.current_dir(folder);
        self
    }

    /// Runs the command with inherited standard streams. Fails unless it exits with status 0.
    pub fn check(mut self) -> Result<(), Failure> {
        match self.0.status() {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(Failure(format!("{:?} ended with {status}", self.0))),
            Err(error) => Err(self.unstarted(&error)),
        }
    }

    /// Runs the command and returns its status and its standard output.
    pub fn output(mut self) -> Result<(ExitStatus, String), Failure> {
        let output = self.0.stderr(Stdio::inherit()).output();
        let output = output.map_err(|error| self.unstarted(&error))?;
        Ok((
            output.status,
            String::from_utf8_lossy(&output.stdout).into_owned(),
        ))
    }

    /// Runs the command without input. Returns how it ended, and its output with its errors behind it.
    pub fn ended(mut self) -> Result<(ExitStatus, String), Failure> {
        let output = self.0.stdin(Stdio::null()).output();
        let output = output.map_err(|error| self.unstarted(&error))?;
        let text = [output.stdout, output.stderr].concat();
        Ok((output.status, String::from_utf8_lossy(&text).into_owned()))
    }

    /// Runs the command at the lowest priority. Returns its success, its standard output, and its standard error.
    pub fn behind(self) -> Result<(bool, String, String), Failure> {
        let mut nice = Command::new("nice");
        nice.args(["-n", "19"])
            .arg(self.0.get_program())
            .args(self.0.get_args())
            .stdin(Stdio::null());
        if let Some(folder) = self.0.get_current_dir() {
            nice.current_dir(folder);
        }
        for (key, value) in self.0.get_envs() {
            match value {
                Some(value) => nice.env(key, value),
                None => nice.env_remove(key),
            };
        }
        let output = nice.output().map_err(|error| self.unstarted(&error))?;
        Ok((
            output.status.success(),
            String::from_utf8_lossy(&output.stdout).into_owned(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        ))
    }

    /// Runs the command, prints its output line by line, and returns its success and the output.
    pub fn tee(mut self) -> Result<(bool, String), Failure> {
        let (status, text) = self.tee_once()?;
        Ok((status.success(), text))
    }

    /// Runs the command as [`Run::tee`] does, but leaves it usable for another run. Returns the
    /// status instead of the success.
    pub fn tee_once(&mut self) -> Result<(ExitStatus, String), Failure> {
        use std::io::{BufRead, BufReader};
        self.0.stdout(Stdio::piped());
        let mut child = self.0.spawn().map_err(|error| self.unstarted(&error))?;
        let mut text = String::new();
        if let Some(output) = child.stdout.take() {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                println!("{line}");
                text.push_str(&line);
                text.push('\n');
            }
        }
        let status = child
            .wait()
            .map_err(|error| Failure(format!("{:?} was lost: {error}", self.0)))?;
        Ok((status, text))
    }

    fn unstarted(&self, error: &std::io::Error) -> Failure {
        Failure(format!("cannot start {:?}: {error}", self.0.get_program()))
    }
}

/// Does both kinds of work at a time, and returns both results.
pub fn at_once<A: Send, B>(behind: impl FnOnce() -> A + Send, here: impl FnOnce() -> B) -> (A, B) {
    std::thread::scope(|scope| {
        let behind = scope.spawn(behind);
        let here = here();
        let behind = behind.join();
        (
            behind.unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            here,
        )
    })
}

/// Installs Python packages, without their dependencies, into a folder.
pub fn pip(folder: &Path, packages: &[&str]) -> Result<(), Failure> {
    Run::new("python3")
        .args(["-m", "pip", "install", "--quiet", "--upgrade", "--no-deps"])
        .args(["--root-user-action", "ignore", "--target"])
        .args([folder])
        .args(packages)
        .check()
}

/// Formats a size in megabytes, rounded up.
pub fn megabytes(bytes: u64) -> String {
    format!("{} MB", bytes.div_ceil(1_000_000))
}

/// Starts a command of the cargo that runs this xtask, in the given folder.
pub fn cargo(root: &Path) -> Run {
    Run::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())).dir(root)
}
