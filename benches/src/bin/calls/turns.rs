//! Runs this program forwarded and natively by turns, and compares.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::ValueEnum;
use serde::Serialize;

use crate::{Figures, Options, Row};

/// Error from a turn.
#[derive(Debug, thiserror::Error)]
pub enum TurnError {
    #[error("{0} cannot be started")]
    Start(String, #[source] std::io::Error),
    #[error("a run {0} failed")]
    Run(&'static str),
    #[error("the figures cannot be read or written")]
    File(#[from] std::io::Error),
    #[error("the figures have another form")]
    Form(#[from] serde_json::Error),
}

/// A row of all turns.
#[derive(Debug, Serialize)]
struct Compared {
    function: String,
    with: String,
    /// Median of the turns' medians, in nanoseconds.
    ns: f64,
    /// Median of the turns' 99th percentiles.
    p99: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    native: Option<Native>,
}

#[derive(Debug, Serialize)]
struct Native {
    ns: f64,
    p99: f64,
    /// Median of the ratios of each turn, forwarded to native.
    ratio: f64,
    /// The highest of native's medians to its lowest: its own spread between turns.
    spread: f64,
}

/// Figures of all turns.
#[derive(Debug, Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    conditions: &'a crate::Conditions,
    device: &'a str,
    turns: u32,
    rows: Vec<Compared>,
}

/// Measures by turns, prints a table and writes the figures.
///
/// # Errors
/// A run fails, or its figures cannot be read or written.
pub fn by_turns(options: &Options, wormhole: &Path) -> Result<(), TurnError> {
    let own = std::env::current_exe()?;
    let folder = tempfile::tempdir()?;
    let (forwarded, native) = measure(options, wormhole, &own, folder.path())?;
    let Some(conditions) = native
        .first()
        .or(forwarded.first())
        .map(|figures| &figures.conditions)
    else {
        return Ok(());
    };
    let rows = compare(&forwarded, &native);
    print(&rows);
    let report = Report {
        conditions,
        device: &options.device,
        turns: options.turns,
        rows,
    };
    if let Some(path) = &options.json {
        std::fs::write(path, serde_json::to_vec_pretty(&report)?)?;
    }
    Ok(())
}

/// Returns the figures of all turns, forwarded and native.
fn measure(
    options: &Options,
    wormhole: &Path,
    own: &Path,
    folder: &Path,
) -> Result<(Vec<Figures>, Vec<Figures>), TurnError> {
    let (mut forwarded, mut native) = (Vec::new(), Vec::new());
    for turn in 1..=options.turns {
        eprintln!("turn {turn} of {}", options.turns);
        let mut command = Command::new(wormhole);
        command
            .args([
                "run",
                "--placement",
                "process",
                "--quiet",
                "--device",
                &options.device,
                "--",
            ])
            .arg(own);
        forwarded.push(once(options, command, folder, "forwarded")?);
        if options.native {
            native.push(once(options, Command::new(own), folder, "natively")?);
        }
    }
    Ok((forwarded, native))
}

/// Runs this program once and returns its figures.
fn once(
    options: &Options,
    mut command: Command,
    folder: &Path,
    way: &'static str,
) -> Result<Figures, TurnError> {
    let file: PathBuf = folder.join("figures.json");
    command
        .args(
            options
                .group
                .to_possible_value()
                .as_ref()
                .map(clap::builder::PossibleValue::get_name),
        )
        .args(["--samples", &options.samples.to_string(), "--json"])
        .arg(&file)
        .stdin(Stdio::null());
    let program = command.get_program().display().to_string();
    let status = command
        .status()
        .map_err(|error| TurnError::Start(program, error))?;
    if !status.success() {
        return Err(TurnError::Run(way));
    }
    Ok(serde_json::from_slice(&std::fs::read(file)?)?)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Joins the rows of all turns. A row that native or a turn lacks is compared by the turns that have it.
fn compare(forwarded: &[Figures], native: &[Figures]) -> Vec<Compared> {
    let find = |figures: &'_ Figures, row: &Row| -> Option<(f64, f64)> {
        let same = |other: &&Row| other.function == row.function && other.with == row.with;
        figures.rows.iter().find(same).map(|row| (row.ns, row.p99))
    };
    let Some(first) = forwarded.first() else {
        return Vec::new();
    };
    let compared = first.rows.iter().map(|row| {
        let ours: Vec<_> = forwarded
            .iter()
            .filter_map(|figures| find(figures, row))
            .collect();
        let theirs: Vec<_> = native
            .iter()
            .filter_map(|figures| find(figures, row))
            .collect();
        let ratios: Vec<f64> = ours
            .iter()
            .zip(&theirs)
            .map(|(ours, theirs)| ours.0 / theirs.0)
            .collect();
        let medians = || theirs.iter().map(|(ns, _)| *ns);
        Compared {
            function: row.function.clone(),
            with: row.with.clone(),
            ns: median(ours.iter().map(|(ns, _)| *ns).collect()),
            p99: median(ours.iter().map(|(_, p99)| *p99).collect()),
            native: (!ratios.is_empty()).then(|| Native {
                ns: median(medians().collect()),
                p99: median(theirs.iter().map(|(_, p99)| *p99).collect()),
                ratio: median(ratios),
                spread: medians().fold(0.0, f64::max) / medians().fold(f64::INFINITY, f64::min),
            }),
        }
    });
    compared.collect()
}

fn print(rows: &[Compared]) {
    println!("| call | ns | p99 | native | p99 | ratio | native's spread |");
    println!("|---|---|---|---|---|---|---|");
    for row in rows {
        let with = if row.with.is_empty() {
            String::new()
        } else {
            format!(" ({})", row.with)
        };
        let native = row.native.as_ref().map_or_else(
            || "– | – | – | –".to_owned(),
            |native| {
                format!(
                    "{:.0} | {:.0} | {:.2} | {:.2}",
                    native.ns, native.p99, native.ratio, native.spread
                )
            },
        );
        println!(
            "| {}{with} | {:.0} | {:.0} | {native} |",
            row.function, row.ns, row.p99
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(rows: &[(&str, f64)]) -> Figures {
        let rows = rows.iter().map(|(function, ns)| Row {
            function: (*function).to_owned(),
            with: String::new(),
            ns: *ns,
            p99: *ns,
            count: 1,
        });
        Figures {
            conditions: crate::Conditions::default(),
            rows: rows.collect(),
        }
    }

    #[test]
    fn each_turn_is_compared_with_the_native_run_beside_it() {
        let forwarded = [
            figures(&[("a", 10.0), ("b", 1.0)]),
            figures(&[("a", 30.0)]),
            figures(&[("a", 20.0)]),
        ];
        let native = [
            figures(&[("a", 20.0)]),
            figures(&[("a", 30.0)]),
            figures(&[("a", 60.0)]),
        ];
        let rows = compare(&forwarded, &native);
        let a = rows[0].native.as_ref().expect("native has the row");
        assert_eq!(
            [rows[0].ns, a.ns, a.ratio, a.spread],
            [20.0, 30.0, 0.5, 3.0]
        );
        assert!(rows[1].native.is_none());
    }
}
