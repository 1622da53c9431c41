//! Figures of benchmarks, in one form for all of them.
//!
//! A benchmark runs the same work in several ways by turns, and compares within each turn. Its [`Report`] names the
//! conditions, since absolute times vary between runs.

pub mod conditions;
mod progress;
pub mod quantiles;
mod table;
mod unit;
pub mod ways;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use conditions::Conditions;
pub use progress::progress;
pub use quantiles::Quantiles;
pub use unit::{Unit, digits};

/// Error from reading or writing figures.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    #[error("{} cannot be read or written", .0.display())]
    File(PathBuf, #[source] std::io::Error),
    #[error("{} has no figures in the form of this version", .0.display())]
    Form(PathBuf, #[source] serde_json::Error),
}

/// Figures of one run of a benchmark.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
pub struct Report {
    pub benchmark: String,
    #[serde(flatten)]
    pub conditions: Conditions,
    /// Names of the ways in which the work was done. The first one is measured, the others are beside it.
    pub ways: Vec<String>,
    /// Ways to which the others are compared: to the best of them in each turn.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub references: Vec<String>,
    pub turns: usize,
    pub rows: Vec<Row>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failures: Vec<Failed>,
}

/// Work that failed in one way.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
pub struct Failed {
    pub way: String,
    pub work: String,
    pub why: String,
}

impl Failed {
    pub fn is_of(&self, way: &ways::Way, work: &str) -> bool {
        self.way == way.name() && self.work == work
    }
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` failed by {}: {}", self.work, self.way, self.why)
    }
}

/// A quantity, as each way has it.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
pub struct Row {
    /// The driver's function, or several, or a name of the work.
    pub name: String,
    /// Sizes and circumstances.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub with: String,
    pub unit: Unit,
    /// Median of the measured way, where the unit is a nanosecond.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ns: Option<f64>,
    /// Ratio of the measured way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
    pub ways: BTreeMap<String, Figure>,
}

/// A quantity in one way.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
pub struct Figure {
    /// Median of the turns' medians.
    pub median: f64,
    /// Median of the turns' 99th percentiles, where a turn has several samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p99: Option<f64>,
    /// Least and greatest median of a turn.
    pub least: f64,
    pub greatest: f64,
    /// Median of the ratios of each turn to the best reference of the same turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
}

impl Report {
    /// Begins a report without rows, on the conditions of this moment.
    pub fn new(benchmark: &str, ways: &[&str], references: &[&str], turns: usize) -> Self {
        let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        Self {
            benchmark: benchmark.to_owned(),
            conditions: Conditions::read(),
            ways: owned(ways),
            references: owned(references),
            turns,
            rows: Vec::new(),
            failures: Vec::new(),
        }
    }

    /// Adds a row: for each way the quantiles of each turn that has any, with the turn's number. A row without quantiles
    /// is left out.
    pub fn add(
        &mut self,
        name: &str,
        with: &str,
        unit: Unit,
        measured: &[BTreeMap<usize, Quantiles>],
    ) {
        let by_way = || self.ways.iter().zip(measured);
        let best = |turn: &usize| {
            let references = by_way().filter(|(way, _)| self.references.contains(way));
            references
                .filter_map(|(_, turns)| Some(turns.get(turn)?.median))
                .reduce(f64::min)
        };
        let ways: BTreeMap<String, Figure> = by_way()
            .filter_map(|(way, turns)| {
                let ratios = turns.iter().filter(|_| !self.references.contains(way));
                let ratios = ratios.filter_map(|(turn, own)| Some(own.median / best(turn)?));
                let medians = || turns.values().map(|quantiles| quantiles.median);
                let p99 = turns.values().filter(|quantiles| quantiles.count > 1);
                let figure = Figure {
                    median: quantiles::median(medians().collect())?,
                    p99: quantiles::median(p99.map(|quantiles| quantiles.p99).collect()),
                    least: medians().fold(f64::INFINITY, f64::min),
                    greatest: medians().fold(0.0, f64::max),
                    ratio: quantiles::median(ratios.collect()),
                };
                Some((way.clone(), figure))
            })
            .collect();
        if ways.is_empty() {
            return;
        }
        let own = self.ways.first().and_then(|way| ways.get(way));
        self.rows.push(Row {
            name: name.to_owned(),
            with: with.to_owned(),
            unit,
            ns: own
                .filter(|_| unit == Unit::Nanoseconds)
                .map(|own| own.median),
            ratio: own.and_then(|own| own.ratio),
            ways,
        });
    }

    /// Adds a row of a benchmark with one turn: for each way its samples.
    pub fn add_once(&mut self, name: &str, with: &str, unit: Unit, samples: Vec<Vec<f64>>) {
        let once = |samples| Quantiles::of(samples).map(|quantiles| (0, quantiles));
        let measured: Vec<BTreeMap<_, _>> = samples
            .into_iter()
            .map(|samples| once(samples).into_iter().collect())
            .collect();
        self.add(name, with, unit, &measured);
    }

    /// Prints the report, and writes it to a file if one is given.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn finish(&mut self, file: Option<&Path>) -> Result<(), ReportError> {
        self.conditions.machine.load_after = conditions::load();
        println!("{}\n\n{}", self.circumstances(), self.table());
        self.save(file)
    }

    /// Takes the load of this moment, and writes the report to a file if one is given.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&mut self, file: Option<&Path>) -> Result<(), ReportError> {
        self.conditions.machine.load_after = conditions::load();
        self.save(file)
    }

    fn save(&self, file: Option<&Path>) -> Result<(), ReportError> {
        let Some(path) = file else {
            return Ok(());
        };
        let text = serde_json::to_string_pretty(self)
            .map_err(|error| ReportError::Form(path.to_owned(), error))?;
        std::fs::write(path, text + "\n").map_err(|error| ReportError::File(path.to_owned(), error))
    }

    /// Reads the figures of a file.
    ///
    /// # Errors
    /// The file cannot be read, or has another form.
    pub fn read(path: &Path) -> Result<Self, ReportError> {
        let text =
            std::fs::read(path).map_err(|error| ReportError::File(path.to_owned(), error))?;
        serde_json::from_slice(&text).map_err(|error| ReportError::Form(path.to_owned(), error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Turns of one sample each; 0 stands for a turn without any.
    fn turns(samples: &[f64]) -> BTreeMap<usize, Quantiles> {
        let turns = samples
            .iter()
            .enumerate()
            .filter(|(_, sample)| **sample != 0.0);
        let of = |sample: f64| Quantiles::of(vec![sample]).expect("a sample");
        turns.map(|(turn, sample)| (turn, of(*sample))).collect()
    }

    #[test]
    fn each_turn_is_compared_with_the_best_reference_of_the_same_turn() {
        let mut report = Report::new("calls", &["poll", "a", "b"], &["a", "b"], 3);
        let measured = [
            turns(&[10.0, 30.0, 20.0]),
            turns(&[20.0, 30.0, 80.0]),
            turns(&[40.0, 40.0, 40.0]),
        ];
        report.add("x", "", Unit::Nanoseconds, &measured);
        report.add(
            "y",
            "",
            Unit::Mebibytes,
            &[turns(&[1.0]), turns(&[0.0, 5.0]), turns(&[])],
        );
        report.add(
            "z",
            "",
            Unit::Mebibytes,
            &[turns(&[]), turns(&[]), turns(&[])],
        );
        let [x, y] = &report.rows[..] else {
            panic!("{:?}", report.rows);
        };
        assert_eq!((x.ns, x.ratio), (Some(20.0), Some(0.5)));
        let own = x.ways["poll"];
        assert_eq!((own.least, own.greatest, own.p99), (10.0, 30.0, None));
        assert_eq!(x.ways["a"].ratio, None);
        assert_eq!((y.ns, y.ratio), (None, None));
        assert_eq!(y.ways.len(), 2);
    }

    #[test]
    fn a_written_report_is_read_again() {
        let mut report = Report::new("ring", &["poll", "native"], &["native"], 1);
        report.add_once("x", "y", Unit::Nanoseconds, vec![vec![1.0, 2.0], vec![4.0]]);
        let text = serde_json::to_string(&report).expect("JSON");
        assert_eq!(
            serde_json::from_str::<Report>(&text).expect("a report"),
            report
        );
    }
}
