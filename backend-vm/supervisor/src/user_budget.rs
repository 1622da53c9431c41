//! Budget of the logs of the processes that serve one user's tenants: bytes that all share, and a part for each tenant that
//! is left when the others have spent those.
//!
//! A user who attaches again and again gets no further parts: a new tenant takes over that of one which is gone, as far as
//! it is spent.

use std::collections::BTreeMap;
use std::time::Instant;
use wormhole_link::log_budget::{LogBudget, Verdict};

use super::Id;

/// Budget of one user.
#[derive(Debug)]
pub struct UserBudget {
    shared: LogBudget,
    /// Parts by their tenants. Some of these are gone.
    parts: BTreeMap<Id, LogBudget>,
}

/// The part of it that one tenant may spend.
#[derive(Debug)]
pub struct TenantBudget<'a> {
    shared: &'a mut LogBudget,
    part: &'a mut LogBudget,
}

impl UserBudget {
    pub fn new(now: Instant) -> Self {
        Self {
            shared: LogBudget::of_processes(now),
            parts: BTreeMap::new(),
        }
    }

    /// Returns the numbers of lines left out since one was logged, by tenant.
    pub fn left_out(self) -> impl Iterator<Item = (Id, u64)> {
        let parts = self.parts.into_iter();
        parts.map(|(tenant, mut part)| (tenant, part.take_left_out()))
    }

    /// Returns the budget of a tenant. `most` is the largest number of the user's tenants, and `is_there` whether one is not
    /// gone.
    pub fn of(
        &mut self,
        tenant: Id,
        most: usize,
        now: Instant,
        is_there: impl Fn(Id) -> bool,
    ) -> TenantBudget<'_> {
        if !self.parts.contains_key(&tenant) && self.parts.len() >= most {
            let gone = self.parts.iter_mut().filter(|(id, _)| !is_there(**id));
            let fullest = gone.map(|(id, part)| (part.left(now), *id)).max();
            if let Some((_, id)) = fullest
                && let Some(mut part) = self.parts.remove(&id)
            {
                part.take_left_out();
                self.parts.insert(tenant, part);
            }
        }
        let part = self.parts.entry(tenant);
        TenantBudget {
            shared: &mut self.shared,
            part: part.or_insert_with(|| LogBudget::of_process(now)),
        }
    }
}

impl TenantBudget<'_> {
    /// Spends the bytes of a line.
    pub fn spend(&mut self, bytes: u32, now: Instant) -> Verdict {
        if self.shared.spend_all(bytes, now) == Verdict::Drop {
            return self.part.spend_all(bytes, now);
        }
        match self.take_left_out() {
            0 => Verdict::Log,
            count => Verdict::After(count),
        }
    }

    /// Returns the number of the tenant's lines left out since one was logged, and begins anew.
    pub fn take_left_out(&mut self) -> u64 {
        self.part.take_left_out()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const LINE: u32 = LogBudget::LEAST_LINE;
    const MOST: usize = 64;

    /// Spends a tenant's lines until one is left out. Returns the number of lines in the log, with notes.
    fn write(user: &mut UserBudget, tenant: Id, now: Instant, first: Id) -> usize {
        let mut budget = user.of(tenant, MOST, now, |id| id >= first);
        let mut lines = 0;
        loop {
            lines += match budget.spend(LINE, now) {
                Verdict::Log => 1,
                Verdict::Last | Verdict::After(_) => 2,
                Verdict::Drop => return lines,
            };
        }
    }

    #[test]
    fn a_tenant_that_writes_without_end_leaves_the_other_its_lines() {
        let start = Instant::now();
        let mut user = UserBudget::new(start);
        for second in 0..100 {
            write(&mut user, 1, start + Duration::from_secs(second), 1);
        }
        let now = start + Duration::from_secs(100);
        write(&mut user, 1, now, 1);
        assert!(write(&mut user, 2, now, 1) > 20);
    }

    #[test]
    fn lines_that_are_left_out_are_counted_before_the_next_line_and_at_the_end() {
        let start = Instant::now();
        let mut user = UserBudget::new(start);
        write(&mut user, 1, start, 1);
        let mut budget = user.of(1, MOST, start, |_| true);
        for _ in 0..6 {
            assert_eq!(budget.spend(LINE, start), Verdict::Drop);
        }
        let later = start + Duration::from_secs(1);
        assert_eq!(budget.spend(LINE, later), Verdict::After(7));
        while budget.spend(LINE, later) != Verdict::Drop {}
        assert_eq!(budget.take_left_out(), 1);
        assert_eq!(budget.take_left_out(), 0);
        write(&mut user, 2, later, 1);
        assert_eq!(user.left_out().collect::<Vec<_>>(), [(1, 0), (2, 1)]);
    }

    #[test]
    fn a_user_writes_less_than_a_journal_takes_in_half_a_minute_whatever_tenants_come_and_go() {
        let start = Instant::now();
        let mut user = UserBudget::new(start);
        let (mut lines, mut tenants) = (0, 0);
        for second in 0..30 {
            for _ in 0..4 * MOST {
                tenants += 1;
                let now = start + Duration::from_secs(second);
                let first = (tenants + 1_u32).saturating_sub(64);
                lines += write(&mut user, tenants, now, first);
            }
        }
        assert_eq!(user.parts.len(), MOST);
        // journald.conf(5): RateLimitBurst=.
        assert!(lines < 10_000 / 4 * 3, "{lines}");
    }
}
