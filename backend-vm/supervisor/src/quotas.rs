//! The operator's limits on tenants, beside the limits that a launcher sets for its tenant.

use std::fmt::Write as _;

use wormhole_link::operator::SESSIONS;

use super::tenant_processes::{State, TenantProcess};
use super::{Id, Supervisor};

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
    /// Most bytes of its window that a tenant uses at a time.
    pub window: u64,
}

impl Default for Quotas {
    fn default() -> Self {
        Self {
            tenants_per_user: 64,
            tenant_memory: None,
            sessions: SESSIONS,
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

    /// Returns the reason why a user with `count` tenants may not have another one.
    fn too_many_tenants(&self, user: u32, count: usize) -> String {
        let most = self.tenants_per_user;
        let why = match self.tenant_memory {
            None => format!("--tenants-per-user allows {most}"),
            Some(bytes) => format!(
                "there is memory for {most} of {} MiB each: a smaller --tenant-memory lets more attach",
                bytes >> 20
            ),
        };
        format!("user {user} has {count} tenants, and {why}")
    }
}

impl Supervisor {
    /// Returns whether a user may attach once more. A tenant counts until the processes that serve it have ended, and with
    /// them its descriptors are closed, and until its memory is free.
    pub(super) fn has_room_for_tenant(&self, user: u32) -> bool {
        self.tenants_of(user) < self.quotas.tenants_per_user
    }

    /// Returns the reason why a user may not attach once more.
    pub(super) fn too_many_tenants(&self, user: u32) -> String {
        let mut reason = self.quotas.too_many_tenants(user, self.tenants_of(user));
        let tenants = self.tenants.values().filter(|one| one.user == user);
        let left = tenants.filter(|one| matches!(one.state, State::Left));
        let left = left.count();
        if left > 0 {
            let _ = write!(
                reason,
                "; of these {left} have ended and count until all that keeps memory of the user's tenants is closed: files such as the window, and sockets with unread messages"
            );
        }
        reason
    }

    /// Returns the number of a user's tenants and connections that wait for a process.
    pub(super) fn tenants_of(&self, user: u32) -> usize {
        let tenants = self.tenants.values().filter(|one| one.user == user);
        let waiting = self.waiting.iter().filter(|one| one.user == user);
        tenants.count() + waiting.count()
    }

    /// Returns the number of tenants and waiting connections, of one user or of all, that hold descriptors. A tenant of
    /// which only memory is left holds none.
    pub(super) fn holders(&self, user: Option<u32>) -> usize {
        let is_of = |of: u32| user.is_none_or(|user| of == user);
        let tenants = self.tenants.values().filter(|one| is_of(one.user));
        let tenants = tenants.filter(|one| !matches!(one.state, State::Left));
        let waiting = self.waiting.iter().filter(|one| is_of(one.user));
        tenants.count() + waiting.count() + self.acceptor.postponed(user)
    }

    /// Returns the reason why a tenant may not have another session, if there is one. A session
    /// counts as long as its worker lives, whatever its tenant's process says.
    pub(super) fn too_many_sessions(&self, id: Id) -> Option<String> {
        let tenant = self.tenants.get(&id)?;
        let (user, count) = (tenant.user, self.sessions_of(id, tenant));
        let most = self.quotas.sessions;
        if count >= most {
            return Some(format!(
                "the tenant has {count} sessions, and --sessions allows {most}"
            ));
        }
        let most = self.quotas.sessions_per_user;
        // One pass over the workers, however many tenants the user has.
        let of_user = self.tenants.values().filter(|one| one.user == user);
        let count: usize = of_user.map(|one| one.sessions.len()).sum();
        let workers = self.workers.values().filter_map(|worker| worker.session);
        let over = workers.filter(|(id, session)| {
            let tenant = self.tenants.get(id).filter(|one| one.user == user);
            tenant.is_some_and(|one| !one.sessions.contains(session))
        });
        let count = count + over.count();
        (count >= most).then(|| {
            format!("user {user} has {count} sessions, and --sessions-per-user allows {most}")
        })
    }

    pub(super) fn sessions_of(&self, id: Id, tenant: &TenantProcess) -> usize {
        let workers = self.workers.values().filter_map(|worker| worker.session);
        let over = workers.filter(|(of, session)| *of == id && !tenant.sessions.contains(session));
        tenant.sessions.len() + over.count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: u64 = 512 << 20;

    #[test]
    fn no_more_tenants_attach_than_the_memory_has_room_for() {
        let quotas = Quotas::default().within_memory(6 << 30, LEAST);
        assert_eq!(quotas.tenants_per_user, 12);
        assert_eq!(
            quotas.too_many_tenants(7, 12),
            "user 7 has 12 tenants, and there is memory for 12 of 512 MiB each: a smaller --tenant-memory lets more attach"
        );
        // One tenant may always attach.
        let quotas = Quotas::default().within_memory(1, LEAST);
        assert_eq!(quotas.tenants_per_user, 1);
    }

    #[test]
    fn memory_for_more_tenants_than_the_operator_allows_changes_nothing() {
        let quotas = Quotas::default().within_memory(1 << 40, LEAST);
        assert_eq!(quotas, Quotas::default());
        assert_eq!(
            quotas.too_many_tenants(7, 64),
            "user 7 has 64 tenants, and --tenants-per-user allows 64"
        );
    }
}
