//! Decides which of the host's NVML figures a tenant may see. Figures of a device show the work of all tenants: at the
//! moment, for a while afterwards (a temperature, a mean), and for good in counters, such as that of the energy.

use std::time::{Duration, Instant};

/// Time after which another tenant's work shows in no figure but the counters. A device cools down within it.
const FADES: Duration = Duration::from_secs(120);

/// Figures that a tenant may see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Visible {
    /// Figures that do not depend on any tenant's work.
    Fixed,
    /// Figures of the moment too, without counters.
    Momentary,
    All,
}

/// History of the tenants that had a window.
#[derive(Debug, Default)]
pub struct TenantHistory {
    attached: usize,
    /// Whether there has been a tenant.
    had_one: bool,
    /// Whether there has been another tenant than the first.
    had_others: bool,
    /// Time at which a tenant left last.
    left: Option<Instant>,
}

impl TenantHistory {
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

    /// Returns the figures that each tenant may see.
    pub fn visible(&self, now: Instant) -> Visible {
        let shows = |left| now.saturating_duration_since(left) < FADES;
        match self.left {
            _ if self.has_neighbours() => Visible::Fixed,
            Some(left) if shows(left) => Visible::Fixed,
            _ if self.had_others => Visible::Momentary,
            _ => Visible::All,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_the_first_tenants_until_another_comes_and_nobodys_afterwards() {
        let start = Instant::now();
        let mut history = TenantHistory::default();
        history.set(0, start);
        history.set(1, start);
        assert_eq!(history.visible(start), Visible::All);
        history.set(2, start);
        assert_eq!(history.visible(start), Visible::Fixed);
        history.set(1, start);
        assert_eq!(
            history.visible(start),
            Visible::Fixed,
            "a neighbour has just left"
        );
        let later = start + FADES;
        assert_eq!(history.visible(later), Visible::Momentary);
        // Without a change.
        history.set(1, later);
        assert_eq!(history.visible(later), Visible::Momentary);
    }

    #[test]
    fn a_tenant_sees_no_figures_of_those_that_left_before_it_came() {
        let start = Instant::now();
        let mut history = TenantHistory::default();
        history.set(1, start);
        history.set(0, start);
        history.set(1, start);
        assert_eq!(history.visible(start), Visible::Fixed);
        assert_eq!(history.visible(start + FADES), Visible::Momentary);
    }
}
