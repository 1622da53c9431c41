//! How many descriptors the supervisor may have, and how many of them a tenant may hold: no more than it leaves
//! to the others, so that none is ever without.

use std::io;

use wormhole_link::channel::MAX_RECEIVED;

/// The supervisor's own: spare workers, a worker on its way, processes that close descriptors, and what arrives with the
/// read of a stream that is no tenant's.
const OWN: usize = 128 + MAX_RECEIVED;
/// A tenant's stream, what its launcher has sent and not yet named, the process that closes it, and what arrives with one
/// read of a stream of the tenant's. Those streams are not read while more of it is here than the tenant may hold.
pub const TENANT: usize = 11 + MAX_RECEIVED;
pub const STREAM: usize = 1;
/// Descriptors on their way to one worker.
pub const UNDERWAY: usize = 16;
/// A session's file, counters and socket for files; its worker's stream, log and what it has sent and not yet named; copies
/// on their way.
pub const SESSION: usize = 14 + UNDERWAY;

/// Enough for one tenant with one session, and another's.
const LEAST: u64 = (OWN + 2 * (TENANT + STREAM + SESSION)) as u64;

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
}

impl Descriptors {
    /// Raises this process's limit as far as it may. Workers have a limit of their own.
    ///
    /// # Errors
    /// The limit cannot be read or raised, or is too low.
    pub fn claim() -> Result<Self, DescriptorsError> {
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
        Ok(Self::of(
            usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX),
        ))
    }

    fn of(limit: usize) -> Self {
        Self {
            shared: limit.saturating_sub(OWN),
        }
    }

    /// Whether a tenant that holds `held` may have `more`, when all tenants together hold `all`.
    pub fn allow(self, all: usize, held: usize, more: usize) -> bool {
        held + more <= self.shared.saturating_sub(all + more)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn however_many_tenants_take_what_they_can_another_gets_some() {
        let descriptors = Descriptors::of(1 << 16);
        let mut all = 0;
        for _ in 0..8 {
            let mut held = 0;
            while descriptors.allow(all, held, SESSION) {
                held += SESSION;
                all += SESSION;
            }
            assert!(held > 0);
        }
        assert!(descriptors.allow(all, 0, SESSION));
    }

    #[test]
    fn a_system_with_few_descriptors_gives_tenants_none() {
        assert!(!Descriptors::of(OWN).allow(0, 0, STREAM));
        assert!(!Descriptors::of(0).allow(0, 0, STREAM));
    }
}
