//! Records a device's answers for every instruction form.
//!
//! ```text
//! answers --device cpu|cuda --out FOLDER [FILTER]
//! answers --ptx FOLDER [FILTER]
//! ```
//! Writes one file for each group. Each group runs in a process of its own; if a form kills or hangs
//! the context, a new process continues after that form. A form that the device refuses is reported
//! and recorded as refused. `--ptx` writes the kernels instead. `FILTER` is a part of a group's name.

use std::error::Error;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use wormhole_cpu_device::CpuDevice;
use wormhole_cuda_device::CudaDevice;
use wormhole_device::{CuError, Device};
use wormhole_ptx_conformance::answers::{Answer, module, parse};
use wormhole_ptx_conformance::run::{Failure, Runner};
use wormhole_ptx_conformance::table::groups;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Maximum duration of one form.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Default)]
struct Options {
    device: String,
    out: String,
    ptx: String,
    filter: String,
    /// Group of a child process, and the form to begin with.
    group: Option<String>,
    from: usize,
}

fn main() -> ExitCode {
    let outcome = options().and_then(|options| {
        if !options.ptx.is_empty() {
            write_kernels(&options)
        } else if let Some(group) = &options.group {
            run_group(&options, group)
        } else {
            run_all(&options)
        }
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn options() -> Result<Options> {
    let mut options = Options::default();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{argument} takes a value"));
        match argument.as_str() {
            "--device" => options.device = value()?,
            "--out" => options.out = value()?,
            "--ptx" => options.ptx = value()?,
            "--group" => options.group = Some(value()?),
            "--from" => options.from = value()?.parse()?,
            _ => options.filter = argument,
        }
    }
    let usable = matches!(options.device.as_str(), "cpu" | "cuda") && !options.out.is_empty();
    if options.ptx.is_empty() && !usable {
        return Err("usage: answers --device cpu|cuda --out FOLDER [FILTER]".into());
    }
    Ok(options)
}

fn write_kernels(options: &Options) -> Result<()> {
    for group in groups() {
        if !group.name.contains(&options.filter) {
            continue;
        }
        let folder = Path::new(&options.ptx).join(group.name);
        fs::create_dir_all(&folder)?;
        for (index, form) in group.forms.iter().enumerate() {
            let text = format!("// {}\n{}", form.name, module(form));
            fs::write(folder.join(format!("{index:04}.ptx")), text)?;
        }
    }
    Ok(())
}

/// Runs each group in a child process, and starts a new one after a form that killed it.
fn run_all(options: &Options) -> Result<()> {
    fs::create_dir_all(&options.out)?;
    for group in groups() {
        if !group.name.contains(&options.filter) {
            continue;
        }
        let path = Path::new(&options.out).join(format!("{}.txt", group.name));
        File::create(&path)?;
        let mut refused = 0;
        loop {
            let written = parse(&fs::read_to_string(&path)?)?.len();
            if written >= group.forms.len() {
                break;
            }
            let status = Command::new(std::env::current_exe()?)
                .args(["--device", &options.device, "--out", &options.out])
                .args(["--group", group.name, "--from", &written.to_string()])
                .stdin(Stdio::null())
                .status()?;
            let answers = parse(&fs::read_to_string(&path)?)?;
            if !status.success() && answers.len() == written {
                return Err(format!("{}: nothing can be run ({status})", group.name).into());
            }
        }
        let answers = parse(&fs::read_to_string(&path)?)?;
        for answer in &answers {
            if let Err(reason) = &answer.results {
                println!("{}: {}: {reason}", group.name, answer.name);
                refused += 1;
            }
        }
        println!(
            "{}: {} forms, {refused} without results",
            group.name,
            answers.len()
        );
    }
    Ok(())
}

/// Runs the forms of one group, from `options.from` on, and appends their answers.
fn run_group(options: &Options, name: &str) -> Result<()> {
    let group = groups()
        .into_iter()
        .find(|group| group.name == name)
        .ok_or("there is no such group")?;
    let path = Path::new(&options.out).join(format!("{name}.txt"));
    let mut file = OpenOptions::new().append(true).open(path)?;
    let device: Box<dyn Device> = if options.device == "cpu" {
        Box::new(CpuDevice::open(&wormhole_cpu_device::Options {
            memory: Some(256 << 20),
            ..Default::default()
        })?)
    } else {
        Box::new(CudaDevice::open(&wormhole_cuda_device::Options {
            allow_pageable_access: true,
            ..wormhole_cuda_device::Options::default()
        })?)
    };
    let runner = Runner::new(&*device)?;
    let begun = AtomicU64::new(0);
    std::thread::scope(|scope| {
        // If a form does not end, the thread below records a timeout for it and ends the process.
        let mut other = file.try_clone()?;
        let (begun, forms) = (&begun, &group.forms);
        let (done, finished) = std::sync::mpsc::channel::<()>();
        scope.spawn(move || {
            let mut seen = u64::MAX;
            while finished.recv_timeout(PATIENCE) == Err(std::sync::mpsc::RecvTimeoutError::Timeout)
            {
                let current = begun.load(Ordering::Acquire);
                if current == seen {
                    let form = usize::try_from(current)
                        .ok()
                        .and_then(|index| forms.get(index));
                    if let Some(form) = form {
                        // The form did not end.
                        let timeout = Failure::Faulted(CuError::LAUNCH_TIMEOUT);
                        let _ = other.write_all(Answer::new(form, Err(timeout)).text().as_bytes());
                    }
                    std::process::exit(1);
                }
                seen = current;
            }
        });
        for (index, form) in forms.iter().enumerate().skip(options.from) {
            begun.store(index as u64, Ordering::Release);
            let results = runner.run(form);
            let faulted = matches!(results, Err(Failure::Faulted(_)));
            file.write_all(Answer::new(form, results).text().as_bytes())?;
            if faulted {
                // The context may be dead: a new process runs the remaining forms.
                std::process::exit(1);
            }
        }
        drop(done);
        Ok(())
    })
}
