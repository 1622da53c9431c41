//! The worker's command line.

use std::fs::File;
use std::os::fd::{BorrowedFd, FromRawFd};
use std::process::ExitCode;

use clap::Parser;
use rustix::fs::{FileType, Stat, fcntl_getfl, fstat};
use wormhole_link::device::DeviceChoice;
use wormhole_link::process::{CONTROL, LOG};
use wormhole_link::{arguments, chain};

const NAME: &str = "wormhole-worker";

/// Executes the CUDA calls of one guest process. The supervisor starts it.
#[derive(Debug, Parser)]
struct Arguments {
    /// Print the hash of the protocol that this worker speaks, and end.
    #[arg(long)]
    protocol: bool,
    /// Devices that execute: cpu, cpu:N, or cuda:N with commas between several.
    #[arg(long, default_value = "cpu")]
    device: DeviceChoice,
}

/// Runs the worker. The supervisor has started it with the control stream and the log at their
/// descriptor numbers.
pub fn main() -> ExitCode {
    let arguments: Arguments = match arguments::parse(NAME) {
        Ok(arguments) => arguments,
        Err(status) => return status,
    };
    if arguments.protocol {
        println!("{:016x}", wormhole_api::PROTOCOL_HASH);
        return ExitCode::SUCCESS;
    }
    if !is_started_by_supervisor() {
        eprintln!("{NAME}: only wormhole-supervisor starts this program");
        return ExitCode::from(arguments::USAGE);
    }
    log_to_supervisor();
    if let Err(error) = crate::confine(arguments.device.kind()) {
        tracing::error!("{}", chain(&error));
        return ExitCode::FAILURE;
    }
    let socket = crate::inherited_stream();
    match crate::run(arguments.device, socket) {
        Ok(status) => crate::leave(status),
        Err(error) => {
            tracing::error!("{}", chain(&error));
            crate::leave(1)
        }
    }
}

/// Returns whether the control stream and the log are open at their descriptor numbers.
fn is_started_by_supervisor() -> bool {
    // SAFETY: the kernel accepts numbers that are no open descriptors, and nothing closes these meanwhile.
    let [control, log] = unsafe { [CONTROL, LOG].map(|number| BorrowedFd::borrow_raw(number)) };
    let kind = |status: Stat| FileType::from_raw_mode(status.st_mode);
    fstat(control).is_ok_and(|status| kind(status) == FileType::Socket) && fcntl_getfl(log).is_ok()
}

/// Directs log lines to the supervisor's socket. The supervisor writes them to its own log.
fn log_to_supervisor() {
    // SAFETY: the supervisor put a socket at this number, and nothing else in this process uses it.
    let log = unsafe { File::from_raw_fd(LOG) };
    let filter = std::env::var("WORMHOLE_LOG").unwrap_or_else(|_| "info".to_owned());
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::new(filter))
        .with_writer(std::sync::Mutex::new(log))
        .without_time()
        .with_target(false)
        .with_ansi(false)
        .init();
}
