//! Tables of figures, in Markdown.

use crate::unit::digits;
use crate::{Figure, Report, Row};

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
        let is_reference = |way: &String| self.references.contains(way);
        let head = |way: &String| match self.has_ratio(way) {
            true => format!(" {way} | p99 | ratio |"),
            false => format!(" {way} | p99 |"),
        };
        let mut lines = vec![
            format!("| |{}", self.ways.iter().map(head).collect::<String>()),
            format!("|{}", "---|".repeat(head_columns(self))),
        ];
        debug_assert!(!self.ways.iter().all(is_reference));
        lines.extend(self.rows.iter().map(|row| self.line(row)));
        lines.join("\n")
    }

    /// Returns whether a row has a ratio of this way.
    pub fn has_ratio(&self, way: &str) -> bool {
        let ratio = |row: &Row| row.ways.get(way)?.ratio;
        self.rows.iter().any(|row| ratio(row).is_some())
    }

    fn line(&self, row: &Row) -> String {
        let cells = self.ways.iter().map(|way| {
            let figure = row.ways.get(way);
            let mut cells = vec![
                figure.map(|figure| self.median(row, figure)),
                figure
                    .and_then(|figure| figure.p99)
                    .map(|p99| row.unit.text(p99)),
            ];
            if self.has_ratio(way) {
                cells.push(figure.and_then(|figure| figure.ratio).map(digits));
            }
            let cells = cells.into_iter().map(Option::unwrap_or_default);
            cells.map(|cell| format!(" {cell} |")).collect::<String>()
        });
        format!("| {} |{}", row.title(), cells.collect::<String>())
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

fn head_columns(report: &Report) -> usize {
    let columns = report
        .ways
        .iter()
        .map(|way| 2 + usize::from(report.has_ratio(way)));
    1 + columns.sum::<usize>()
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
