//! Ways to run a program, to be compared.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;

use clap::Args;

/// Variable with the folder of GVirtuS.
const GVIRTUS_HOME: &str = "GVIRTUS_HOME";
/// Script that runs a program over GVirtuS, from the root of the sources.
const GVIRTUS_RUN: &str = "benches/gvirtus/run";

/// Seconds after which a run is ended, so that a way that hangs fails.
const PATIENCE: &str = "900";

/// Error from the name of a way, or from its environment.
#[derive(Debug, thiserror::Error)]
pub enum WayError {
    #[error(
        "there is no way `{0}`: use native, doorbell, socket, gvirtus=HOST:PORT or one-processor"
    )]
    Unknown(String),
    #[error("{GVIRTUS_HOME} is not set: it must name the folder in which GVirtuS is installed")]
    NoGvirtus,
}

/// Way in which a program reaches a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Way {
    /// Forwarded through the window, which the backend polls.
    Poll,
    /// As `poll`, with program and backend on one processor.
    OneProcessor,
    /// Forwarded, with a doorbell and an interrupt for each request.
    Doorbell,
    /// Forwarded, with a round trip through a socket for each call.
    Socket,
    /// By this machine's own driver.
    Native,
    /// By GVirtuS, whose backend has this address.
    Gvirtus(String),
}

impl FromStr for Way {
    type Err = WayError;

    fn from_str(text: &str) -> Result<Self, WayError> {
        match (text, text.strip_prefix("gvirtus=")) {
            ("native", _) => Ok(Self::Native),
            ("one-processor", _) => Ok(Self::OneProcessor),
            ("doorbell", _) => Ok(Self::Doorbell),
            ("socket", _) => Ok(Self::Socket),
            (_, Some(address)) if address.contains(':') => Ok(Self::Gvirtus(address.to_owned())),
            _ => Err(WayError::Unknown(text.to_owned())),
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self {
            Self::Gvirtus(address) => write!(f, "={address}"),
            _ => Ok(()),
        }
    }
}

impl Way {
    /// Returns the name in figures.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Poll => "poll",
            Self::OneProcessor => "one-processor",
            Self::Doorbell => "doorbell",
            Self::Socket => "socket",
            Self::Native => "native",
            Self::Gvirtus(_) => "gvirtus",
        }
    }

    /// Returns the command that runs a program in this way, by this `wormhole` on this device.
    ///
    /// # Errors
    /// The environment lacks what the way needs.
    pub fn command(
        &self,
        wormhole: &Path,
        device: &str,
        program: &[OsString],
    ) -> Result<Command, WayError> {
        let limit = ["timeout", "--kill-after=5", PATIENCE];
        let mut command = match self {
            Self::Poll | Self::Doorbell | Self::Socket => Command::new(wormhole),
            Self::OneProcessor => {
                let mut run = Command::new("taskset");
                run.args(["--cpu-list", "0"]).arg(wormhole);
                run
            }
            Self::Native | Self::Gvirtus(_) => Command::new(limit[0]),
        };
        match self {
            Self::Native => command.args(&limit[1..]),
            Self::Gvirtus(address) => {
                let home = std::env::var_os(GVIRTUS_HOME).ok_or(WayError::NoGvirtus)?;
                // The limit is outside, since the script loads GVirtuS into each program that it starts.
                command
                    .args(&limit[1..])
                    .arg(GVIRTUS_RUN)
                    .args([&*home, OsStr::new(address)])
            }
            Self::Poll | Self::OneProcessor | Self::Doorbell | Self::Socket => {
                command.args([
                    "run",
                    "--placement",
                    "process",
                    "--quiet",
                    "--device",
                    device,
                ]);
                if matches!(self, Self::Doorbell | Self::Socket) {
                    command.args(["--transport", self.name()]);
                }
                // The limit ends the program, so that the launcher ends as with any other.
                command.arg("--").args(limit)
            }
        };
        command.args(program);
        Ok(command)
    }
}

/// Options of benchmarks that run programs in several ways by turns.
#[derive(Debug, Clone, Args)]
pub struct Comparison {
    /// The device of the backend: `cpu` or `cuda:N`.
    #[arg(long, default_value = "cpu")]
    pub device: String,
    /// Other ways, separated by commas: `native`, `doorbell`, `socket`, `gvirtus=HOST:PORT`, `one-processor`.
    #[arg(long, value_delimiter = ',')]
    pub against: Vec<Way>,
    /// Number of turns.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub turns: u32,
    /// Write the figures as JSON to this file.
    #[arg(long)]
    pub json: Option<PathBuf>,
}

impl Comparison {
    /// Returns all ways, the measured one first.
    pub fn ways(&self) -> Vec<Way> {
        let mut ways = vec![Way::Poll];
        ways.extend(self.against.iter().cloned());
        ways
    }

    /// Returns the words that give these options to a benchmark.
    pub fn words(&self) -> Vec<OsString> {
        let mut words: Vec<OsString> = vec!["--device".into(), (&self.device).into()];
        for way in &self.against {
            words.extend(["--against".into(), way.to_string().into()]);
        }
        words.extend(["--turns".into(), self.turns.to_string().into()]);
        if let Some(path) = &self.json {
            words.extend(["--json".into(), path.into()]);
        }
        words
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Program {
        #[command(flatten)]
        comparison: Comparison,
    }

    #[test]
    fn options_that_are_handed_on_are_the_same() {
        let words = ["x", "--against", "native,socket,gvirtus=h:1", "--json", "f"];
        let first = Program::parse_from(words).comparison;
        let names: Vec<_> = first.ways().iter().map(Way::name).collect();
        assert_eq!(names, ["poll", "native", "socket", "gvirtus"]);
        let handed = std::iter::once("x".into()).chain(first.words());
        let second = Program::parse_from(handed).comparison;
        assert_eq!(second.words(), first.words());
    }

    #[test]
    fn ways_without_a_name_or_an_address_are_refused() {
        for text in ["poll", "gvirtus", "gvirtus=", ""] {
            assert!(Way::from_str(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_transport_is_an_option_of_the_command() {
        let of = |way: Way| {
            let command = way.command(Path::new("w"), "cpu", &["p".into()]);
            let command = command.expect("a command");
            let words = command.get_args().map(|word| word.to_string_lossy());
            words.collect::<Vec<_>>().join(" ")
        };
        assert!(of(Way::Doorbell).contains(" --transport doorbell -- timeout "));
        assert!(!of(Way::Poll).contains("--transport"));
        assert!(of(Way::Native).ends_with(" 900 p"));
    }
}
