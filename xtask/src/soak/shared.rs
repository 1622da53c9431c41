//! One backend for several lanes: a launcher whose program writes its environment to a file and
//! waits.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;

use wormhole_lock::Mutex;

use super::family::{Spawned, number};
use crate::command::Failure;

/// Window size with room for the sessions of several lanes, and for those that are ending.
const WINDOW: &str = "1G";

/// A launcher with its supervisor, and the environment to reach them.
#[derive(Debug)]
pub struct SharedBackend {
    spawned: Arc<Spawned>,
    pub launcher: i32,
    log: PathBuf,
    child: Mutex<Option<(Child, ChildStdin)>>,
    environment: BTreeMap<OsString, OsString>,
}

impl SharedBackend {
    pub fn start(
        wormhole: &Path,
        folder: &Path,
        temporary: &Path,
        spawned: &Arc<Spawned>,
    ) -> Result<Self, Failure> {
        let failed = |error: std::io::Error| Failure::new(format!("the shared backend: {error}"));
        let variables = folder.join("environment");
        let path = folder.join("shared.log");
        let log = fs::File::create(&path).map_err(failed)?;
        let mut command = Command::new(wormhole);
        command
            .args(["run", "--placement", "process", "--window", WINDOW, "--"])
            .args(["/bin/sh", "-c", "env -0 >\"$0\"; echo; exec cat"])
            .arg(&variables)
            .env("TMPDIR", temporary)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log);
        let mut child = spawned.spawn(&mut command).map_err(failed)?;
        let launcher = number(&child);
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Failure::new("the shared backend has no pipes"));
        };
        let mut line = String::new();
        let read = BufReader::new(output)
            .read_line(&mut line)
            .map_err(failed)?;
        if read == 0 {
            let said = fs::read_to_string(&path).unwrap_or_default();
            return Err(Failure::new(format!(
                "the shared backend has ended: {said}"
            )));
        }
        let variables = fs::read(&variables).map_err(failed)?;
        let environment = variables.split(|byte| *byte == 0).filter_map(|entry| {
            let at = entry.iter().position(|byte| *byte == b'=')?;
            let (name, value) = (&entry[..at], &entry[at + 1..]);
            Some((
                OsString::from_vec(name.to_vec()),
                OsString::from_vec(value.to_vec()),
            ))
        });
        Ok(Self {
            spawned: Arc::clone(spawned),
            launcher,
            log: path,
            environment: environment.collect(),
            child: Mutex::new(Some((child, input))),
        })
    }

    /// Returns the environment of programs that use this backend.
    pub fn environment(&self) -> &BTreeMap<OsString, OsString> {
        &self.environment
    }

    /// Returns the path of the log of the launcher and the supervisor.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Ends the backend and returns whether it exited with status 0.
    pub fn finish(&self) -> Result<bool, Failure> {
        let Some((mut child, input)) = self.child.lock().take() else {
            return Ok(true);
        };
        drop(input);
        self.spawned
            .wait(&mut child)
            .map(|status| status.success())
            .map_err(|error| Failure::new(format!("the shared backend was lost: {error}")))
    }
}
