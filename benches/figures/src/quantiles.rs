//! Summarises samples.

/// Median and 99th percentile of samples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Quantiles {
    pub median: f64,
    pub p99: f64,
    pub count: usize,
}

impl Quantiles {
    /// Returns the quantiles of samples; `None` if there are none.
    pub fn of(mut samples: Vec<f64>) -> Option<Self> {
        samples.sort_unstable_by(f64::total_cmp);
        let at = |hundredths: usize| samples.get(samples.len() * hundredths / 100);
        Some(Self {
            median: *at(50)?,
            p99: *at(99)?,
            count: samples.len(),
        })
    }
}

/// Returns the median of values; `None` if there are none.
pub(crate) fn median(values: Vec<f64>) -> Option<f64> {
    Quantiles::of(values).map(|quantiles| quantiles.median)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_sorted_samples() {
        let found = Quantiles::of((0..1000).rev().map(f64::from).collect());
        let (median, p99, count) = (500.0, 990.0, 1000);
        assert_eq!(found, Some(Quantiles { median, p99, count }));
        assert_eq!(Quantiles::of(Vec::new()), None);
    }
}
