//! Which figures of the host's NVML tenants are told. The work of one tenant shows in the figures of a device: at the
//! moment, for a while afterwards (a temperature, a mean), and for good in counters, such as that of the energy.

use std::time::{Duration, Instant};

/// Time after which another tenant's work shows in no figure but the counters. A device cools down within it.
const FADES: Duration = Duration::from_secs(120);

/// Figures that a tenant may be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// Figures that do not depend on any tenant's work.
    Fixed,
    /// Figures of the moment too, without counters.
    Momentary,
    All,
}

/// Tenants with a window, now and before.
#[derive(Debug, Default)]
pub struct Company {
    attached: usize,
    /// Whether there has been a tenant.
    had_one: bool,
    /// Whether there has been another tenant than the first.
    had_others: bool,
    /// Time at which a tenant left last.
    left: Option<Instant>,
}

impl Company {
    /// Stores the number of tenants with a window.
    pub fn set(&mut self, attached: usize, now: Instant) {
        if attached > self.attached {
            self.had_others |= self.had_one || attached > 1;
            self.had_one = true;
        }
        if attached < self.attached {
            self.left = Some(now);
        }
        self.attached = attached;
    }

    /// Returns whether there is more than one.
    pub fn has_neighbours(&self) -> bool {
        self.attached > 1
    }

    pub fn told(&self, now: Instant) -> Told {
        let shows = |left| now.saturating_duration_since(left) < FADES;
        match self.left {
            _ if self.has_neighbours() => Told::Fixed,
            Some(left) if shows(left) => Told::Fixed,
            _ if self.had_others => Told::Momentary,
            _ => Told::All,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_the_first_tenants_until_another_comes_and_nobodys_afterwards() {
        let start = Instant::now();
        let mut company = Company::default();
        company.set(0, start);
        company.set(1, start);
        assert_eq!(company.told(start), Told::All);
        company.set(2, start);
        assert_eq!(company.told(start), Told::Fixed);
        company.set(1, start);
        assert_eq!(
            company.told(start),
            Told::Fixed,
            "a neighbour has just left"
        );
        let later = start + FADES;
        assert_eq!(company.told(later), Told::Momentary);
        // Without a change.
        company.set(1, later);
        assert_eq!(company.told(later), Told::Momentary);
    }

    #[test]
    fn a_tenant_is_not_told_of_who_left_before_it_came() {
        let start = Instant::now();
        let mut company = Company::default();
        company.set(1, start);
        company.set(0, start);
        company.set(1, start);
        assert_eq!(company.told(start), Told::Fixed);
        assert_eq!(company.told(start + FADES), Told::Momentary);
    }
}
