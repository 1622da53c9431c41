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

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use wormhole_benches::failure;
use wormhole_figures::quantiles::Quantiles;
use wormhole_figures::{Report, Unit, progress};

use crate::attacks::{Attack, Attacker, Lost, is_root};
use crate::victim::{OPERATIONS, Samples, Victim};

#[derive(Debug, Parser)]
struct Options {
    /// Number of slices of each attack. A slice without an attack precedes each.
    #[arg(long, default_value_t = 4)]
    rounds: usize,
    /// Milliseconds of a slice. By default 88 s are measured with the control and ten attacks.
    #[arg(long, default_value_t = 1000)]
    slice: u64,
    /// Write the figures as JSON to this file.
    #[arg(long)]
    json: Option<PathBuf>,
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
    if let (Some(attack), Some(socket)) = (options.attack, &options.socket) {
        attack.play(socket);
    }
    match measure(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure("neighbours", &*error),
    }
}

fn measure(options: &Options) -> Result<(), Box<dyn Error>> {
    let slice = Duration::from_millis(options.slice);
    let mut report = Report::new("neighbours", &["beside", "alone"], &["alone"], 1);
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
    let bar = progress(options.rounds * rows.len());
    for _ in 0..options.rounds {
        for row in &mut rows {
            bar.set_message(row.attack.name());
            victim.run(slice, &mut alone);
            let start = Instant::now();
            let mut attacker = Attacker::start(row.attack, victim.socket())?;
            attacker.wait_until_under_way()?;
            victim.run(slice, &mut row.samples);
            row.steps += attacker.end()?;
            row.seconds += start.elapsed().as_secs_f64();
            victim.wait_until_alone();
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    for row in &rows {
        #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
        let rate = row.steps as f64 / row.seconds;
        let with = format!("beside {}, {rate:.0} steps a second", row.attack.name());
        for (operation, name) in OPERATIONS.into_iter().enumerate() {
            let samples = vec![row.samples.of(operation), alone.of(operation)];
            report.add_once(name, &with, Unit::Nanoseconds, samples);
        }
    }
    report.finish(options.json.as_deref())?;
    println!(
        "\nratios of the 99th percentiles, to those alone and to those beside busy processors:"
    );
    print(&alone, &rows);
    let beside = rows.iter().map(|row| (row.attack.name(), &row.samples));
    let all = std::iter::once(("no attack", &alone)).chain(beside);
    let refused: Vec<String> = all
        .filter_map(|(attack, samples)| Some(format!("{} beside {attack}", samples.refusals()?)))
        .collect();
    match refused.is_empty() {
        true => Ok(()),
        false => Err(Lost::Refused(refused.join("; ")).into()),
    }
}

/// Prints how much longer the slowest of the victim's operations take beside each attack.
fn print(alone: &Samples, rows: &[Row]) {
    let p99 = |samples: &Samples, operation| {
        Quantiles::of(samples.of(operation)).map_or(f64::NAN, |quantiles| quantiles.p99)
    };
    let control = rows
        .iter()
        .find(|row| matches!(row.attack, Attack::Processors));
    for row in rows {
        let ratios = (0..OPERATIONS.len()).map(|operation| {
            let own = p99(&row.samples, operation);
            let to = |other: &Samples| own / p99(other, operation);
            let control = control.map_or(f64::NAN, |control| to(&control.samples));
            format!("{:6.2} {control:6.2}", to(alone))
        });
        let ratios: Vec<String> = ratios.collect();
        println!("{:24} {}", row.attack.name(), ratios.join("   "));
    }
}
