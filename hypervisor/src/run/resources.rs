//! Parts of this machine that a guest takes for itself: processors, and memory in advance.

use std::str::FromStr;

use rustix::thread::{CpuSet, sched_getaffinity};
use wormhole_monitor::{DisabledExits, VmError};

use crate::say;

/// Processors of this machine as given by `--pin`, one for each of the guest's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Processors(pub Vec<usize>);

impl FromStr for Processors {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || "write processors as numbers and ranges, such as 1 or 2-3,6".to_owned();
        let mut all = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |text: &str| text.parse().ok().filter(|_| !text.starts_with('+'));
            let (first, last): (usize, usize) =
                number(first).zip(number(last)).ok_or_else(wrong)?;
            if first > last {
                return Err(wrong());
            }
            if last - first >= CpuSet::MAX_CPU || all.len() >= CpuSet::MAX_CPU {
                return Err(format!(
                    "at most {} processors are possible",
                    CpuSet::MAX_CPU
                ));
            }
            all.extend(first..=last);
        }
        Ok(Self(all))
    }
}

/// Reason why a guest cannot take a part of this machine.
#[derive(Debug, thiserror::Error)]
pub enum ResourcesError {
    #[error(
        "--pin names {pins} processors for a guest with {cpus}: name one for each, or set --cpus to {pins}"
    )]
    Count { pins: usize, cpus: usize },
    #[error("--pin names processor {0} twice: each processor of the guest needs one of its own")]
    Twice(usize),
    #[error(
        "--pin names processor {processor}, and this process may run on {allowed} only: name those"
    )]
    Absent { processor: usize, allowed: String },
    #[error(
        "--dedicated would leave no processor for the backend: pin fewer, or leave --dedicated out"
    )]
    NoneSpare,
    #[error(
        "--pin needs a guest on this machine's KVM, since QEMU emulates the processors of the emulated host{}: \
         leave it out",
        .0.as_ref().map(|why| format!(" ({why})")).unwrap_or_default()
    )]
    Emulated(Option<String>),
    #[error(
        "--prefault needs {needed} MiB for the guest, and this machine has {available} MiB available: give the guest \
         less with --memory, or leave --prefault out"
    )]
    Memory { needed: u64, available: u64 },
    #[error("cannot find out on which processors this process may run")]
    Affinity(#[source] rustix::io::Errno),
}

impl ResourcesError {
    /// Returns the names of the options that the error is about.
    pub fn options(&self) -> Vec<&'static str> {
        match self {
            Self::Count { .. } => vec!["pin", "cpus"],
            Self::NoneSpare => vec!["dedicated", "pin"],
            Self::Memory { .. } => vec!["prefault", "memory"],
            Self::Twice(_) | Self::Absent { .. } | Self::Emulated(_) | Self::Affinity(_) => {
                vec!["pin"]
            }
        }
    }
}

/// Checks the processors of `--pin` for a guest with `cpus` processors. `needs_another` is whether a backend of the run's
/// own has to run beside a guest that never leaves its processors.
pub fn check_processors(
    pins: &Processors,
    cpus: usize,
    needs_another: bool,
) -> Result<(), ResourcesError> {
    let allowed = sched_getaffinity(None).map_err(ResourcesError::Affinity)?;
    let allowed: Vec<usize> = (0..CpuSet::MAX_CPU)
        .filter(|&processor| allowed.is_set(processor))
        .collect();
    check_among(&pins.0, cpus, needs_another, &allowed)
}

/// Checks as [`check_processors`] does, where the process may run on `allowed`.
fn check_among(
    pins: &[usize],
    cpus: usize,
    needs_another: bool,
    allowed: &[usize],
) -> Result<(), ResourcesError> {
    let mut sorted = pins.to_vec();
    sorted.sort_unstable();
    if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(ResourcesError::Twice(pair[0]));
    }
    if let Some(&processor) = pins.iter().find(|pin| !allowed.contains(pin)) {
        return Err(ResourcesError::Absent {
            processor,
            allowed: list(allowed),
        });
    }
    if pins.len() != cpus {
        return Err(ResourcesError::Count {
            pins: pins.len(),
            cpus,
        });
    }
    // All are different and allowed.
    if needs_another && pins.len() == allowed.len() {
        return Err(ResourcesError::NoneSpare);
    }
    Ok(())
}

/// Formats ascending numbers as `--pin` reads them.
fn list(numbers: &[usize]) -> String {
    let runs = numbers.chunk_by(|one, next| one + 1 == *next);
    let runs = runs.map(|run| match run {
        [first, .., last] => format!("{first}-{last}"),
        _ => run.iter().map(ToString::to_string).collect(),
    });
    runs.collect::<Vec<_>>().join(",")
}

