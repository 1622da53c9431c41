//! Units of figures.

use serde::{Deserialize, Serialize};

/// Unit of a figure. Less is better in each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
pub enum Unit {
    #[serde(rename = "ns")]
    Nanoseconds,
    #[serde(rename = "MiB")]
    Mebibytes,
    /// Exits of a VM.
    #[serde(rename = "exits")]
    Exits,
}

impl Unit {
    /// Writes a value with three significant digits and its unit.
    pub fn text(self, value: f64) -> String {
        match self {
            Self::Nanoseconds => {
                let steps = [("s", 1e9), ("ms", 1e6), ("µs", 1e3)];
                let step = steps.into_iter().find(|(_, step)| value >= *step);
                let (unit, step) = step.unwrap_or(("ns", 1.0));
                format!("{} {unit}", digits(value / step))
            }
            Self::Mebibytes => format!("{} MiB", digits(value)),
            Self::Exits => digits(value),
        }
    }
}

/// Writes a number with three significant digits where it has a fraction.
pub fn digits(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        0.0..0.01 => format!("{value:.4}"),
        0.01..10.0 => format!("{value:.2}"),
        10.0..100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_the_unit_in_which_they_are_short() {
        let text = |value| Unit::Nanoseconds.text(value);
        assert_eq!(
            [0.5, 210.4, 8_612.0, 84_700.0, 2.5e8, 1.68e9].map(text),
            [
                "0.50 ns", "210 ns", "8.61 µs", "84.7 µs", "250 ms", "1.68 s"
            ]
        );
        assert_eq!(Unit::Exits.text(0.000_125), "0.0001");
    }
}
