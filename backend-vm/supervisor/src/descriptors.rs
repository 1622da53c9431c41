//! Limits on descriptors: how many the supervisor may open, and how many of these a tenant may
//! hold. A tenant holds at most as many as it leaves to the others, so each of them can always get
//! some.

use std::io;

use wormhole_link::channel::MAX_RECEIVED;

/// Refused connections with descriptors in them, queued for a scrubber to close.
pub const REFUSED: usize = 64;
/// Descriptors for the supervisor itself: spare workers, a starting worker and scrubbers; refused
/// connections; descriptors received with one read, until they are passed on.
const OWN: usize = 128 + REFUSED + MAX_RECEIVED;
/// Descriptors of a tenant: its stream and window, those that its launcher has sent and no message
/// has claimed, and the scrubber's socket.
pub const TENANT: usize = 11;
/// Descriptors of a control stream.
pub const STREAM: usize = 1;
/// Largest number of sent descriptors that one worker may leave unread.
pub const UNDERWAY: usize = 16;
/// Descriptors of a session: its file, counters and socket for files; its worker's stream and log,
/// and those that the worker has sent and no message has claimed; sent copies.
pub const SESSION: usize = 14 + UNDERWAY;

/// Enough for one session of a tenant, the same for another tenant of its user, and both again for
/// another user.
const LEAST: u64 = (OWN + 4 * (TENANT + STREAM + SESSION)) as u64;

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

/// Descriptors that the tenants share.
#[derive(Clone, Copy, Debug)]
pub struct Descriptors {
    shared: usize,
    /// Whether tenants may belong to different users.
    many_users: bool,
}

/// Descriptors held by a tenant, by all tenants of its user, and by all tenants.
#[derive(Clone, Copy, Debug, Default)]
pub struct Held {
    pub tenant: usize,
    pub user: usize,
    pub all: usize,
}

impl Descriptors {
    /// Raises this process's limit to the hard limit. Workers have a limit of their own.
    ///
    /// # Errors
    /// The limit cannot be read or raised, or is too low.
    pub fn claim(many_users: bool) -> Result<Self, DescriptorsError> {
        let mut limit = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: a local structure that the kernel fills.
        if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } != 0 {
            return Err(DescriptorsError::Limit(io::Error::last_os_error()));
        }
        if limit.rlim_max < LEAST {
            return Err(DescriptorsError::Few(limit.rlim_max));
        }
        limit.rlim_cur = limit.rlim_max;
        // SAFETY: as above; the kernel only reads it.
        if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } != 0 {
            return Err(DescriptorsError::Limit(io::Error::last_os_error()));
        }
        let limit = usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX);
        Ok(Self::of(limit, many_users))
    }

    fn of(limit: usize, many_users: bool) -> Self {
        Self {
            shared: limit.saturating_sub(OWN),
            many_users,
        }
    }

    /// Returns the number that tenants may hold together.
    pub fn for_tenants(self) -> usize {
        self.shared
    }

    /// Returns whether a tenant may hold `more` descriptors: with these, its user holds at most as
    /// many as remain for other users, and the tenant at most as many as remain for the user's
    /// other tenants.
    pub fn allow(self, held: Held, more: usize) -> bool {
        let left = self.shared.saturating_sub(held.all - held.user);
        let users = if self.many_users { left / 2 } else { left };
        held.tenant + more <= users.saturating_sub(held.user + more)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds sessions to a tenant until the limit refuses one.
    fn take(descriptors: Descriptors, held: &mut Held) {
        while descriptors.allow(*held, SESSION) {
            held.tenant += SESSION;
            held.user += SESSION;
            held.all += SESSION;
        }
    }

    #[test]
    fn however_many_tenants_take_what_they_can_another_gets_some() {
        let descriptors = Descriptors::of(1 << 16, false);
        let mut held = Held::default();
        for _ in 0..8 {
            held.tenant = 0;
            take(descriptors, &mut held);
            assert!(held.tenant > 0);
        }
        held.tenant = 0;
        assert!(descriptors.allow(held, SESSION));
    }

    #[test]
    fn whatever_tenants_a_user_has_as_much_is_left_to_other_users() {
        let descriptors = Descriptors::of(4096, true);
        let mut hostile = Held::default();
        for _ in 0..64 {
            hostile.tenant = 0;
            take(descriptors, &mut hostile);
        }
        let mut victim = Held {
            all: hostile.all,
            ..Held::default()
        };
        take(descriptors, &mut victim);
        assert!(victim.tenant > (4096 - OWN) / 8 - SESSION, "{victim:?}");
    }

    #[test]
    fn a_system_with_few_descriptors_gives_tenants_none() {
        let none = Held::default();
        assert!(!Descriptors::of(OWN, false).allow(none, STREAM));
        assert!(!Descriptors::of(0, false).allow(none, STREAM));
    }

    /// docs/tenants.md states this number, and the other constants give a tenant's cost.
    #[test]
    fn a_supervisor_needs_as_many_open_files_as_its_page_says() {
        let page = include_str!("../../../docs/tenants.md");
        let own = TENANT + STREAM;
        let mut held = Held::default();
        let mut tenants = 0;
        loop {
            (held.tenant, held.user, held.all) = (own, held.user + own, held.all + own);
            if !Descriptors::of(4096, false).allow(held, SESSION) {
                break;
            }
            (held.user, held.all) = (held.user + SESSION, held.all + SESSION);
            tenants += 1;
        }
        for said in [
            format!("a hard limit of {LEAST} open files"),
            format!("{OWN} of them for itself"),
            format!(
                "A tenant takes {TENANT}, each of its control streams {STREAM}, each session {SESSION}"
            ),
            format!("room for {tenants} tenants"),
        ] {
            assert!(page.contains(&said), "{said}");
        }
    }

    #[test]
    fn the_least_is_enough_for_a_session_of_each_of_two_users() {
        let descriptors = Descriptors::of(usize::try_from(LEAST).unwrap(), true);
        let own = TENANT + STREAM;
        let first = Held {
            tenant: own,
            user: own,
            all: own,
        };
        assert!(descriptors.allow(first, SESSION));
        let second = Held {
            all: own + SESSION,
            ..Held::default()
        };
        assert!(descriptors.allow(second, TENANT));
    }
}
