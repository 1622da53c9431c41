//! Starting other programs and saying what failed.

use std::fmt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

/// A step that failed, as a sentence.
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

/// Tells the developer what happens now.
pub fn step(what: &str) {
    eprintln!("xtask: {what}");
}

/// A command that is run for its success.
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

    /// Runs it with the terminal as it is; anything but success is a failure.
    pub fn check(mut self) -> Result<(), Failure> {
        match self.0.status() {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(Failure(format!("{:?} ended with {status}", self.0))),
            Err(error) => Err(self.unstarted(&error)),
        }
    }

    /// Runs it and returns its status with its standard output.
    pub fn output(mut self) -> Result<(ExitStatus, String), Failure> {
        let output = self.0.stderr(Stdio::inherit()).output();
        let output = output.map_err(|error| self.unstarted(&error))?;
        Ok((
            output.status,
            String::from_utf8_lossy(&output.stdout).into_owned(),
        ))
    }

    /// Runs it, copies its output through line by line, and returns the output with its success.
    pub fn tee(mut self) -> Result<(bool, String), Failure> {
        let (status, text) = self.tee_once()?;
        Ok((status.success(), text))
    }

    /// As [`Run::tee`], for what can be run again; returns its status.
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

/// Installs Python packages, and none that they ask for, into a folder.
pub fn pip(folder: &Path, packages: &[&str]) -> Result<(), Failure> {
    Run::new("python3")
        .args(["-m", "pip", "install", "--quiet", "--upgrade", "--no-deps"])
        .args(["--root-user-action", "ignore", "--target"])
        .args([folder])
        .args(packages)
        .check()
}

/// A size as people read it.
pub fn megabytes(bytes: u64) -> String {
    format!("{} MB", bytes.div_ceil(1_000_000))
}

/// The cargo that runs this very command, in the project's root.
pub fn cargo(root: &Path) -> Run {
    Run::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())).dir(root)
}
