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

use wormhole_init::{
    Ending, MODULE_LIST, RUN_FILE, Report, RunFile, Sink, run_file::RunFileError, status,
};

use output::Stream;

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
    let (ending, report) = match prepare(&mut run) {
        Ok(Streams { program, report }) => (program::run(&run, program), Some(report)),
        Err(error) => (Err(error), output::open_or_console(&run.report).ok()),
    };
    let ending = ending.unwrap_or_else(|error| {
        let message = error.to_string();
        output::console(&message);
        Ending::Failed {
            status: error.status(),
            message,
        }
    });
    if let Some(stream) = report {
        send(&run, ending.clone(), stream);
    }
    if let Some(port) = run.exit_port {
        power::tell_monitor(port, ending.status());
    }
    power::restart();
}

/// The streams of a run, in the order in which they are opened: that the last one is open tells the other side that
/// the program starts.
struct Streams {
    program: program::Streams,
    report: Stream,
}

/// Prepares everything before the program, up to its streams. The run file is handed out as soon as it is read, since
/// it says where a failure is to be reported.
fn prepare(run: &mut RunFile) -> Result<Streams, InitError> {
    system::mount()?;
    *run = RunFile::parse(&fs::read(RUN_FILE).map_err(InitError::NoRunFile)?)?;
    system::loopback();
    modules::load(MODULE_LIST.as_ref())?;
    if let Some(size) = run.window {
        let device = window::prepare(size)?;
        run.variables
            .push(("WORMHOLE_WINDOW".into(), device.into()));
    }
    Ok(Streams {
        program: program::Streams {
            stdin: run.stdin.as_ref().map(source).transpose()?,
            stdout: output::open_or_console(&run.stdout)?,
            stderr: output::open_or_console(&run.stderr)?,
            signals: run.signals.as_ref().and_then(signals),
        },
        report: output::open_or_console(&run.report)?,
    })
}

/// A stream to read from.
fn source(sink: &Sink) -> Result<fs::File, output::OutputError> {
    output::open(sink).and_then(Stream::into_source)
}

/// The stream of signals for the program; a program runs without one as well.
fn signals(source: &Sink) -> Option<fs::File> {
    match self::source(source) {
        Ok(file) => Some(file),
        Err(error) => {
            output::console(&format!("the program gets no signals: {error}"));
            None
        }
    }
}

fn send(run: &RunFile, ending: Ending, mut stream: Stream) {
    let files = run
        .collect
        .iter()
        .filter_map(|path| Some((path.clone(), fs::read(path).ok()?)))
        .collect();
    match (Report { ending, files }).write(&mut stream) {
        Ok(()) => stream.finish(),
        Err(error) => output::console(&format!("the report was lost: {error}")),
    }
}