/// Checks that this machine has `bytes` of memory for a guest in advance.
pub fn check_memory(bytes: u64) -> Result<(), ResourcesError> {
    match (bytes >> 20, mib("MemAvailable:")) {
        (needed, Some(available)) if needed > available => {
            Err(ResourcesError::Memory { needed, available })
        }
        _ => Ok(()),
    }
}

/// Returns this machine's bytes of memory.
pub fn memory() -> Option<u64> {
    Some(mib("MemTotal:")? << 20)
}

/// Returns a number of `/proc/meminfo` in MiB.
fn mib(name: &str) -> Option<u64> {
    mib_in(&std::fs::read_to_string("/proc/meminfo").ok()?, name)
}

fn mib_in(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    Some(kib >> 10)
}

/// Returns the exits to disable for `--dedicated`: those that this machine's KVM can disable. A line names the others.
pub fn disabled_exits(dedicated: bool) -> Result<DisabledExits, VmError> {
    if !dedicated {
        return Ok(DisabledExits::default());
    }
    let offered = DisabledExits::offered()?;
    if let Some(lacking) = lacking(offered) {
        say::line(format_args!(
            "this machine's KVM cannot disable exits on {lacking}, so a processor of the guest still leaves it there"
        ));
    }
    Ok(offered)
}

/// Names the instructions whose exits KVM cannot disable.
fn lacking(offered: DisabledExits) -> Option<&'static str> {
    match (offered.pause, offered.halt) {
        (true, true) => None,
        (false, true) => Some("PAUSE"),
        (true, false) => Some("HLT"),
        (false, false) => Some("PAUSE and HLT"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_numbers_and_ranges() {
        let parsed = |text: &str| text.parse::<Processors>().map(|parsed| parsed.0);
        assert_eq!(parsed("3"), Ok(vec![3]));
        assert_eq!(parsed("2-4,0,7-7"), Ok(vec![2, 3, 4, 0, 7]));
        for wrong in [
            "", ",", "1,", "3-2", "-1", "1-", "+1", "1--2", "a", "1 2", "0x1",
        ] {
            let error = parsed(wrong).expect_err(wrong);
            assert!(error.starts_with("write processors"), "{wrong}: {error}");
        }
        let long = ["0-1023"; 3].join(",");
        for many in ["0-18446744073709551615", "5-1029", &long] {
            let error = parsed(many).expect_err(many);
            assert!(error.starts_with("at most 1024"), "{many}: {error}");
        }
    }

    #[test]
    fn a_guest_gets_only_processors_that_are_there_each_once() {
        let said = |pins: &[usize], cpus, dedicated| {
            let checked = check_among(pins, cpus, dedicated, &[0, 1, 4, 6, 7, 8]);
            checked.err().map(|error| error.to_string())
        };
        assert_eq!(said(&[8, 0], 2, true), None);
        assert_eq!(said(&[0, 1, 4, 6, 7, 8], 6, false), None);
        for (pins, cpus, dedicated, words) in [
            (&[0, 1][..], 1, false, "2 processors for a guest with 1"),
            (&[0], 2, false, "1 processors for a guest with 2"),
            (&[4, 0, 4], 3, false, "processor 4 twice"),
            (
                &[0, 5],
                2,
                false,
                "processor 5, and this process may run on 0-1,4,6-8",
            ),
            (
                &[usize::MAX],
                1,
                false,
                "processor 18446744073709551615, and",
            ),
            (&[0, 1, 4, 6, 7, 8], 6, true, "no processor for the backend"),
        ] {
            let error = said(pins, cpus, dedicated).expect("refused");
            assert!(error.contains(words), "{pins:?}: {error}");
        }
    }

    #[test]
    fn numbers_are_read_from_the_kernels_text() {
        let text = "MemTotal:       24683656 kB\nMemAvailable:   23060416 kB\nBuffers: 1 kB\n";
        assert_eq!(mib_in(text, "MemAvailable:"), Some(22519));
        assert_eq!(mib_in(text, "MemTotal:"), Some(24105));
        for other in ["", "MemAvailable:", "MemAvailable: x kB", "MemAvailable: 5"] {
            assert_eq!(mib_in(other, "MemAvailable:"), None, "{other}");
        }
        assert!(check_memory(1 << 20).is_ok());
        assert!(matches!(
            check_memory(1 << 60),
            Err(ResourcesError::Memory { needed, .. }) if needed == 1 << 40
        ));
    }

    #[test]
    fn exits_that_stay_are_named() {
        let offered = |pause, halt| lacking(DisabledExits { pause, halt });
        assert_eq!(offered(true, true), None);
        assert_eq!(offered(true, false), Some("HLT"));
        assert_eq!(offered(false, true), Some("PAUSE"));
        assert_eq!(offered(false, false), Some("PAUSE and HLT"));
    }
}
