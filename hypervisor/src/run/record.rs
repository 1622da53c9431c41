//! Process that writes a run's summary to its file.
//!
//! The launcher of a guest may not open files once the guest runs. So this process is started
//! before, and receives the summary on standard input. Without a summary it writes nothing: a
//! launcher that fails leaves no file.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use clap::Args;
use wormhole_link::tasks;

use super::summary::Summary;
use crate::say;

/// Limit on the size of a summary, above any real one.
const MOST_BYTES: u64 = 64 << 20;

/// Arguments of the process.
#[derive(Debug, Args)]
pub struct Options {
    /// Standard output is the file, open already.
    #[arg(long)]
    open: bool,
    /// The file.
    path: PathBuf,
}

/// Runs as the process.
pub fn write(options: &Options) {
    let mut summary = Vec::new();
    let read = io::stdin().take(MOST_BYTES).read_to_end(&mut summary);
    if matches!(read, Ok(0)) {
        return;
    }
    let written = read.and_then(|_| match options.open {
        true => io::stdout().write_all(&summary),
        false => std::fs::write(&options.path, &summary),
    });
    // A failure to write does not change the exit status, which is the program's.
    if let Err(error) = written.and_then(|()| io::stdout().flush()) {
        say::line(format_args!(
            "cannot write {}: {error}",
            options.path.display()
        ));
    }
}

/// Launcher's handle on the process.
#[derive(Debug)]
pub struct Record(Child);

impl Record {
    /// Starts the process for a summary at `path`, which may be open already.
    ///
    /// # Errors
    /// The process cannot be created.
    pub fn start(wormhole: &Path, path: &Path, open: Option<File>) -> io::Result<Self> {
        let process = Command::new(wormhole)
            .arg("record")
            .args(open.is_some().then_some("--open"))
            .arg("--")
            .arg(path)
            .stdin(Stdio::piped())
            .stdout(open.map_or_else(Stdio::null, Stdio::from))
            .spawn();
        process.map(Self).map_err(tasks::named)
    }

    /// Sends the summary, and waits until it is written.
    pub fn write(mut self, summary: &Summary) {
        let text = serde_json::to_vec_pretty(summary).unwrap_or_default();
        if let Some(mut input) = self.0.stdin.take() {
            // A process that has ended has printed the reason.
            let _ = input.write_all(&text);
        }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}
