//! Measures a tenant's operations during attacks by another tenant of the same supervisor, compared with the same
//! operations alone.
//!
//! This process is the victim's launcher and its guests. Each attack runs in a separate process, a second tenant, which
//! is
//! killed at the end of its slice. Slices without and with an attack alternate. An attack also uses processor time. The
//! control occupies all processors without using the supervisor, so the cost of an attack beyond that of the control is
//! caused in the supervisor. A refused request of the victim is a failure.

mod attacks;
mod victim;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use wormhole_benches::failure;
use wormhole_benches::machine::Machine;

use crate::attacks::{Attack, Attacker, Lost, is_root};
use crate::victim::{Figures, Samples, Victim};

#[derive(Debug, Parser)]
struct Options {
    /// Number of slices of each attack. A slice without an attack precedes each.
    #[arg(long, default_value_t = 4)]
    rounds: usize,
    /// Milliseconds of a slice. By default 88 s are measured with the control and ten attacks.
    #[arg(long, default_value_t = 1000)]
    slice: u64,
    /// Play this attack, for a parent that kills this process.
    #[arg(long, hide = true, requires = "socket")]
    attack: Option<Attack>,
    /// The supervisor to attack.
    #[arg(long, hide = true)]
    socket: Option<PathBuf>,
}

/// Results of one attack: its steps and the victim's samples.
#[derive(Debug)]
struct Row {
    attack: Attack,
    /// Number of the attack's steps. `seconds` is their duration.
    steps: u64,
    seconds: f64,
    samples: Samples,
}

fn main() -> ExitCode {
    let options = Options::parse();
    if let (Some(attack), Some(socket)) = (options.attack, options.socket) {
        attack.play(&socket);
    }
    match measure(options.rounds, Duration::from_millis(options.slice)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure("neighbours", &error),
    }
}

fn measure(rounds: usize, slice: Duration) -> Result<(), Lost> {
    let machine = Machine::read();
    println!(
        "{}, {} processors, Linux {}; load before {}",
        machine.processor,
        machine.processors,
        machine.kernel,
        load()
    );
    if !is_root() {
        println!("hostile tenants are of the victim's user: only root can be another");
    }
    let mut victim = Victim::start();
    let mut alone = Samples::default();
    let mut rows: Vec<Row> = Attack::ALL
        .into_iter()
        .map(|attack| Row {
            attack,
            steps: 0,
            seconds: 0.0,
            samples: Samples::default(),
        })
        .collect();
    for _ in 0..rounds {
        for row in &mut rows {
            victim.run(slice, &mut alone);
            let start = Instant::now();
            let mut attacker = Attacker::start(row.attack, victim.socket())?;
            attacker.wait_until_under_way()?;
            victim.run(slice, &mut row.samples);
            row.steps += attacker.end()?;
            row.seconds += start.elapsed().as_secs_f64();
            victim.wait_until_alone();
        }
    }
    println!("load after {}", load());
    print(&alone.figures(), &rows);
    let beside = rows.iter().map(|row| (row.attack.name(), &row.samples));
    let all = std::iter::once(("no attack", &alone)).chain(beside);
    let refused: Vec<String> = all
        .filter_map(|(attack, samples)| Some(format!("{} beside {attack}", samples.refusals()?)))
        .collect();
    match refused.is_empty() {
        true => Ok(()),
        false => Err(Lost::Refused(refused.join("; "))),
    }
}

/// Prints the victim's results: alone in microseconds, during each attack also as ratios to the results alone.
fn print(alone: &Figures, rows: &[Row]) {
    println!(
        "p50 / p99 in µs (as multiples: p50 and p99 of those alone, p99 of that beside the control)"
    );
    println!(
        "{:24} {:>9}  {:36} {:36} {:36}",
        "", "attack/s", "doorbell to answer", "hello to grant", "arena request"
    );
    println!("{:24} {:>9}  {}", "alone", "", alone.line(None, None));
    let control = rows
        .iter()
        .find(|row| matches!(row.attack, Attack::Processors))
        .map(|row| row.samples.figures());
    for row in rows {
        #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
        let rate = row.steps as f64 / row.seconds;
        println!(
            "{:24} {rate:>9.0}  {}",
            row.attack.name(),
            row.samples.figures().line(Some(alone), control.as_ref())
        );
    }
}

/// Returns Linux's load average of the last minute.
fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().unwrap_or_default().to_owned()
}
