//! Runs the conformance checks on a device of this machine's driver. With several ordinals, the first device runs
//! them, and the first two run the checks of two devices.
//!
//! ```text
//! selftest [--ordinal N[,N...]] [FILTER]
//! ```
//! Each check runs in a child process, since a fault ends a context for good. Exits with 0 if all checks pass, 1 if
//! one fails, 2 if there is no usable device.

use std::error::Error;
use std::io::Write;
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use wormhole_cuda_device::{CudaDevice, Options, capture_output, reserve_bands};
use wormhole_device::Device;
use wormhole_device::conformance::{Check, Outcome, PeerCheck, checks, peer_checks};

const FAILED: u8 = 1;
const UNUSABLE: u8 = 2;

fn main() -> ExitCode {
    let mut ordinals = vec![0];
    let mut filter = String::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--check" => return check(&ordinals, &arguments.next().unwrap_or_default()),
            "--describe" => return describe(&ordinals),
            "--ordinal" => match read(&arguments.next().unwrap_or_default()) {
                Some(read) => ordinals = read,
                None => {
                    eprintln!("--ordinal takes numbers with commas between them");
                    return ExitCode::from(UNUSABLE);
                }
            },
            _ => filter = argument,
        }
    }
    match all(&ordinals, &filter) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("a check cannot be started: {error}");
            ExitCode::from(UNUSABLE)
        }
    }
}

fn read(text: &str) -> Option<Vec<u32>> {
    text.split(',')
        .map(|ordinal| ordinal.parse().ok())
        .collect()
}

/// Check of one device, run on the first, or of two devices.
enum AnyCheck {
    One(Check),
    Two(PeerCheck),
}

impl AnyCheck {
    fn name(&self) -> &'static str {
        match self {
            Self::One(check) => check.name,
            Self::Two(check) => check.name,
        }
    }

    fn run(&self, devices: &[CudaDevice]) -> Outcome {
        match (self, devices) {
            (Self::One(check), [device, ..]) => (check.run)(device),
            (Self::Two(check), [first, second, ..]) => (check.run)([first, second]),
            _ => Err("there are too few devices".to_owned()),
        }
    }
}

/// Lists the checks for a number of devices.
fn checks_for(ordinals: &[u32]) -> Vec<AnyCheck> {
    let mut all: Vec<_> = checks().into_iter().map(AnyCheck::One).collect();
    if ordinals.len() > 1 {
        all.extend(peer_checks().into_iter().map(AnyCheck::Two));
    }
    all
}

fn open(ordinals: &[u32]) -> Result<Vec<CudaDevice>, String> {
    let open = |&ordinal| {
        let options = Options {
            ordinal,
            ..Options::default()
        };
        CudaDevice::open(&options).map_err(|error| chain(&error))
    };
    ordinals.iter().map(open).collect()
}

/// Runs all checks whose names contain `filter`, each in a child process.
fn all(ordinals: &[u32], filter: &str) -> std::io::Result<ExitCode> {
    let names: Vec<String> = ordinals.iter().map(u32::to_string).collect();
    let names = names.join(",");
    let child = |arguments: &[&str]| {
        Command::new(std::env::current_exe()?)
            .args(["--ordinal", &names])
            .args(arguments)
            .stdin(Stdio::null())
            .status()
    };
    if !child(&["--describe"])?.success() {
        return Ok(ExitCode::from(UNUSABLE));
    }
    let (mut passed, mut failed) = (0, 0);
    for check in checks_for(ordinals)
        .iter()
        .filter(|check| check.name().contains(filter))
    {
        let status = child(&["--check", check.name()])?;
        match status.code() {
            Some(0) => passed += 1,
            Some(_) => failed += 1,
            None => {
                println!("FAILED  {}: the process died ({status})", check.name());
                failed += 1;
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    Ok(ExitCode::from(if failed == 0 { 0 } else { FAILED }))
}

fn describe(ordinals: &[u32]) -> ExitCode {
    let devices = match open(ordinals) {
        Ok(devices) => devices,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(UNUSABLE);
        }
    };
    for description in devices.iter().map(Device::describe) {
        println!(
            "{}, {} MiB, CUDA {}, {} attributes, stream priorities {:?}",
            description.name,
            description.total_memory >> 20,
            description.driver_version,
            description.attributes.len(),
            description.stream_priorities,
        );
    }
    ExitCode::SUCCESS
}

/// Formats an error and its causes.
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
fn check(ordinals: &[u32], name: &str) -> ExitCode {
    let Some(check) = checks_for(ordinals)
        .into_iter()
        .find(|check| check.name() == name)
    else {
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
    let outcome = open(ordinals).and_then(|devices| {
        let start = Instant::now();
        check.run(&devices).map(|()| start.elapsed())
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
    // If writing fails, the exit code still reports the result.
    let _ = writeln!(originals.stdout, "{line}");
    code
}
