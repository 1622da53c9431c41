//! The first process of Wormhole's guests and of the emulated host.
//!
//! It prepares the system, loads the kernel modules of the image, checks the window, runs one program with
//! its output on the given sinks, reports how it ended, and restarts the machine. It has no library to
//! load and nobody above it: whatever fails ends in the report, or at least on the console.

mod modules;
mod output;
mod power;
mod program;
mod system;
mod window;

use std::fs;
use std::io::Write;

use wormhole_init::{
    Ending, MODULE_LIST, RUN_FILE, Report, RunFile, Sink, run_file::RunFileError, status,
};

/// What keeps the program from being run.
#[derive(Debug, thiserror::Error)]
enum InitError {
    #[error(transparent)]
    System(#[from] system::SystemError),
    #[error(transparent)]
    Modules(#[from] modules::ModuleError),
    #[error(transparent)]
    Output(#[from] output::OutputError),
    #[error(transparent)]
    Window(#[from] window::WindowError),
    #[error(transparent)]
    Program(#[from] program::ProgramError),
    #[error("{RUN_FILE} cannot be read: {0}")]
    NoRunFile(std::io::Error),
    #[error(transparent)]
    RunFile(#[from] RunFileError),
}

impl InitError {
    fn status(&self) -> u8 {
        match self {
            Self::Window(_) => status::WINDOW,
            Self::Program(error) => error.status(),
            _ => status::SETUP,
        }
    }
}

fn main() {
    let mut run = RunFile::new("none");
    let ending = prepare(&mut run)
        .and_then(|()| program::run(&run))
        .unwrap_or_else(|error| {
            let message = error.to_string();
            output::console(&message);
            Ending::Failed {
                status: error.status(),
                message,
            }
        });
    report(&run, ending.clone());
    if let Some(port) = run.exit_port {
        power::tell_monitor(port, ending.status());
    }
    power::restart();
}

/// Everything before the program. The run file is handed out as soon as it is read, since it says where a
/// failure is to be reported.
fn prepare(run: &mut RunFile) -> Result<(), InitError> {
    system::mount()?;
    *run = RunFile::parse(&fs::read(RUN_FILE).map_err(InitError::NoRunFile)?)?;
    system::loopback();
    modules::load(MODULE_LIST.as_ref())?;
    if let Some(size) = run.window {
        let device = window::prepare(size)?;
        run.variables
            .push(("WORMHOLE_WINDOW".into(), device.into()));
    }
    Ok(())
}

fn report(run: &RunFile, ending: Ending) {
    let files = run
        .collect
        .iter()
        .filter_map(|path| Some((path.clone(), fs::read(path).ok()?)))
        .collect();
    let mut text = Vec::new();
    // A vector takes everything.
    let _ = Report { ending, files }.write(&mut text);
    let sent = output::open(&run.report).and_then(|mut sink| {
        sink.write_all(&text)
            .map_err(|source| output::OutputError::Write {
                sink: run.report.clone(),
                source,
            })?;
        sink.finish();
        Ok(())
    });
    if let Err(error) = sent {
        output::console(&error.to_string());
        if run.report != Sink::Console {
            output::console(&String::from_utf8_lossy(&text));
        }
    }
}
