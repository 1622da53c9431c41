//! The operator's limits on tenants, beside the limits that a launcher sets for its tenant.

use super::Supervisor;
use super::sessions::Session;
use super::tenants::Tenant;

/// The operator's limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quotas {
    /// Largest number of tenants of one user.
    pub tenants_per_user: usize,
    /// Bytes of memory for each of them, if the memory and not the operator sets that number.
    pub tenant_memory: Option<u64>,
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
            tenant_memory: None,
            sessions: 128,
            sessions_per_user: 1024,
            window: 1 << 40,
        }
    }
}

impl Quotas {
    /// Lowers the number of a user's tenants to as many as have `least` bytes each of the `memory`
    /// of all of them, at least one.
    #[must_use]
    pub fn within_memory(mut self, memory: u64, least: u64) -> Self {
        let room = usize::try_from(memory / least).unwrap_or(usize::MAX).max(1);
        if room < self.tenants_per_user {
            (self.tenants_per_user, self.tenant_memory) = (room, Some(least));
        }
        self
    }

    /// Returns the reason why a user with `count` tenants may not have another one, if there is one.
    fn too_many_tenants(&self, user: u32, count: usize) -> Option<String> {
        let most = self.tenants_per_user;
        let why = match self.tenant_memory {
            None => format!("--tenants-per-user allows {most}"),
            Some(bytes) => format!(
                "there is memory for {most} of {} MiB each: a smaller --tenant-memory lets more attach",
                bytes >> 20
            ),
        };
        (count >= most).then(|| format!("user {user} has {count} tenants, and {why}"))
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
        self.quotas.too_many_tenants(user, count)
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

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: u64 = 512 << 20;

    #[test]
    fn no_more_tenants_attach_than_the_memory_has_room_for() {
        let quotas = Quotas::default().within_memory(6 << 30, LEAST);
        assert_eq!(quotas.too_many_tenants(7, 11), None);
        assert_eq!(
            quotas.too_many_tenants(7, 12).unwrap(),
            "user 7 has 12 tenants, and there is memory for 12 of 512 MiB each: a smaller --tenant-memory lets more attach"
        );
        // One may attach always.
        let quotas = Quotas::default().within_memory(1, LEAST);
        assert_eq!(quotas.tenants_per_user, 1);
    }

    #[test]
    fn memory_for_more_tenants_than_the_operator_allows_changes_nothing() {
        let quotas = Quotas::default().within_memory(1 << 40, LEAST);
        assert_eq!(quotas, Quotas::default());
        assert_eq!(
            quotas.too_many_tenants(7, 64).unwrap(),
            "user 7 has 64 tenants, and --tenants-per-user allows 64"
        );
    }
}
