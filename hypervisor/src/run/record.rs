//! The process that writes a run's summary to its file.
//!
//! The launcher of a guest opens no file any more once the guest runs. This process is started before, and gets the
//! summary on its standard input. Without one it writes nothing: a launcher that fails leaves no file.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use clap::Args;
use wormhole_link::tasks;

use super::summary::Summary;
use crate::say;

/// More than a summary has.
const MOST_BYTES: u64 = 64 << 20;

/// The arguments of the process.
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
    // The program's status counts for more than a summary that cannot be written.
    if let Err(error) = written.and_then(|()| io::stdout().flush()) {
        say::line(format_args!(
            "cannot write {}: {error}",
            options.path.display()
        ));
    }
}

/// The process, as the launcher has it.
#[derive(Debug)]
pub struct Record(Child);

impl Record {
    /// Starts the process for a summary at `path`, which may be open already.
    ///
    /// # Errors
    /// The system gives no process.
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

    /// Has the summary written, and waits for that.
    pub fn write(mut self, summary: &Summary) {
        let text = serde_json::to_vec_pretty(summary).unwrap_or_default();
        if let Some(mut input) = self.0.stdin.take() {
            // A process that is gone has said why.
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
