//! Measured costs of launches, in chains and single.

use std::time::Duration;

use super::LONGEST;

/// Lengths of parts: powers of two up to the longest.
const LENGTHS: usize = LONGEST.ilog2() as usize + 1;
/// One collection in so many is measured.
const MEASURED: u32 = 16;
/// Weight of a new measurement, as a part of the whole.
const WEIGHT: u64 = 8;
/// Collections of a length that go otherwise before chains of that length are tried anew.
const PAUSE: u32 = 1024;

/// Mean time of the executor for a launch, in ns; 0 if none was measured.
#[derive(Debug, Default)]
pub(super) struct Costs {
    means: [u64; LENGTHS],
    collections: u32,
    single: u32,
}

impl Costs {
    /// Counts a collection. Returns whether it is measured.
    #[inline]
    pub fn is_due(&mut self) -> bool {
        self.collections = self.collections.wrapping_add(1);
        self.collections.is_multiple_of(MEASURED)
    }

    /// Notes the time of a part of so many launches.
    pub fn note(&mut self, length: usize, time: Duration) {
        let each = (time.as_nanos() / length as u128)
            .try_into()
            .unwrap_or(u64::MAX);
        let mean = &mut self.means[place(length)];
        *mean = match *mean {
            0 => each,
            // A measurement during which the thread was put aside says little.
            old => old - old / WEIGHT + each.min(4 * old) / WEIGHT,
        };
    }

    /// Returns whether chains of this length are cheaper than single launches, or not measured yet.
    #[inline]
    pub fn pay_off(&mut self, length: usize) -> bool {
        let (single, chained) = (self.means[0], self.means[place(length)]);
        if single == 0 || chained <= single {
            return true;
        }
        self.single += 1;
        if self.single == PAUSE {
            self.single = 0;
            self.means[place(length)] = 0;
        }
        false
    }
}

fn place(length: usize) -> usize {
    length.ilog2() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_that_cost_more_than_single_launches_are_tried_again_later() {
        let mut costs = Costs::default();
        assert!(costs.pay_off(16), "nothing is known");
        costs.note(16, Duration::from_nanos(16 * 500));
        costs.note(1, Duration::from_nanos(4000));
        assert!(costs.pay_off(16));
        for _ in 0..100 {
            costs.note(16, Duration::from_nanos(16 * 9000));
        }
        let refused = (0..PAUSE).filter(|_| !costs.pay_off(16)).count();
        assert_eq!(refused, PAUSE as usize);
        assert!(costs.pay_off(16), "another try");
        assert!(costs.pay_off(2), "another length");
    }

    #[test]
    fn one_collection_in_some_is_measured_and_an_outlier_counts_little() {
        let mut costs = Costs::default();
        let due = (0..10 * MEASURED).filter(|_| costs.is_due()).count();
        assert_eq!(due, 10);
        costs.note(1, Duration::from_micros(4));
        costs.note(8, Duration::from_micros(8));
        costs.note(8, Duration::from_secs(1));
        assert!(costs.pay_off(8));
    }
}
