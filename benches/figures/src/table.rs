//! Tables of figures, in Markdown.

use crate::unit::digits;
use crate::{Figure, Report, Row};

/// Column of a way.
#[derive(Clone, Copy, Debug)]
enum Column {
    Median,
    P99,
    Ratio,
}

impl Report {
    /// Names the conditions in a sentence.
    pub fn circumstances(&self) -> String {
        let conditions = &self.conditions;
        let machine = &conditions.machine;
        let mut words = vec![
            machine.processor.clone(),
            format!("{} processors", machine.processors),
            format!("Linux {}", machine.kernel),
        ];
        words.extend((!conditions.device.is_empty()).then(|| conditions.device.clone()));
        words.extend(
            (!conditions.driver.is_empty()).then(|| format!("driver {}", conditions.driver)),
        );
        words.push(format!(
            "load {} before and {} after",
            machine.load_before, machine.load_after
        ));
        words.push(match self.turns {
            1 => "one turn".to_owned(),
            turns => format!("{turns} turns"),
        });
        format!(
            "{}; commit {}, {}.",
            words.join(", "),
            conditions.commit,
            conditions.date
        )
    }

    /// Returns the table of all rows, without an end of the last line.
    pub fn table(&self) -> String {
        let columns: Vec<(&String, Column)> = self
            .ways
            .iter()
            .flat_map(|way| self.columns(way).map(move |column| (way, column)))
            .collect();
        let head = columns.iter().map(|(way, column)| match column {
            Column::Median => format!(" {way} |"),
            Column::P99 => " p99 |".to_owned(),
            Column::Ratio => " ratio |".to_owned(),
        });
        let mut lines = vec![
            format!("| |{}", head.collect::<String>()),
            format!("|---|{}", "---|".repeat(columns.len())),
        ];
        lines.extend(self.rows.iter().map(|row| {
            let cells = columns.iter().map(|(way, column)| {
                let figure = row.ways.get(*way);
                let text = figure.and_then(|figure| self.cell(row, figure, *column));
                format!(" {} |", text.unwrap_or_default())
            });
            format!("| {} |{}", row.title(), cells.collect::<String>())
        }));
        lines.join("\n")
    }

    /// Returns whether a row has a ratio of this way.
    pub fn has_ratio(&self, way: &str) -> bool {
        self.has(way, |figure| figure.ratio)
    }

    fn has(&self, way: &str, part: impl Fn(&Figure) -> Option<f64>) -> bool {
        let figures = self.rows.iter().filter_map(|row| row.ways.get(way));
        figures.filter_map(part).next().is_some()
    }

    /// Returns the columns of a way that are not empty, and that of its medians.
    fn columns(&self, way: &str) -> impl Iterator<Item = Column> {
        let p99 = self.has(way, |figure| figure.p99).then_some(Column::P99);
        let ratio = self.has_ratio(way).then_some(Column::Ratio);
        std::iter::once(Column::Median).chain(p99).chain(ratio)
    }

    fn cell(&self, row: &Row, figure: &Figure, column: Column) -> Option<String> {
        match column {
            Column::Median => Some(self.median(row, figure)),
            Column::P99 => figure.p99.map(|p99| row.unit.text(p99)),
            Column::Ratio => figure.ratio.map(digits),
        }
    }

    /// Writes a median, with the least and the greatest one of a turn.
    fn median(&self, row: &Row, figure: &Figure) -> String {
        let text = row.unit.text(figure.median);
        match self.turns {
            1 => text,
            _ => {
                let [least, greatest] =
                    [figure.least, figure.greatest].map(|value| row.unit.text(value));
                // The unit stands once where both have the same.
                let (number, unit) = least.split_once(' ').unwrap_or((&least, ""));
                let is_same = greatest.ends_with(&format!(" {unit}"));
                let least = if is_same { number } else { &least };
                format!("{text} [{least}–{greatest}]")
            }
        }
    }
}

impl Row {
    /// Returns the name, with the circumstances behind it.
    pub fn title(&self) -> String {
        match &*self.with {
            "" => self.name.clone(),
            with => format!("{} ({with})", self.name),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use crate::{Quantiles, Report, Unit};

    #[test]
    fn columns_that_would_be_empty_are_left_out() {
        let mut report = Report::new("x", &["poll", "socket", "native"], &["native"], 2);
        let turns = |samples: [f64; 2]| {
            let turns = samples.into_iter().enumerate();
            turns
                .filter_map(|(turn, sample)| Some((turn, Quantiles::of(vec![sample])?)))
                .collect()
        };
        let measured = [turns([80.0, 120.0]), BTreeMap::new(), turns([900.0, 1e3])];
        report.add("f", "again", Unit::Nanoseconds, &measured);
        assert_eq!(
            report.table(),
            "| | poll | ratio | socket | native |\n|---|---|---|---|---|\n\
            | f (again) | 120 ns [80.0–120 ns] | 0.12 |  | 1.00 µs [900 ns–1.00 µs] |"
        );
    }
}
