//! Decides which of the host's NVML figures a tenant may see. Figures of a device show the work of all tenants: at the
//! moment, for a while afterwards (a temperature, a mean), and for good in counters, such as that of the energy.

use std::time::{Duration, Instant};

use super::Id;

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

/// History of the tenants, whose work the device's figures show. A tenant works from its first session on. Before that it has
/// done nothing on a device, as `wormhole backend start`, which attaches once to see that the supervisor serves.
#[derive(Debug, Default)]
pub struct TenantHistory {
    /// Number of tenants with a window.
    attached: usize,
    worked: Worked,
    /// Time at which a tenant that had worked left last.
    left: Option<Instant>,
}

/// Tenants that have worked so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Worked {
    #[default]
    None,
    One(Id),
    Several,
}

impl TenantHistory {
    /// Stores the number of tenants with a window.
    pub fn set(&mut self, attached: usize) {
        self.attached = attached;
    }

    /// Notes that a tenant begins a session.
    pub fn begins(&mut self, tenant: Id) {
        self.worked = match self.worked {
            Worked::None => Worked::One(tenant),
            Worked::One(only) if only == tenant => return,
            Worked::One(_) | Worked::Several => Worked::Several,
        };
    }

    /// Notes that a tenant has left.
    pub fn leaves(&mut self, tenant: Id, now: Instant) {
        let has_worked = match self.worked {
            Worked::None => false,
            Worked::One(only) => only == tenant,
            // The tenants are not stored, so each may be one of them.
            Worked::Several => true,
        };
        if has_worked {
            self.left = Some(now);
        }
    }

    /// Returns whether more than one tenant has a window.
    pub fn has_neighbours(&self) -> bool {
        self.attached > 1
    }

    /// Returns the figures that a tenant may see.
    pub fn visible(&self, tenant: Id, now: Instant) -> Visible {
        let shows = |left| now.saturating_duration_since(left) < FADES;
        match (self.left, self.worked) {
            _ if self.has_neighbours() => Visible::Fixed,
            (Some(left), _) if shows(left) => Visible::Fixed,
            (_, Worked::None) => Visible::All,
            (_, Worked::One(only)) if only == tenant => Visible::All,
            _ => Visible::Momentary,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Id = 1;
    const SECOND: Id = 2;

    #[test]
    fn counters_are_the_first_tenants_until_another_works_and_nobodys_afterwards() {
        let start = Instant::now();
        let mut history = TenantHistory::default();
        history.set(1);
        assert_eq!(history.visible(FIRST, start), Visible::All);
        history.begins(FIRST);
        assert_eq!(history.visible(FIRST, start), Visible::All);
        history.set(2);
        assert_eq!(history.visible(FIRST, start), Visible::Fixed);
        history.begins(SECOND);
        history.set(1);
        history.leaves(SECOND, start);
        assert_eq!(
            history.visible(FIRST, start),
            Visible::Fixed,
            "a neighbour has just left"
        );
        let later = start + FADES;
        assert_eq!(history.visible(FIRST, later), Visible::Momentary);
        // A further session.
        history.begins(FIRST);
        assert_eq!(history.visible(FIRST, later), Visible::Momentary);
    }

    #[test]
    fn a_tenant_sees_no_figures_of_those_that_left_before_it_came() {
        let start = Instant::now();
        let mut history = TenantHistory::default();
        history.set(1);
        history.begins(FIRST);
        history.set(0);
        history.leaves(FIRST, start);
        history.set(1);
        for _ in 0..2 {
            assert_eq!(history.visible(SECOND, start), Visible::Fixed);
            assert_eq!(history.visible(SECOND, start + FADES), Visible::Momentary);
            history.begins(SECOND);
        }
    }

    #[test]
    fn a_tenant_that_never_began_a_session_leaves_no_trace() {
        let start = Instant::now();
        let mut history = TenantHistory::default();
        // As `wormhole backend start` does.
        history.set(1);
        history.set(0);
        history.leaves(FIRST, start);
        history.set(1);
        history.begins(SECOND);
        assert_eq!(history.visible(SECOND, start), Visible::All);
        history.set(2);
        assert_eq!(history.visible(SECOND, start), Visible::Fixed);
        history.set(1);
        history.leaves(FIRST, start);
        assert_eq!(history.visible(SECOND, start), Visible::All);
    }
}
