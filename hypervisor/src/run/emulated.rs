//! Placement `host` on the emulated host: a QEMU machine with emulated virtualization, in which this
//! same command runs the program in a guest of that machine's KVM.

use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use wormhole_images::{EmulatedHost, Ending, HostRun, Image, host_overlay};

use crate::installation::Installation;

use super::guest::GuestError;
use super::summary::Summary;
use super::{Options, RunError, images};

/// Where the inner command leaves its summary.
const SUMMARY: &str = "/run/summary.json";
/// Processors of the emulated host: the guest's, and one for the backend that polls.
const PROCESSORS: u32 = 2;
/// Memory of the emulated host beside the guest's RAM and window, bytes.
const HOST_MEMORY: u64 = 768 << 20;
/// Time for the emulated host itself to come up and to go down.
const HOST_TIME: Duration = Duration::from_secs(60);

/// Standard error, of which the end is kept.
#[derive(Default)]
struct Errors {
    end: Vec<u8>,
}

impl Errors {
    /// Enough for the inner command's last words.
    const KEPT: usize = 1024;

    /// Whether the guest's processor gave up: Linux does not let it come to that on a real one.
    fn tell_of_a_triple_fault(&self) -> bool {
        String::from_utf8_lossy(&self.end)
            .lines()
            .any(|line| line.starts_with("wormhole: guest: ") && line.contains("(triple fault)"))
    }
}

impl Write for Errors {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.end.extend_from_slice(bytes);
        let excess = self.end.len().saturating_sub(Self::KEPT);
        self.end.drain(..excess);
        io::stderr().write_all(bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Runs the same command one level down.
pub fn run(
    options: &Options,
    program: &Path,
    installation: &Installation,
) -> Result<(u8, Summary), RunError> {
    let start = Instant::now();
    let folder = images()?;
    let kernel = options.kernel.into();
    let host = Image::emulated_host(&folder, wormhole_images::Kernel::V6_1)?;
    let mut arguments: Vec<std::ffi::OsString> = [
        "run",
        "--placement",
        "host",
        "--host",
        "kvm",
        "--quiet",
        "--json",
        SUMMARY,
    ]
    .map(Into::into)
    .to_vec();
    for (flag, value) in [
        ("--device", options.device.clone()),
        ("--kernel", options.kernel.to_string()),
        ("--window", options.window.0.to_string()),
        ("--memory", options.memory.0.to_string()),
        ("--cpus", options.cpus.to_string()),
        ("--timeout", options.timeout.to_string()),
    ] {
        arguments.extend([flag.into(), value.into()]);
    }
    for file in &options.take {
        arguments.extend(["--take".into(), file.into()]);
    }
    arguments.extend(["--".into(), program.into()]);
    arguments.extend(options.command[1..].iter().map(Into::into));

    let mut programs = vec![program.to_path_buf()];
    programs.extend(options.take.iter().cloned());
    let overlay = host_overlay(&HostRun {
        init: installation.init()?,
        wormhole: installation.command().to_path_buf(),
        parts: [
            installation.supervisor()?,
            installation.worker()?,
            installation.init()?,
        ]
        .into_iter()
        .chain(installation.frontends()?)
        .collect(),
        guest: Image::guest(&folder, kernel)?,
        guest_kernel: kernel,
        arguments,
        variables: super::forwarded_variables(),
        programs,
        collect: vec![SUMMARY.into()],
    })?;
    let mut errors = Errors::default();
    let report = EmulatedHost {
        image: &host,
        overlay: &overlay,
        memory: HOST_MEMORY + options.memory.0 + options.window.0,
        processors: PROCESSORS,
        timeout: HOST_TIME + Duration::from_secs(options.timeout),
        signals: None,
    }
    .run(&mut io::stdout(), &mut errors)?;

    if let Ending::Failed { message, .. } = report.ending {
        return Err(GuestError::Failed(message).into());
    }
    let summary = report
        .files
        .iter()
        .find(|(path, _)| path == Path::new(SUMMARY))
        .and_then(|(_, text)| serde_json::from_slice::<Summary>(text).ok());
    match summary {
        Some(mut summary) => {
            summary.guest = "emulated".to_owned();
            summary.seconds = start.elapsed().as_secs_f64();
            Ok((report.ending.status(), summary))
        }
        None if errors.tell_of_a_triple_fault() => Err(RunError::EmulatedProcessor),
        // The inner command has said why; its status says that it was not the program's.
        None => Err(RunError::Inner(report.ending.status())),
    }
}
