//! Runs the checks that every device must pass on a device of this machine's driver.
//!
//! ```text
//! selftest [--ordinal N] [FILTER]
//! ```
//! Each check runs in a process of its own, since a fault ends a context for good. Exits with 0 when all
//! hold, 1 when one does not, 2 when there is no usable device.

use std::error::Error;
use std::io::Write;
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use wormhole_cuda_device::{CudaDevice, Options, capture_output, reserve_bands};
use wormhole_device::Device;
use wormhole_device::conformance::checks;

const FAILED: u8 = 1;
const UNUSABLE: u8 = 2;

fn main() -> ExitCode {
    let mut options = Options::default();
    let mut filter = String::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--check" => return check(&options, &arguments.next().unwrap_or_default()),
            "--describe" => return describe(&options),
            "--ordinal" => match arguments.next().map(|text| text.parse()) {
                Some(Ok(ordinal)) => options.ordinal = ordinal,
                _ => {
                    eprintln!("--ordinal takes a number");
                    return ExitCode::from(UNUSABLE);
                }
            },
            _ => filter = argument,
        }
    }
    match all(&options, &filter) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("a check cannot be started: {error}");
            ExitCode::from(UNUSABLE)
        }
    }
}

/// Runs all checks whose names contain `filter`, each in a child.
fn all(options: &Options, filter: &str) -> std::io::Result<ExitCode> {
    let child = |arguments: &[&str]| {
        Command::new(std::env::current_exe()?)
            .args(["--ordinal", &options.ordinal.to_string()])
            .args(arguments)
            .stdin(Stdio::null())
            .status()
    };
    if !child(&["--describe"])?.success() {
        return Ok(ExitCode::from(UNUSABLE));
    }
    let (mut passed, mut failed) = (0, 0);
    for check in checks().iter().filter(|check| check.name.contains(filter)) {
        let status = child(&["--check", check.name])?;
        match status.code() {
            Some(0) => passed += 1,
            Some(_) => failed += 1,
            None => {
                println!("FAILED  {}: the process died ({status})", check.name);
                failed += 1;
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    Ok(ExitCode::from(if failed == 0 { 0 } else { FAILED }))
}

fn describe(options: &Options) -> ExitCode {
    match CudaDevice::open(options) {
        Ok(device) => {
            let description = device.describe();
            println!(
                "{}, {} MiB, CUDA {}, {} attributes, stream priorities {:?}",
                description.name,
                description.total_memory >> 20,
                description.driver_version,
                description.attributes.len(),
                description.stream_priorities,
            );
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{}", chain(&error));
            ExitCode::from(UNUSABLE)
        }
    }
}

/// An error and its causes.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// Runs one check in this process.
fn check(options: &Options, name: &str) -> ExitCode {
    let Some(check) = checks().into_iter().find(|check| check.name == name) else {
        eprintln!("there is no check {name:?}");
        return ExitCode::from(UNUSABLE);
    };
    if let Err(error) = reserve_bands() {
        eprintln!("{}", chain(&error));
        return ExitCode::from(UNUSABLE);
    }
    let mut originals = match capture_output() {
        Ok(originals) => originals,
        Err(error) => {
            eprintln!("output cannot be captured: {error}");
            return ExitCode::from(UNUSABLE);
        }
    };
    let outcome = CudaDevice::open(options)
        .map_err(|error| chain(&error))
        .and_then(|device| {
            let start = Instant::now();
            (check.run)(&device).map(|()| start.elapsed())
        });
    let (line, code) = match outcome {
        Ok(time) => (
            format!("ok      {name} ({} ms)", time.as_millis()),
            ExitCode::SUCCESS,
        ),
        Err(sentence) => (
            format!("FAILED  {name}: {sentence}"),
            ExitCode::from(FAILED),
        ),
    };
    // Without a place to say it the exit code remains.
    let _ = writeln!(originals.stdout, "{line}");
    code
}
