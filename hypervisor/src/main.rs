//! The `wormhole` command.
//!
//! Contains policy only: which processes to start, in which order, and which messages to print. The
//! mechanisms are in the monitor (`wormhole-monitor`), its link to the backend (`wormhole-link`)
//! and the images (`wormhole-images`).

mod backend;
mod backends;
mod config;
mod device;
mod image;
mod installation;
mod run;
mod say;
mod signals;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use wormhole_link::process::keep_ended_children;
use wormhole_link::{arguments, chain};

use crate::run::USAGE;

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
    #[command(after_help = run::STATUSES)]
    Run(Box<run::Options>),
    /// Start, stop and list backends that serve many programs.
    #[command(subcommand)]
    Backend(backends::Action),
    /// Build the images that guests and the emulated host boot from.
    #[command(subcommand)]
    Image(image::Action),
    /// Start a program and collect what it leaves; `run` starts this.
    #[command(hide = true)]
    Reap(run::reaper::Options),
    /// Write standard input to a file, unless there is none; `run` starts this.
    #[command(hide = true)]
    Record(run::record::Options),
}

fn main() -> ExitCode {
    say::survive_the_file_size_limit();
    let (command, origins) = match config::parse::<Command>(std::env::args_os().collect()) {
        Ok(parsed) => parsed,
        Err(config::Error::Arguments(error)) => return arguments::report("wormhole", &error),
        Err(config::Error::Config(error)) => {
            say::line(format_args!("{}", chain(&error)));
            return ExitCode::from(USAGE);
        }
    };
    keep_ended_children();
    let outcome = match command.action {
        Action::Run(options) => run::run(*options).map_err(|error| {
            let sentence = || chain(&error) + &origins.note(&error.options());
            (error.status(), (!error.is_said()).then(sentence))
        }),
        Action::Backend(action) => backends::run(action).map(|()| 0).map_err(|error| {
            let sentence = || chain(&error) + &origins.note(&error.options());
            (USAGE, (!error.is_said()).then(sentence))
        }),
        Action::Image(action) => image::run(&action)
            .map(|()| 0)
            .map_err(|error| (USAGE, Some(chain(&error)))),
        Action::Reap(options) => {
            run::reaper::reap(&options);
            Ok(0)
        }
        Action::Record(options) => {
            run::record::write(&options);
            Ok(0)
        }
    };
    ExitCode::from(outcome.unwrap_or_else(|(status, message)| {
        if let Some(message) = message {
            say::line(format_args!("{message}"));
        }
        status
    }))
}
