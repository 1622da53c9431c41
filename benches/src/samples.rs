//! Summarises durations as quantiles.

use serde::Serialize;

/// Median and 99th percentile of durations in nanoseconds.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Quantiles {
    pub median_ns: f64,
    pub p99_ns: f64,
    pub count: usize,
}

impl Quantiles {
    /// Computes the quantiles of time stamp differences. `period` is the nanoseconds of one step, and each difference
    /// covers `parts` operations.
    pub fn of(mut stamps: Vec<u64>, period: f64, parts: f64) -> Self {
        stamps.sort_unstable();
        let at = |hundredths: usize| {
            stamps.get((stamps.len() * hundredths / 100).min(stamps.len().saturating_sub(1)))
        };
        #[expect(clippy::cast_precision_loss, reason = "durations far below 2^52")]
        let nanoseconds =
            |stamp: Option<&u64>| stamp.map_or(f64::NAN, |stamp| *stamp as f64 * period / parts);
        Self {
            median_ns: nanoseconds(at(50)),
            p99_ns: nanoseconds(at(99)),
            count: stamps.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_sorted_durations() {
        let found = Quantiles::of((0..1000).rev().collect(), 2.0, 4.0);
        assert!((found.median_ns - 250.0).abs() < f64::EPSILON);
        assert!((found.p99_ns - 495.0).abs() < f64::EPSILON);
        assert_eq!(found.count, 1000);
    }
}
