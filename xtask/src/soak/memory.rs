//! Memory and descriptors of the processes that live as long as the soak; they must not grow with
//! the runs.

use std::collections::BTreeMap;
use std::fmt;

use super::family::Table;

/// KiB by which a process may grow over the whole soak.
const ALLOWED: u64 = 1 << 10;
/// Number of descriptors by which a process may grow, for sessions that are ending.
const ALLOWED_DESCRIPTORS: usize = 64;

#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    resident: u64,
    descriptors: usize,
}

/// Samples of the shared launcher and its descendants, by process.
#[derive(Debug, Default)]
pub struct Memory {
    samples: BTreeMap<(i32, String), Vec<Sample>>,
    /// Number of samplings.
    taken: usize,
}

impl Memory {
    pub fn sample(&mut self, table: &Table, launcher: i32) {
        self.taken += 1;
        for process in table.family(launcher) {
            let key = (process.pid, process.name.clone());
            self.samples.entry(key).or_default().push(Sample {
                resident: process.resident(),
                descriptors: process.descriptors(),
            });
        }
    }

    /// Returns the processes that lived nearly all the time, each with its samples.
    fn lasting(&self) -> impl Iterator<Item = (String, &[Sample])> {
        let lasting = self
            .samples
            .iter()
            .filter(|(_, samples)| samples.len() * 10 >= self.taken * 9);
        lasting.map(|((pid, name), samples)| (format!("{name} {pid}"), samples.as_slice()))
    }

    /// Returns the medians of the first and the last third. The first sample is left out, because
    /// no session exists then.
    fn medians(samples: &[Sample]) -> (Sample, Sample) {
        let warm = &samples[1.min(samples.len())..];
        let third = warm.len().div_ceil(3);
        let median = |part: &[Sample]| {
            let middle = |mut numbers: Vec<u64>| {
                numbers.sort_unstable();
                numbers.get(numbers.len() / 2).copied().unwrap_or(0)
            };
            Sample {
                resident: middle(part.iter().map(|sample| sample.resident).collect()),
                descriptors: middle(
                    part.iter()
                        .map(|sample| sample.descriptors as u64)
                        .collect(),
                )
                .try_into()
                .unwrap_or(usize::MAX),
            }
        };
        (median(&warm[..third]), median(&warm[warm.len() - third..]))
    }

    /// Returns a sentence for each value that grew more than allowed.
    pub fn growth(&self) -> Vec<String> {
        let mut grown = Vec::new();
        for (name, samples) in self.lasting() {
            let (first, last) = Self::medians(samples);
            if last.resident > first.resident + ALLOWED {
                grown.push(format!(
                    "the memory of {name} grew from {} to {} KiB",
                    first.resident, last.resident
                ));
            }
            if last.descriptors > first.descriptors + ALLOWED_DESCRIPTORS {
                grown.push(format!(
                    "the descriptors of {name} grew from {} to {}",
                    first.descriptors, last.descriptors
                ));
            }
        }
        grown
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("memory=")?;
        for (index, (name, samples)) in self.lasting().enumerate() {
            let (first, last) = Self::medians(samples);
            let comma = if index == 0 { "" } else { "," };
            write!(
                f,
                "{comma}{}:{}->{}KiB,{}->{}fds",
                name.replace(' ', "-"),
                first.resident,
                last.resident,
                first.descriptors,
                last.descriptors
            )?;
        }
        Ok(())
    }
}
