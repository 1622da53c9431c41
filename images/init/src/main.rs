//! Runs as the first process (PID 1) of Wormhole's guests and of the emulated host.
//!
//! Prepares the system, loads the kernel modules of the image, checks the window, runs one program with
//! its output on the given sinks, reports how it ended, and restarts the machine. The process is statically
//! linked and has no parent: every failure goes to the report, or at least to the console.

mod files;
mod interfaces;
mod modules;
mod output;
mod poweroff;
mod program;
mod system;
mod terminal;

use std::ffi::OsStr;
use std::fs;

use wormhole_init::{
    Collected, Ending, MODULE_LIST, RUN_FILE, Report, RunFile, Sink, run_file::RunFileError,
    shared_files, status, window,
};

use output::Stream;

/// Error that prevents the program from running.
#[derive(Debug, thiserror::Error)]
enum InitError {
    #[error(transparent)]
    System(#[from] system::SystemError),
    #[error(transparent)]
    Files(#[from] files::FilesError),
    #[error(transparent)]
    Modules(#[from] modules::ModuleError),
    #[error(transparent)]
    Interfaces(#[from] interfaces::InterfaceError),
    #[error(transparent)]
    Output(#[from] output::OutputError),
    #[error(transparent)]
    Window(#[from] window::WindowError),
    #[error(transparent)]
    Terminal(#[from] terminal::TerminalError),
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
        poweroff::write_status(port, ending.status());
    }
    poweroff::restart();
}

/// Streams of a run, in the order in which they are opened. The last one signals the other side that the program
/// starts.
struct Streams {
    program: program::Streams,
    report: Stream,
}

/// Prepares the system and opens the program's streams. Stores the run file in `run` as soon as it is parsed, since it
/// contains the sink for reports of failures.
fn prepare(run: &mut RunFile) -> Result<Streams, InitError> {
    system::mount()?;
    *run = RunFile::parse(&fs::read(RUN_FILE).map_err(InitError::NoRunFile)?)?;
    interfaces::loopback();
    modules::load(MODULE_LIST.as_ref())?;
    // Checked before devices are used: a kernel that took the window as its own memory may place their buffers there.
    if let Some(size) = run.window {
        let window = window::prepare(Some(size))?;
        if let Some(error) = &window.undivided {
            output::console(&format!(
                "registered memory stays out of the device's reach: {error}"
            ));
        }
        run.variables
            .push(("WORMHOLE_WINDOW".into(), window.node.into()));
    }
    if let Some(size) = run.windows {
        let devices = window::prepare_all(size)?;
        let devices: Vec<_> = devices.iter().map(|device| device.as_os_str()).collect();
        let devices = devices.join(OsStr::new(":"));
        run.variables.push(("WORMHOLE_WINDOW".into(), devices));
    }
    // A tmpfs is there otherwise.
    if shared_files::is_there()
        && let Err(error) = shared_files::start()
    {
        output::console(&format!(
            "files of shared memory stay out of the device's reach: {error}"
        ));
    }
    if let Some(place) = &run.files {
        files::mount(place)?;
    }
    files::mount_volumes(&run.volumes)?;
    interfaces::bridge_taps(run.taps)?;
    interfaces::configure(&run.networks)?;
    if let Some(name) = &run.hostname {
        system::name(name).map_err(system::SystemError::Name)?;
    }
    system::give_devices(&run.user).map_err(system::SystemError::Devices)?;
    Ok(Streams {
        program: program::Streams {
            stdin: run.stdin.as_ref().map(source).transpose()?,
            stdout: output::open_or_console(&run.stdout)?,
            stderr: run
                .stderr
                .as_ref()
                .map(output::open_or_console)
                .transpose()?,
            terminal: run
                .terminal
                .map(|size| terminal::Terminal::open(size, &run.user))
                .transpose()?,
            signals: run.signals.as_ref().and_then(signals),
        },
        report: output::open_or_console(&run.report)?,
    })
}

/// Opens a stream for reading.
fn source(sink: &Sink) -> Result<fs::File, output::OutputError> {
    output::open(sink).and_then(Stream::into_source)
}

/// Opens the stream of signals for the program; `None` if that fails, since the program can run without signals.
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
    let mut left = run.collect_bytes;
    let paths = run.collect.iter();
    let collected = paths.map(|path| Collected::of(path, &mut left)).collect();
    match (Report { ending, collected }).write(&mut stream) {
        Ok(()) => stream.finish(),
        Err(error) => output::console(&format!("the report was lost: {error}")),
    }
}
