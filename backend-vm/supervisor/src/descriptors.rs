//! How many descriptors the supervisor may have, and how many of them a tenant may hold: no more than it leaves
//! to the others, so that none is ever without.

use std::io;

use wormhole_link::channel::MAX_RECEIVED;

/// Connections of users who may not attach that wait for a process to close them.
pub const REFUSED: usize = 64;
/// The supervisor's own: spare workers, a worker on its way, processes that close descriptors; refused connections; what
/// arrives with one read of a stream, until it has been passed on.
const OWN: usize = 128 + REFUSED + MAX_RECEIVED;
/// A tenant's stream, its window, what its launcher has sent and not yet named, and the process that closes it.
pub const TENANT: usize = 11;
/// A control stream.
pub const STREAM: usize = 1;
/// Descriptors on their way to one worker.
pub const UNDERWAY: usize = 16;
/// A session's file, counters and socket for files; its worker's stream, log and what it has sent and not yet named; copies
/// on their way.
pub const SESSION: usize = 14 + UNDERWAY;

/// Enough for a session of a tenant, as much for another tenant of its user, and both for another user.
const LEAST: u64 = (OWN + 4 * (TENANT + STREAM + SESSION)) as u64;

/// Why the supervisor has too few descriptors.
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

/// The descriptors that tenants share.
#[derive(Clone, Copy, Debug)]
pub struct Descriptors {
    shared: usize,
    /// Tenants may be of different users.
    many_users: bool,
}

/// What a tenant holds, with its user's other tenants, and with all others.
#[derive(Clone, Copy, Debug, Default)]
pub struct Held {
    pub tenant: usize,
    pub user: usize,
    pub all: usize,
}

impl Descriptors {
    /// Raises this process's limit as far as it may. Workers have a limit of their own.
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

    /// Whether a tenant that holds so many may have `more`: with these its user has no more than is left to other users,
    /// and it has no more than is left to the user's other tenants.
    pub fn allow(self, held: Held, more: usize) -> bool {
        let left = self.shared.saturating_sub(held.all - held.user);
        let users = if self.many_users { left / 2 } else { left };
        held.tenant + more <= users.saturating_sub(held.user + more)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes sessions for a tenant until it may have no more of them.
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

    /// README names this number, and what a tenant costs follows from the others.
    #[test]
    fn a_supervisor_needs_as_many_open_files_as_the_readme_says() {
        let readme = include_str!("../../../README.md");
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
            format!("of which {OWN} are its own"),
            format!(
                "A tenant takes {TENANT}, each of its control streams {STREAM} and each session {SESSION}"
            ),
            format!("room for {tenants} tenants"),
        ] {
            assert!(readme.contains(&said), "{said}");
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
