//! Tables of text for people.

use std::fmt::Write as _;

/// A column. The last column of a table is never padded.
#[derive(Clone, Copy, Debug)]
pub enum Column {
    Text(&'static str),
    Number(&'static str),
}

impl Column {
    fn name(self) -> &'static str {
        match self {
            Self::Text(name) | Self::Number(name) => name,
        }
    }
}

/// Formats rows below the columns' names. Each line ends with a newline.
pub fn format<const N: usize>(columns: [Column; N], rows: &[[String; N]]) -> String {
    let widths: [usize; N] = std::array::from_fn(|at| {
        let cells = rows.iter().map(|row| row[at].chars().count());
        cells.fold(columns[at].name().len(), usize::max)
    });
    let mut text = String::new();
    let names = columns.map(|column| column.name().to_owned());
    for row in std::iter::once(&names).chain(rows) {
        let mut line = String::new();
        for ((cell, column), width) in row.iter().zip(columns).zip(widths) {
            let _ = match column {
                Column::Text(_) => write!(line, "{cell:<width$}  "),
                Column::Number(_) => write!(line, "{cell:>width$}  "),
            };
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Formats a number of bytes with at most one decimal, in powers of 1024.
pub fn bytes(count: u64) -> String {
    let units = ["", "K", "M", "G", "T", "P", "E"];
    let exponent = count.checked_ilog2().unwrap_or(0) / 10;
    if exponent == 0 {
        return count.to_string();
    }
    let unit = 1u64 << (10 * exponent);
    let (whole, tenths) = (
        count / unit,
        u128::from(count % unit) * 10 / u128::from(unit),
    );
    let suffix = units[exponent as usize];
    match tenths {
        0 => format!("{whole}{suffix}"),
        _ => format!("{whole}.{tenths}{suffix}"),
    }
}

/// Formats nanoseconds that may be unknown, rounded up to a whole number of the largest unit below them.
pub fn time(nanoseconds: Option<u64>) -> String {
    let Some(nanoseconds) = nanoseconds else {
        return "-".to_owned();
    };
    let units = [(1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us")];
    let unit = units.into_iter().find(|(unit, _)| nanoseconds >= *unit);
    let (unit, name) = unit.unwrap_or((1, "ns"));
    format!("{}{name}", nanoseconds.div_ceil(unit))
}

/// Formats a number that may be unknown.
pub fn number(count: Option<u64>) -> String {
    count.map_or_else(|| "-".to_owned(), |count| count.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_aligned_to_the_right_and_lines_have_no_spaces_at_their_end() {
        let columns = [
            Column::Text("NAME"),
            Column::Number("COUNT"),
            Column::Text("STATE"),
        ];
        let row = |name: &str, count: &str, state: &str| [name, count, state].map(str::to_owned);
        let rows = [row("a longer name", "7", "up"), row("b", "123456", "")];
        let lines = [
            "NAME            COUNT  STATE",
            "a longer name       7  up",
            "b              123456",
            "",
        ];
        assert_eq!(format(columns, &rows), lines.join("\n"));
    }

    #[test]
    fn bytes_have_a_unit_and_no_more_digits_than_people_need() {
        for (count, text) in [
            (0, "0"),
            (1023, "1023"),
            (1024, "1K"),
            (1536, "1.5K"),
            ((1 << 20) - 1, "1023.9K"),
            (12 << 20, "12M"),
            (3 << 40, "3T"),
            (u64::MAX, "15.9E"),
        ] {
            assert_eq!(bytes(count), text);
        }
        assert_eq!((number(None), number(Some(7))), ("-".into(), "7".into()));
    }
}
