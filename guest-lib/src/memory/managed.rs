//! Managed memory: what a program has advised, and where it has prefetched.
//!
//! Managed memory lies in the arena and stays there: host and device reach it at the same time, so nothing
//! migrates. What the program says of a range is kept for the questions about it.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::{CuError, Result};
use crate::memory::memory_map;

/// Advice is kept by the page.
const PAGE: u64 = 4096;
/// `CU_DEVICE_INVALID` and `CU_DEVICE_CPU`.
pub const DEVICE_INVALID: i32 = -2;
pub const DEVICE_CPU: i32 = -1;

/// A place for memory, as a `CUmemLocation` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Location {
    Device(i32),
    Host,
    HostNuma(i32),
    HostNumaCurrent,
}

/// What the program said of a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Advice {
    pub read_mostly: bool,
    pub preferred: Option<Location>,
    /// Devices that it is mapped for, a bit each.
    devices: u64,
    /// The same of the host.
    host: bool,
    pub prefetched: Option<Location>,
}

impl Advice {
    /// Notes who accesses the memory, or no longer does.
    pub fn set_accessed_by(&mut self, location: Location, accessed: bool) {
        match location {
            Location::Device(ordinal) => {
                let bit = u32::try_from(ordinal)
                    .ok()
                    .and_then(|ordinal| 1_u64.checked_shl(ordinal));
                let bit = bit.unwrap_or(0);
                if accessed {
                    self.devices |= bit;
                } else {
                    self.devices &= !bit;
                }
            }
            _ => self.host = accessed,
        }
    }
}

/// The pages of one allocation: runs of equal advice, each with the offset where it ends, without gaps.
#[derive(Debug)]
struct Runs(Vec<(u64, Advice)>);

impl Runs {
    fn new(bytes: u64) -> Self {
        Self(vec![(bytes.next_multiple_of(PAGE), Advice::default())])
    }

    /// Makes a run end at `offset`.
    fn split(&mut self, offset: u64) {
        if offset == 0 {
            return;
        }
        let index = self.0.partition_point(|(end, _)| *end < offset);
        if let Some(&(end, advice)) = self.0.get(index)
            && end != offset
        {
            self.0.insert(index, (offset, advice));
        }
    }

    /// The runs that reach into `start..end`.
    fn within(&self, start: u64, end: u64) -> &[(u64, Advice)] {
        let first = self.0.partition_point(|(run_end, _)| *run_end <= start);
        let last = self.0.partition_point(|(run_end, _)| *run_end < end);
        &self.0[first..=last.min(self.0.len() - 1)]
    }

    fn change(&mut self, start: u64, end: u64, change: impl Fn(&mut Advice)) {
        self.split(start);
        self.split(end);
        let mut before = 0;
        for (run_end, advice) in &mut self.0 {
            if before >= start && *run_end <= end {
                change(advice);
            }
            before = *run_end;
        }
        self.0.dedup_by(|later, earlier| {
            let same = later.1 == earlier.1;
            if same {
                earlier.0 = later.0;
            }
            same
        });
    }
}

/// By the start of the allocation; one without advice is not there.
static ADVICE: Mutex<BTreeMap<u64, Runs>> = Mutex::new(BTreeMap::new());

fn advice() -> MutexGuard<'static, BTreeMap<u64, Runs>> {
    ADVICE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A range of managed memory, in whole pages.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    base: u64,
    bytes: u64,
    start: u64,
    end: u64,
}

impl Range {
    /// The pages that `bytes` bytes at `address` lie in, which must be of one managed allocation.
    pub fn of(address: u64, bytes: u64) -> Result<Self> {
        let allocation = memory_map()
            .find(address)
            .filter(|allocation| allocation.is_managed() && bytes > 0)
            .filter(|allocation| allocation.holds(address, bytes))
            .ok_or(CuError::INVALID_VALUE)?;
        let offset = address - allocation.base;
        Ok(Self {
            base: allocation.base,
            bytes: allocation.bytes,
            start: offset / PAGE * PAGE,
            end: (offset + bytes).next_multiple_of(PAGE),
        })
    }

    /// Changes what is said of each page.
    pub fn change(self, change: impl Fn(&mut Advice)) {
        advice()
            .entry(self.base)
            .or_insert_with(|| Runs::new(self.bytes))
            .change(self.start, self.end, change);
    }

    /// What all pages have in common; `None` where they differ.
    fn common<T: PartialEq>(self, of: impl Fn(&Advice) -> T) -> Option<T> {
        let advice = advice();
        let Some(runs) = advice.get(&self.base) else {
            return Some(of(&Advice::default()));
        };
        let mut values = runs
            .within(self.start, self.end)
            .iter()
            .map(|(_, advice)| of(advice));
        let first = values.next()?;
        values.all(|value| value == first).then_some(first)
    }

    pub fn is_read_mostly(self) -> bool {
        self.common(|advice| advice.read_mostly) == Some(true)
    }

    pub fn preferred(self) -> Option<Location> {
        self.common(|advice| advice.preferred).flatten()
    }

    pub fn prefetched(self) -> Option<Location> {
        self.common(|advice| advice.prefetched).flatten()
    }

    /// Who is said to access every page: the devices by ordinal, then the host.
    pub fn accessed_by(self) -> impl Iterator<Item = i32> {
        let advice = advice();
        let (devices, host) = match advice.get(&self.base) {
            None => (0, false),
            Some(runs) => runs
                .within(self.start, self.end)
                .iter()
                .fold((u64::MAX, true), |(devices, host), (_, advice)| {
                    (devices & advice.devices, host && advice.host)
                }),
        };
        (0..64)
            .filter(move |ordinal| devices >> ordinal & 1 == 1)
            .chain(host.then_some(DEVICE_CPU))
    }
}

/// The allocation is freed.
pub fn forget(base: u64) {
    advice().remove(&base);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn runs_say_of_each_page_what_was_said_of_it(
            changes in prop::collection::vec((0_usize..16, 1_usize..16, any::<bool>()), 0..20),
        ) {
            let mut runs = Runs::new(16 * PAGE - 5);
            let mut pages = [false; 16];
            for (first, count, value) in changes {
                let end = (first + count).min(16);
                pages[first..end].fill(value);
                let [start, stop] = [first, end].map(|page| page as u64 * PAGE);
                runs.change(start, stop, |advice| advice.read_mostly = value);
            }
            for (page, expected) in pages.iter().enumerate() {
                let start = page as u64 * PAGE;
                let found = runs.within(start, start + PAGE);
                prop_assert_eq!(found.len(), 1);
                prop_assert_eq!(found[0].1.read_mostly, *expected);
            }
            prop_assert!(runs.0.windows(2).all(|pair| pair[0].1 != pair[1].1 && pair[0].0 < pair[1].0));
            prop_assert_eq!(runs.0.last().unwrap().0, 16 * PAGE);
        }
    }

    #[test]
    fn a_location_takes_only_its_own_access_away() {
        let mut advice = Advice::default();
        advice.set_accessed_by(Location::Device(0), true);
        advice.set_accessed_by(Location::Device(2), true);
        advice.set_accessed_by(Location::Host, true);
        advice.set_accessed_by(Location::Device(0), false);
        assert_eq!((advice.devices, advice.host), (4, true));
        advice.set_accessed_by(Location::Device(64), true);
        assert_eq!(advice.devices, 4, "no such device");
    }
}
