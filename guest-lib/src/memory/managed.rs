//! Managed memory: advice and prefetches of the program.
//!
//! Advice for a range is stored for `cuMemRangeGetAttribute`. [`residence`](super::residence) decides where the memory
//! lies, and uses of the advice what a program says about whole allocations.

use std::collections::BTreeMap;

use wormhole_lock::{Mutex, MutexGuard};

use wormhole_api::constants::device_ordinal::CPU;

use crate::error::{CuError, Result};
use crate::memory::memory_map;
use crate::pages::PAGE;

/// Location of memory, as a `CUmemLocation` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Location {
    Device(i32),
    Host,
    HostNuma(i32),
    HostNumaCurrent,
}

/// Advice for a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Advice {
    pub read_mostly: bool,
    pub preferred: Option<Location>,
    /// Bit mask of the devices that are advised to access the page.
    devices: u64,
    /// True if the host is advised to access the page.
    host: bool,
    pub prefetched: Option<Location>,
}

impl Advice {
    /// Sets whether a location accesses the memory.
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

/// Advice for one allocation: runs of pages with equal advice, each with the offset of its end, without gaps.
#[derive(Debug)]
struct Runs(Vec<(u64, Advice)>);

impl Runs {
    fn new(bytes: u64) -> Self {
        Self(vec![(bytes.next_multiple_of(PAGE), Advice::default())])
    }

    /// Splits the run that contains `offset`, so that a run ends there.
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

    /// Returns the runs that overlap `start..end`.
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

/// Advice by the start of the allocation. Allocations without advice have no entry.
static ADVICE: Mutex<BTreeMap<u64, Runs>> = Mutex::new(BTreeMap::new());

fn advice() -> MutexGuard<'static, BTreeMap<u64, Runs>> {
    ADVICE.lock()
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
    /// Returns the pages that contain `bytes` bytes at `address`. The bytes must lie in one managed allocation.
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

    /// Returns the start of the allocation.
    pub fn base(self) -> u64 {
        self.base
    }

    /// Returns the whole allocation.
    pub fn whole(self) -> Self {
        Self {
            start: 0,
            end: self.bytes.next_multiple_of(PAGE),
            ..self
        }
    }

    /// Changes the advice for each page.
    pub fn change(self, change: impl Fn(&mut Advice)) {
        advice()
            .entry(self.base)
            .or_insert_with(|| Runs::new(self.bytes))
            .change(self.start, self.end, change);
    }

    /// Returns a value that is equal for all pages; `None` if they differ.
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

    /// Returns the locations that are advised to access every page: the devices by ordinal, then the host.
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
            .chain(host.then_some(CPU))
    }
}

/// Removes the advice for a freed allocation.
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
