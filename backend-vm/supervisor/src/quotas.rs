//! The operator's limits on tenants, beside the limits that a launcher sets for its tenant.

use super::Supervisor;
use super::sessions::Session;
use super::tenants::Tenant;

/// The operator's limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quotas {
    /// Largest number of tenants of one user.
    pub tenants_per_user: usize,
    /// Largest number of sessions of one tenant.
    pub sessions: usize,
    /// Largest number of sessions of all tenants of one user.
    pub sessions_per_user: usize,
    /// Largest size of a window in bytes.
    pub window: u64,
}

impl Default for Quotas {
    fn default() -> Self {
        Self {
            tenants_per_user: 64,
            sessions: 128,
            sessions_per_user: 1024,
            window: 1 << 40,
        }
    }
}

impl Supervisor {
    /// Returns the reason why a user may not attach once more, if there is one.
    pub(super) fn too_many_tenants(&mut self, user: u32) -> Option<String> {
        // A disconnected tenant counts until its descriptors are closed.
        self.gone.retain(|tenant, _| self.scrubber.serves(*tenant));
        let (living, gone) = (self.tenants.values().map(Tenant::user), &self.gone);
        let count = living.chain(gone.values().copied());
        let count = count.filter(|owner| *owner == user).count();
        let most = self.quotas.tenants_per_user;
        (count >= most).then(|| {
            format!("user {user} has {count} tenants, and --tenants-per-user allows {most}")
        })
    }

    /// Returns the reason why a tenant may not have another session beside its `live` ones, if
    /// there is one.
    pub(super) fn too_many_sessions(&self, tenant: &Tenant, live: usize) -> Option<String> {
        let own = match tenant.session_limit {
            0 => usize::MAX,
            limit => limit as usize,
        };
        if live >= own {
            return Some(format!(
                "the tenant has {live} sessions, its limit is {own}"
            ));
        }
        let most = self.quotas.sessions;
        if live >= most {
            return Some(format!(
                "the tenant has {live} sessions, and --sessions allows {most}"
            ));
        }
        let (user, most) = (tenant.user(), self.quotas.sessions_per_user);
        let count = self
            .sessions
            .values()
            .filter(|session| self.is_of(session, user))
            .count();
        (count >= most).then(|| {
            format!("user {user} has {count} sessions, and --sessions-per-user allows {most}")
        })
    }

    fn is_of(&self, session: &Session, user: u32) -> bool {
        let tenant = self.tenants.get(&session.tenant);
        tenant.is_some_and(|tenant| tenant.user() == user)
    }
}
