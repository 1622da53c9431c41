//! Limits on descriptors. Each process has a table of its own, as large as the hard limit allows.
//!
//! The supervisor holds few for each tenant, and a user has at most as many as it leaves to others.
//! A tenant's process holds all that its tenant uses. Descriptors that are on their way between
//! processes count for the user whose process has sent them. Where the supervisor is root, each
//! tenant's process has a user of its own. Elsewhere they share one, so each tenant may leave few
//! unread, and there are only as many tenants as have room for these.

use std::io;

use wormhole_link::channel::MAX_RECEIVED;
use wormhole_link::raise_descriptor_limit;

use super::datagram::DESCRIPTORS;
use super::pair::GIVEN;

/// Refused connections, queued for a process that closes them.
pub const REFUSED: usize = 64;
/// Descriptors of a process for itself: spare workers, a starting worker and scrubbers; refused
/// connections; descriptors received with one read, until they are passed on.
const OWN: usize = 128 + REFUSED + MAX_RECEIVED;
/// Descriptors that the supervisor holds for a tenant: its connection or the pair, the log of its process, and those that
/// wait to be sent or were sent and not received.
const HELD: usize = 5 + GIVEN;
/// Descriptors of a tenant: its stream, its window and a copy of that, the memory of its guest's file
/// system and a copy of that, those that its launcher has sent and no message has claimed, and the
/// scrubber's socket.
pub const TENANT: usize = 14;
/// Descriptors of a control stream.
pub const STREAM: usize = 1;
/// Largest number of sent descriptors that one worker may leave unread.
pub const UNDERWAY: usize = 16;
/// Descriptors of a session: its file, counters and socket for files; its worker's stream and log,
/// and those that the worker has sent and no message has claimed; sent copies.
pub const SESSION: usize = 14 + UNDERWAY;
/// Least number of descriptors that a tenant may leave unread.
const UNREAD: usize = 64;

/// Enough for a tenant with a session, and as much again.
const LEAST: u64 = (OWN + 2 * (TENANT + STREAM + SESSION)) as u64;

/// Reason why the supervisor's limit on descriptors is unusable.
#[derive(Debug, thiserror::Error)]
pub enum DescriptorsError {
    #[error("the limit of open files cannot be raised")]
    Limit(#[source] io::Error),
    #[error(
        "{0} open files are too few for the supervisor, which needs {LEAST}: raise the hard limit \
         (RLIMIT_NOFILE, `ulimit -Hn`)"
    )]
    Few(u64),
}

/// Descriptors of this process.
#[derive(Clone, Copy, Debug)]
pub struct Descriptors {
    shared: usize,
    /// Whether the processes of all tenants have one user.
    is_one_user: bool,
}

impl Descriptors {
    /// Raises this process's limit to the hard limit. Workers have a limit of their own.
    ///
    /// # Errors
    /// The limit cannot be read or raised, or is too low.
    pub fn claim() -> Result<Self, DescriptorsError> {
        let maximum = raise_descriptor_limit().map_err(DescriptorsError::Limit)?;
        // No limit is none here.
        let limit = maximum.unwrap_or(u64::MAX);
        if limit < LEAST {
            return Err(DescriptorsError::Few(limit));
        }
        Ok(Self::of(usize::try_from(limit).unwrap_or(usize::MAX)))
    }

    fn of(limit: usize) -> Self {
        Self {
            shared: limit.saturating_sub(OWN),
            is_one_user: false,
        }
    }

    /// Sets whether the processes of all tenants have one user.
    pub fn with_one_user(self, is_one_user: bool) -> Self {
        Self {
            is_one_user,
            ..self
        }
    }

    /// Returns the number that the supervisor counts for a tenant.
    pub fn of_tenant(self) -> usize {
        match self.is_one_user {
            true => HELD + UNREAD + DESCRIPTORS,
            false => HELD,
        }
    }

    /// Returns the number for tenants.
    pub fn for_tenants(self) -> usize {
        self.shared
    }

    /// Returns whether the supervisor may serve another tenant of a user with `of_user` tenants,
    /// while there are `all`: with it the user has at most as many descriptors as are left.
    pub fn allow(self, of_user: usize, all: usize) -> bool {
        let each = self.of_tenant();
        let left = self.shared.saturating_sub((all - of_user) * each);
        (of_user + 1) * each <= left / 2
    }

    /// Returns the number of descriptors that each of so many tenants may leave unread: all that
    /// have one user leave half of what it may have in flight.
    pub fn unread_of_one(self, tenants: usize) -> usize {
        let tenants = if self.is_one_user { tenants } else { 1 };
        let each = self.shared / 2 / tenants.max(1);
        // A scrubber leaves as many.
        each.saturating_sub(DESCRIPTORS).max(UNREAD)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_tenants_a_user_has_as_much_is_left_to_other_users() {
        for is_one_user in [false, true] {
            let descriptors = Descriptors::of(4096).with_one_user(is_one_user);
            let take = |others: usize| {
                let mut tenants = 0;
                while descriptors.allow(tenants, others + tenants) {
                    tenants += 1;
                }
                tenants
            };
            let most = (4096 - OWN) / descriptors.of_tenant();
            let hostile = take(0);
            assert!(take(hostile) + 2 > most / 4, "{hostile} of {most}");
        }
    }

    #[test]
    fn a_system_with_few_descriptors_gives_tenants_none() {
        assert!(!Descriptors::of(OWN).allow(0, 0));
        assert!(!Descriptors::of(0).allow(0, 0));
    }

    #[test]
    fn tenants_with_one_user_leave_half_of_the_descriptors_in_flight_to_the_supervisor() {
        let of = |limit| Descriptors::of(limit).with_one_user(true);
        let unread = of(1 << 16).unread_of_one(128);
        assert!(unread > UNREAD && unread * 128 <= 1 << 15, "{unread}");
        for limit in [LEAST, 1024, 4096, 1 << 14] {
            let descriptors = of(usize::try_from(limit).unwrap());
            let tenants = (0..128).take_while(|all| descriptors.allow(*all, *all));
            let each = descriptors.unread_of_one(128) + DESCRIPTORS + GIVEN;
            let unread = tenants.count() * each;
            assert!(unread <= descriptors.shared / 2, "{unread} of {limit}");
        }
        assert!(Descriptors::of(4096).unread_of_one(128) > 1024);
    }

    /// docs/tenants.md states these numbers.
    #[test]
    fn a_supervisor_needs_as_many_open_files_as_its_page_says() {
        let page = include_str!("../../../docs/tenants.md");
        let sessions = (4096 - OWN - TENANT) / (SESSION + STREAM);
        for said in [
            format!("a hard limit of {LEAST} open files"),
            format!("{OWN} of them for itself"),
            format!(
                "A tenant takes {TENANT}, each of its control streams {STREAM}, each session {SESSION}"
            ),
            format!("room for {sessions} sessions"),
        ] {
            assert!(page.contains(&said), "{said}");
        }
    }
}
