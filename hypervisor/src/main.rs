//! The `wormhole` command.
//!
//! Contains policy only: which processes to start, in which order, and which messages to print. The
//! mechanisms are in the monitor (`wormhole-monitor`), its link to the backend (`wormhole-link`)
//! and the images (`wormhole-images`).

mod attach;
mod backend;
mod backend_vm;
mod backends;
mod carrying;
mod cgroup;
mod config;
mod confinement;
mod detach;
mod device;
mod file_memory;
mod guests;
mod image;
mod installation;
mod listener;
mod phases;
mod places;
mod private;
mod ps;
mod relay;
mod run;
mod say;
mod signals;
mod stats;
mod table;
mod wait;

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
    /// Give a guest of another monitor, such as QEMU, a window and a way to a backend.
    Attach(attach::Options),
    /// Detach such a guest from its backend.
    Detach(detach::Options),
    /// Boot guests without a program.
    #[command(subcommand)]
    Guest(guests::Action),
    /// List the backends and guests that run.
    Ps(ps::Options),
    /// Show the usage of a backend by each of its tenants.
    Stats(stats::Options),
    #[command(flatten)]
    GuestProcess(guests::Process),
    /// Build the images that guests and the emulated host boot from.
    #[command(subcommand)]
    Image(image::Action),
    /// Serve the tenant whose stream is standard input in a VM of its own; `run` starts this.
    #[command(hide = true)]
    BackendVm(backend_vm::Options),
    /// Serve a window of this VM; `backend-vm` starts this in a backend VM.
    #[command(hide = true)]
    Relay(relay::Options),
    /// Start a program and collect what it leaves; `run` starts this.
    #[command(hide = true)]
    Reap(run::reaper::Options),
    /// Connect to a backend again for the guest whose stream is standard input; `guest start` starts this.
    #[command(hide = true)]
    ConnectAgain(backend::again::Options),
    /// Remove files when standard input ends; `attach` starts this.
    #[command(hide = true)]
    Remove,
    /// Remove a cgroup when the process in it has ended; the monitor of a VM starts this.
    #[command(hide = true)]
    RemoveCgroup(cgroup::Options),
    /// Write standard input to a file, unless there is none; `run` starts this.
    #[command(hide = true)]
    Record(run::record::Options),
    /// Write files of a guest, which standard input has, to a new place; `run` starts this.
    #[command(hide = true)]
    Collect(run::collect::Options),
    /// Unpack an image in the OCI's layout, and remove it when standard input ends; `run` starts this.
    #[command(hide = true)]
    Unpack(run::layout::Layout),
    /// Make standard output, a terminal, raw on demand, and restore it; `run` starts this.
    #[command(hide = true)]
    KeepTerminal,
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
        Action::Attach(options) => attach::run(&options).map(|()| 0).map_err(|error| {
            let note = origins.note(&error.options());
            (USAGE, Some(chain(&error) + &note))
        }),
        Action::Detach(options) => detach::run(&options)
            .map(|()| 0)
            .map_err(|error| (USAGE, Some(chain(&error)))),
        Action::Guest(action) => of_guest(guests::run(action), &origins),
        Action::Ps(options) => ps::run(&options)
            .map(|()| 0)
            .map_err(|error| (USAGE, Some(chain(&error)))),
        Action::Stats(options) => stats::run(&options)
            .map(|()| 0)
            .map_err(|error| (USAGE, Some(chain(&error)))),
        Action::GuestProcess(process) => of_guest(guests::run_process(process), &origins),
        Action::Image(action) => image::run(&action)
            .map(|()| 0)
            .map_err(|error| (USAGE, Some(chain(&error)))),
        Action::BackendVm(options) => backend_vm::run(&options)
            .map(|()| 0)
            .map_err(|error| (USAGE, Some(format!("backend VM: {}", chain(&error))))),
        Action::Relay(options) => relay::run(&options)
            .map(|()| 0)
            .map_err(|error| (USAGE, (!error.is_said()).then(|| chain(&error)))),
        Action::Reap(options) => {
            run::reaper::reap(&options);
            Ok(0)
        }
        Action::ConnectAgain(options) => backend::again::run(&options)
            .map(|()| 0)
            .map_err(|error| (USAGE, Some(chain(&error)))),
        Action::Remove => {
            attach::names::remove();
            Ok(0)
        }
        Action::RemoveCgroup(options) => {
            cgroup::remove(&options);
            Ok(0)
        }
        Action::Record(options) => {
            run::record::write(&options);
            Ok(0)
        }
        Action::Collect(options) => run::collect::copy(&options)
            .map(|()| 0)
            .map_err(|error| (USAGE, Some(chain(&error)))),
        Action::Unpack(layout) => {
            run::layout::hold(layout);
            Ok(0)
        }
        Action::KeepTerminal => {
            run::terminal::keep();
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

/// Returns the outcome of a command on guests, with the sentence of an error.
fn of_guest(
    outcome: Result<u8, guests::GuestsError>,
    origins: &config::Origins,
) -> Result<u8, (u8, Option<String>)> {
    outcome.map_err(|error| {
        let sentence = || chain(&error) + &origins.note(&error.options());
        (error.status(), (!error.is_said()).then(sentence))
    })
}
