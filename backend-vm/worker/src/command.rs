//! The worker's command line.

use std::fs::File;
use std::os::fd::FromRawFd;
use std::process::ExitCode;

use clap::Parser;
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
    /// What to execute on: cpu, cpu:N, or cuda:N with commas between several.
    #[arg(long, default_value = "cpu")]
    device: DeviceChoice,
}

/// The whole executable. The supervisor starts it, with its stream and its log in place.
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
    let socket = crate::inherited_stream();
    match crate::run(arguments.device, socket) {
        // The device's threads may be in the middle of anything: nothing is torn down.
        Ok(status) => std::process::exit(status),
        Err(error) => {
            tracing::error!("{}", chain(&error));
            std::process::exit(1);
        }
    }
}

/// Whether the stream and the log are in place.
fn is_started_by_supervisor() -> bool {
    // SAFETY: all zeros are a valid value of this structure.
    let mut status: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: numbers that may be no descriptors, and a local structure that the kernel fills.
    unsafe {
        libc::fstat(CONTROL, &raw mut status) == 0
            && status.st_mode & libc::S_IFMT == libc::S_IFSOCK
            && libc::fcntl(LOG, libc::F_GETFL) >= 0
    }
}

/// Lines go to the supervisor, which writes them to its own log.
fn log_to_supervisor() {
    // SAFETY: the supervisor put a pipe there, and nothing else in this process uses the number.
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
