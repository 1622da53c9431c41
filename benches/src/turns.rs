//! Runs programs in several ways by turns.
//!
//! A program writes lines of JSON to its standard output: [`Line`]. Each of its other lines is ignored.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;
use std::process::Stdio;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use wormhole_figures::ways::{Comparison, Way, WayError};
use wormhole_figures::{Failed, Quantiles, Report, ReportError, Unit, progress};

/// Lines of a program's output that the report of its failure has.
const LAST_LINES: usize = 5;

/// Word of a program that has verified its results.
const PASS: &str = "PASS";

/// Line of a program's output.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Line {
    /// Name of the device, with the version of CUDA.
    Device(String),
    /// Samples of a row, in nanoseconds.
    Samples {
        name: String,
        #[serde(default)]
        with: String,
        values: Vec<f64>,
    },
    /// Result that must be the same in each way and turn.
    Check { name: String, value: String },
    /// Reason for which the program has no samples.
    Skipped(String),
}

/// Error of a benchmark.
#[derive(Debug, thiserror::Error)]
pub enum TurnsError {
    #[error(transparent)]
    Report(#[from] ReportError),
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    Ways(Vec<Failed>),
}

/// Error of one run.
#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error(transparent)]
    Way(#[from] WayError),
    #[error("{0} cannot be started: {1}")]
    Start(String, std::io::Error),
    #[error("{0}: {1}")]
    Ended(std::process::ExitStatus, String),
    #[error("it printed no samples: {0}")]
    NoSamples(String),
    #[error("it did not print {PASS}: {0}")]
    NoPass(String),
    #[error("the result `{name}` is {value}, and {first} before")]
    Differs {
        name: String,
        value: String,
        first: String,
    },
}

/// A program with its arguments.
#[derive(Debug)]
pub struct Job {
    pub name: String,
    pub command: Vec<OsString>,
    pub samples: Samples,
}

/// Source of a program's samples.
#[derive(Debug, PartialEq, Eq)]
pub enum Samples {
    /// The program prints them.
    Printed,
    /// The time from the program's start to its end is one, under these circumstances. The program prints `PASS`.
    Whole(String),
}

/// Quantiles of each turn, by way.
type Turns = Vec<BTreeMap<usize, Quantiles>>;

/// Rows and results of all runs.
#[derive(Debug, Default)]
struct Measured {
    device: String,
    rows: Vec<((String, String), Turns)>,
    /// First value of each result, by the names of job and result.
    results: BTreeMap<(String, String), String>,
}

/// Runs the jobs in each way by turns, prints a table and writes the figures. A way in which a job fails is left out of
/// the job's other turns.
///
/// # Errors
/// A way failed, or the figures cannot be written.
pub fn by_turns(
    benchmark: &str,
    comparison: &Comparison,
    wormhole: &Path,
    jobs: &[Job],
) -> Result<(), TurnsError> {
    let ways = comparison.ways();
    let names: Vec<&str> = ways.iter().map(Way::name).collect();
    let reference = [Way::Native, Way::OneProcessor];
    let reference = reference.iter().find(|way| ways.contains(way));
    let references: Vec<&str> = reference.iter().map(|way| way.name()).collect();
    let turns = comparison.turns as usize;
    let mut report = Report::new(benchmark, &names, &references, turns);
    let mut measured = Measured::default();
    let bar = progress(turns * jobs.len() * ways.len());
    for turn in 0..turns {
        for job in jobs {
            for (index, way) in ways.iter().enumerate() {
                bar.set_message(format!("{} by {}", job.name, way.name()));
                if report
                    .failures
                    .iter()
                    .any(|failed| failed.is_of(way, &job.name))
                {
                    continue;
                }
                let lines = run(way, comparison, wormhole, job);
                let taken = lines.and_then(|lines| measured.take(job, (turn, index), lines));
                report.failures.extend(taken.err().map(|error| Failed {
                    way: way.name().to_owned(),
                    work: job.name.clone(),
                    why: error.to_string(),
                }));
                bar.inc(1);
            }
        }
    }
    bar.finish_and_clear();
    report.conditions.device = match &*measured.device {
        "" => comparison.device.clone(),
        name => name.to_owned(),
    };
    for ((name, with), mut turns) in measured.rows {
        turns.resize(ways.len(), BTreeMap::new());
        report.add(&name, &with, Unit::Nanoseconds, &turns);
    }
    report.finish(comparison.json.as_deref())?;
    match report.failures.is_empty() {
        true => Ok(()),
        false => Err(TurnsError::Ways(report.failures)),
    }
}

/// Runs a program once and returns the lines for the report.
fn run(
    way: &Way,
    comparison: &Comparison,
    wormhole: &Path,
    job: &Job,
) -> Result<Vec<Line>, RunError> {
    let mut command = way.command(wormhole, &comparison.device, &job.command)?;
    let start = Instant::now();
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(|error| RunError::Start(command.get_program().display().to_string(), error))?;
    let took = start.elapsed();
    let (text, errors) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    let parsed = text.lines().map(|line| (line, serde_json::from_str(line)));
    let (lines, others): (Vec<_>, Vec<_>) = parsed.partition(|(_, line)| line.is_ok());
    let said = || {
        let others = others.iter().map(|(line, _)| *line);
        let all: Vec<&str> = others.chain(errors.lines()).collect();
        all[all.len().saturating_sub(LAST_LINES)..].join("\n")
    };
    if !output.status.success() {
        return Err(RunError::Ended(output.status, said()));
    }
    if let Samples::Whole(with) = &job.samples {
        return match text.contains(PASS) {
            true => Ok(vec![Line::Samples {
                name: job.name.clone(),
                with: with.clone(),
                values: vec![took.as_secs_f64() * 1e9],
            }]),
            false => Err(RunError::NoPass(said())),
        };
    }
    let lines: Vec<Line> = lines
        .into_iter()
        .filter_map(|(_, line)| line.ok())
        .collect();
    let counts = |line: &Line| matches!(line, Line::Samples { .. } | Line::Skipped(_));
    match lines.iter().any(counts) {
        true => Ok(lines),
        false => Err(RunError::NoSamples(said())),
    }
}

impl Measured {
    /// Takes the lines of a run. A result that differs is an error, and the samples count all the same.
    fn take(
        &mut self,
        job: &Job,
        (turn, way): (usize, usize),
        lines: Vec<Line>,
    ) -> Result<(), RunError> {
        let mut differs = Ok(());
        for line in lines {
            match line {
                // The first way is the measured one. A frontend of others may name the device in its own manner.
                Line::Device(device) if self.device.is_empty() => self.device = device,
                Line::Device(_) => {}
                Line::Samples { name, with, values } => {
                    let turns = self.turns_of((name, with));
                    turns.resize(turns.len().max(way + 1), BTreeMap::new());
                    turns[way].extend(Quantiles::of(values).map(|quantiles| (turn, quantiles)));
                }
                Line::Skipped(why) => eprintln!("`{}` was skipped: {why}", job.name),
                Line::Check { name, value } => {
                    let key = (job.name.clone(), name.clone());
                    let first = self.results.entry(key).or_insert_with(|| value.clone());
                    if *first != value {
                        let first = first.clone();
                        differs = Err(RunError::Differs { name, value, first });
                    }
                }
            }
        }
        differs
    }

