//! `wormhole-guest`: the command of guests that boot a system of their own, such as Debian from a disk.
//!
//! The Debian package `wormhole-guest` contains it beside the frontend libraries. It is linked statically, so that it
//! runs on each of the guest's systems.

mod check;

use std::convert::Infallible;
use std::env::var_os;
use std::error::Error;
use std::os::unix::net::UnixDatagram;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use wormhole_connect::AGENT;
use wormhole_init::shared_files::{self, Keeper, SharedFilesError};
use wormhole_init::window;
use wormhole_serial::{AgentError, PORT};

#[derive(Debug, Parser)]
#[command(
    name = "wormhole-guest",
    version,
    about = "Prepare this guest for CUDA programs, and check that they can run"
)]
struct Command {
    #[command(subcommand)]
    action: Action,
}

#[derive(Clone, Copy, Debug, Subcommand)]
enum Action {
    /// Say what CUDA programs of this user find, and what to do about what is missing.
    Check,
    /// Bind the window to the driver by which programs map it; the service wormhole-guest-window does so at boot.
    Bind,
    /// Make a file system for /dev/shm of the memory that devices reach; the service wormhole-guest-files does so at boot, in a guest
    /// that has such memory.
    MountFiles,
    /// Hold files of /dev/shm that devices reach; the service wormhole-guest-keeper does so.
    KeepFiles,
    /// Pass the control streams of programs through a virtio-serial port; the service wormhole-guest-control does so in a
    /// guest that has the port org.wormhole.control.
    Agent,
}

fn main() -> ExitCode {
    match Command::parse().action {
        Action::Check => match check::report(&check::all()) {
            true => ExitCode::SUCCESS,
            false => ExitCode::FAILURE,
        },
        Action::Bind => match window::prepare(None) {
            Ok(window) => {
                println!("the window is {}", window.node.display());
                if let Some(error) = &window.undivided {
                    println!("registered memory stays out of the device's reach: {error}");
                }
                ExitCode::SUCCESS
            }
            Err(error) => failure(&error),
        },
        Action::MountFiles => match shared_files::mount_over() {
            Ok(()) => ExitCode::SUCCESS,
            // Such memory is its owner's. The shared memory of this guest stays as it was.
            Err(error @ SharedFilesError::Foreign(_)) => {
                println!("{error}");
                ExitCode::SUCCESS
            }
            Err(error) => failure(&error),
        },
        Action::KeepFiles => {
            if !shared_files::is_mounted() {
                println!("/dev/shm has no memory that devices reach");
                ready();
                return ExitCode::SUCCESS;
            }
            match Keeper::listen() {
                Ok(keeper) => {
                    ready();
                    keeper.run()
                }
                Err(error) => failure(&error),
            }
        }
        Action::Agent => {
            let Err(error) = agent();
            failure(&error)
        }
    }
}

fn failure(error: &dyn Error) -> ExitCode {
    eprintln!("wormhole-guest: {error}");
    ExitCode::FAILURE
}

/// Runs the agent.
fn agent() -> Result<Infallible, AgentError> {
    let port = wormhole_serial::open_port(PORT.as_ref())?;
    let listener = wormhole_serial::listen(AGENT.as_ref())?;
    ready();
    wormhole_serial::serve_port(port, &listener)
}

/// Tells systemd, if it has started this process, that programs are served (sd_notify(3)).
fn ready() {
    if let (Some(path), Ok(socket)) = (var_os("NOTIFY_SOCKET"), UnixDatagram::unbound()) {
        // systemd ends a service that does not say so.
        drop(socket.send_to(b"READY=1", path));
    }
}
