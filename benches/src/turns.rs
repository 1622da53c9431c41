//! Runs programs in several ways by turns.
//!
//! A program writes lines of JSON to its standard output: [`Line`]. Each of its other lines is ignored.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use wormhole_figures::ways::{Comparison, Way, WayError};
use wormhole_figures::{Failed, Quantiles, Report, ReportError, Unit, progress};

use crate::processor_time;

/// Lines of a program's output that the report of its failure has.
const LAST_LINES: usize = 5;

/// Word of a program that has verified its results.
const PASS: &str = "PASS";

/// Line of a program's output.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Line {
    /// The steps begin whose processor time counts.
    Begin,
    /// Name of the device, with the version of CUDA.
    Device(String),
    /// Samples of a row, in nanoseconds.
    Samples {
        name: String,
        #[serde(default)]
        with: String,
        values: Vec<f64>,
        /// Number of steps since [`Line::Begin`].
        #[serde(default)]
        steps: Option<u32>,
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
    Start(String, io::Error),
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

/// Runs the jobs in each way by turns, prints a table and writes the figures, also after each job. A way in which a job fails is
/// left out of the job's other turns.
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
            // A long run that is ended leaves the figures until then.
            measured.fill(&mut report, &comparison.device);
            report.write(comparison.json.as_deref())?;
        }
    }
    bar.finish_and_clear();
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
    let started = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let failed =
        |error: io::Error| RunError::Start(command.get_program().display().to_string(), error);
    let mut child = started.map_err(failed)?;
    let errors = child.stderr.take().map(|errors| {
        std::thread::spawn(move || {
            let mut text = Vec::new();
            // The text until an error is enough for a report.
            let _ = BufReader::new(errors).read_to_end(&mut text);
            String::from_utf8_lossy(&text).into_owned()
        })
    });
    let (lines, others) = child.stdout.take().map_or_else(Default::default, |output| {
        read_lines(output, || processor_time::of_family(child.id()))
    });
    let status = child.wait().map_err(failed)?;
    let took = start.elapsed();
    let errors = errors.and_then(|errors| errors.join().ok());
    let errors = errors.unwrap_or_default();
    let said = || {
        let others = others.iter().map(String::as_str);
        let all: Vec<&str> = others.chain(errors.lines()).collect();
        all[all.len().saturating_sub(LAST_LINES)..].join("\n")
    };
    if !status.success() {
        return Err(RunError::Ended(status, said()));
    }
    if let Samples::Whole(with) = &job.samples {
        return match others.iter().any(|line| line.contains(PASS)) {
            true => Ok(vec![Line::Samples {
                name: job.name.clone(),
                with: with.clone(),
                values: vec![took.as_secs_f64() * 1e9],
                steps: None,
            }]),
            false => Err(RunError::NoPass(said())),
        };
    }
    let counts = |line: &Line| matches!(line, Line::Samples { .. } | Line::Skipped(_));
    match lines.iter().any(counts) {
        true => Ok(lines),
        false => Err(RunError::NoSamples(said())),
    }
}

/// Reads a program's output to its end: the lines for the report, and the others. `time` is the processor time until now.
/// The part of it that steps have taken is a line of its own.
fn read_lines(output: impl Read, time: impl Fn() -> Duration) -> (Vec<Line>, Vec<String>) {
    let (mut lines, mut others) = (Vec::new(), Vec::new());
    let mut begin = None;
    for text in BufReader::new(output).split(b'\n') {
        let Ok(text) = text else {
            break;
        };
        let Ok(line) = serde_json::from_slice(&text) else {
            others.push(String::from_utf8_lossy(&text).into_owned());
            continue;
        };
        let of_steps = match &line {
            Line::Begin => {
                begin = Some(time());
                None
            }
            Line::Samples {
                name,
                with,
                steps: Some(steps),
                ..
            } => begin
                .take()
                .map(|begin| of_steps(name, with, time().saturating_sub(begin), *steps)),
            _ => None,
        };
        lines.push(line);
        lines.extend(of_steps);
    }
    (lines, others)
}

/// Returns the line of the processor time that steps have taken.
fn of_steps(name: &str, with: &str, took: Duration, steps: u32) -> Line {
    let comma = if with.is_empty() { "" } else { ", " };
    // A shorter time is below the clock's resolution.
    let values = match took.is_zero() {
        true => Vec::new(),
        false => vec![took.as_secs_f64() * 1e9 / f64::from(steps.max(1))],
    };
    Line::Samples {
        name: name.to_owned(),
        with: format!("{with}{comma}processor time"),
        values,
        steps: None,
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
                Line::Begin => {}
                Line::Samples {
                    name, with, values, ..
                } => {
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

    /// Replaces a report's rows by those that are measured.
    fn fill(&self, report: &mut Report, device: &str) {
        report.conditions.device = match &*self.device {
            "" => device.to_owned(),
            name => name.to_owned(),
        };
        report.rows.clear();
        for ((name, with), turns) in &self.rows {
            report.add(name, with, Unit::Nanoseconds, turns);
        }
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
    fn steps_have_their_part_of_the_processor_time() {
        let clock = std::cell::Cell::new(0);
        let time = || {
            clock.set(clock.get() + 300);
            Duration::from_millis(clock.get())
        };
        let output = "\"begin\"\n{\"samples\": {\"name\": \"x\", \"with\": \"y\", \"values\": [1], \"steps\": 3}}\nelse\n\
                      {\"samples\": {\"name\": \"z\", \"values\": [1]}}";
        let (lines, others) = read_lines(output.as_bytes(), time);
        assert_eq!(others, ["else"]);
        let rows: Vec<_> = lines
            .iter()
            .filter_map(|line| match line {
                Line::Samples {
                    name, with, values, ..
                } => Some((&**name, &**with, &values[..])),
                _ => None,
            })
            .collect();
        assert_eq!(
            rows,
            [
                ("x", "y", &[1.0][..]),
                ("x", "y, processor time", &[1e8]),
                ("z", "", &[1.0])
            ]
        );
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