    fn turns_of(&mut self, row: (String, String)) -> &mut Turns {
        let index = self.rows.iter().position(|(known, _)| *known == row);
        let index = index.unwrap_or_else(|| {
            self.rows.push((row, Vec::new()));
            self.rows.len() - 1
        });
        &mut self.rows[index].1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(name: &str, command: &[&str]) -> Job {
        Job {
            name: name.to_owned(),
            command: command.iter().map(Into::into).collect(),
            samples: Samples::Printed,
        }
    }

    #[test]
    fn a_result_that_differs_between_runs_is_an_error() {
        let mut measured = Measured::default();
        let mut take = |job_name, turn, value: &str| {
            let line = Line::Check {
                name: "sum".to_owned(),
                value: value.to_owned(),
            };
            measured.take(&job(job_name, &[]), (turn, 0), vec![line])
        };
        assert!(take("a", 0, "1").is_ok());
        assert!(take("b", 0, "2").is_ok());
        let error = take("a", 1, "2").expect_err("another result");
        assert_eq!(error.to_string(), "the result `sum` is 2, and 1 before");
    }

    #[test]
    fn a_way_that_fails_is_named_with_what_it_said() {
        let comparison = Comparison {
            device: "cpu".to_owned(),
            against: vec![Way::Native, Way::Socket],
            turns: 2,
            json: None,
        };
        let samples = r#"echo '{"samples": {"name": "x", "values": [1]}}'"#;
        let jobs = [
            job("good", &["sh", "-c", samples]),
            job("silent", &["sh", "-c", "echo nothing"]),
            Job {
                samples: Samples::Whole("10".to_owned()),
                ..job("wrong", &["sh", "-c", "echo FAIL"])
            },
        ];
        // `true` stands for a `wormhole` that does nothing.
        let error = by_turns("test", &comparison, Path::new("true"), &jobs);
        let text = error.expect_err("failures").to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with("`good` failed by poll: "), "{text}");
        let silent = lines
            .iter()
            .find(|line| line.contains("`silent` failed by native: "));
        let silent = silent.expect("the native run");
        assert!(
            silent.ends_with(": it printed no samples: nothing"),
            "{text}"
        );
        assert!(
            lines.contains(&"`wrong` failed by native: it did not print PASS: FAIL"),
            "{text}"
        );
        assert_eq!(lines.len(), 8, "{text}");
    }
}
