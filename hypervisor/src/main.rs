//! The `wormhole` command.
//!
//! Policy only: what to start, in which order, and what to tell the user. The mechanisms are the
//! monitor (`wormhole-monitor`), its link to the backend (`wormhole-link`) and the images (`wormhole-images`).

mod backend;
mod image;
mod installation;
mod run;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use wormhole_link::chain;

/// Exit status of everything that is wrong before or beside the program itself.
const USAGE: u8 = 2;
/// `EX_TEMPFAIL` of `sysexits.h`: the emulated host failed, and another run may do better.
const AGAIN: u8 = 75;

#[derive(Debug, Parser)]
#[command(
    name = "wormhole",
    version,
    about = "Give virtual machines a GPU without giving them the GPU"
)]
struct Command {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Run a CUDA program with its driver calls forwarded to a backend.
    Run(run::Options),
    /// Build the images that guests and the emulated host boot from.
    #[command(subcommand)]
    Image(image::Action),
}

fn main() -> ExitCode {
    let command = match Command::try_parse() {
        Ok(command) => command,
        Err(error) => return refuse(&error),
    };
    let outcome = match command.action {
        Action::Run(options) => run::run(options).map_err(|error| {
            let status = if error.is_of_emulation() {
                AGAIN
            } else {
                USAGE
            };
            (status, chain(&error))
        }),
        Action::Image(action) => image::run(&action)
            .map(|()| 0)
            .map_err(|error| (USAGE, chain(&error))),
    };
    ExitCode::from(outcome.unwrap_or_else(|(status, message)| {
        eprintln!("wormhole: {message}");
        status
    }))
}

/// Says in one sentence what is wrong with the arguments; help and version are what was asked for.
fn refuse(error: &clap::Error) -> ExitCode {
    use clap::error::ErrorKind;
    if !error.use_stderr() || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        error.exit();
    }
    let text = error.to_string();
    // Paragraphs: what is wrong, perhaps a tip, the usage.
    let told: Vec<String> = text
        .trim_start_matches("error: ")
        .split("\n\n")
        .take_while(|paragraph| !paragraph.starts_with("Usage:"))
        .map(|paragraph| {
            let words: Vec<&str> = paragraph.split_whitespace().collect();
            words.join(" ")
        })
        .filter(|paragraph| !paragraph.is_empty())
        .collect();
    eprintln!("wormhole: {}", told.join("; "));
    ExitCode::from(USAGE)
}
