//! `wormhole-guest`: the command of guests that boot a system of their own, such as Debian from a disk.
//!
//! The Debian package `wormhole-guest` contains it beside the frontend libraries. It is linked statically, so that it
//! runs on each of the guest's systems.

mod check;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use wormhole_init::window;

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
}

fn main() -> ExitCode {
    match Command::parse().action {
        Action::Check => match check::report(&check::all()) {
            true => ExitCode::SUCCESS,
            false => ExitCode::FAILURE,
        },
        Action::Bind => match window::prepare(None) {
            Ok(device) => {
                println!("the window is {}", device.display());
                ExitCode::SUCCESS
            }
            Err(error) => {
                eprintln!("wormhole-guest: {error}");
                ExitCode::FAILURE
            }
        },
    }
}
