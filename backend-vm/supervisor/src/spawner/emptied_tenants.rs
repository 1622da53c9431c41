//! Tenants without processes, until their memory is free.
//!
//! Nothing reports that a page is free: `cgroup.events` and pidfds tell of processes alone, and these have ended. So each
//! tenant is checked after an eighth of the time that it has waited. One that keeps its memory for long costs little, and
//! its place is free at most an eighth later than its memory.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Shortest time until a tenant is checked again: a check takes less than a millisecond.
const SOON: Duration = Duration::from_millis(20);
/// Longest time until then.
const LATE: Duration = Duration::from_secs(10);
/// Part of the time that a tenant has waited.
const PART: u32 = 8;

/// Tenants by the time of their next check, with the time since which no process of theirs has run.
#[derive(Debug, Default)]
pub struct EmptiedTenants {
    tenants: BTreeMap<(Instant, u32), Instant>,
}

impl EmptiedTenants {
    /// Adds a tenant whose processes had ended at `ended`, and which has memory left `now`.
    pub fn add(&mut self, tenant: u32, ended: Instant, now: Instant) {
        let waited = now.saturating_duration_since(ended);
        let next = now + (waited / PART).clamp(SOON, LATE);
        self.tenants.insert((next, tenant), ended);
    }

    /// Removes a tenant that is to be checked, and returns it with the time since which no process of it has run.
    pub fn take_due(&mut self, now: Instant) -> Option<(u32, Instant)> {
        let first = self.tenants.first_entry()?;
        let (next, tenant) = *first.key();
        (next <= now).then(|| (tenant, first.remove()))
    }

    /// Returns the time of the next check.
    pub fn next(&self) -> Option<Instant> {
        self.tenants.keys().next().map(|(next, _)| *next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_is_checked_an_eighth_late_at_most_and_seldom_if_it_waits_for_long() {
        let ended = Instant::now();
        let mut emptied = EmptiedTenants::default();
        emptied.add(7, ended, ended);
        assert_eq!(emptied.take_due(ended), None);
        let (mut checks, mut before) = (0, ended);
        while let Some(next) = emptied.next().filter(|next| *next - ended < LATE * 360) {
            let waited = before - ended;
            assert!(next - before <= (waited / 8).max(SOON), "{waited:?}");
            assert_eq!(emptied.take_due(next), Some((7, ended)));
            emptied.add(7, ended, next);
            (checks, before) = (checks + 1, next);
        }
        assert!((360..450).contains(&checks), "{checks} in an hour");
    }

    #[test]
    fn tenants_that_wait_are_checked_in_the_order_of_their_times() {
        let now = Instant::now();
        let mut emptied = EmptiedTenants::default();
        emptied.add(1, now, now + LATE);
        emptied.add(2, now, now);
        emptied.add(3, now + LATE, now + LATE);
        let later = now + LATE * 2;
        let order: Vec<u32> = std::iter::from_fn(|| emptied.take_due(later))
            .map(|(tenant, _)| tenant)
            .collect();
        assert_eq!(order, [2, 3, 1]);
        assert_eq!(emptied.next(), None);
    }
}
