//! Who waits for whom, in the log, whenever SIGUSR1 comes.
//!
//! A dump compares what each worker does with the dump before it: what does not move between the two waits.

use std::collections::BTreeMap;
use std::time::Instant;

use super::{Id, Supervisor};
use wormhole_link::progress::Snapshot;

/// What the last dump found, by session.
#[derive(Debug, Default)]
pub struct LastDump(BTreeMap<Id, (Instant, Snapshot)>);

impl Supervisor {
    /// Writes what everything waits for to the log.
    pub(super) fn dump(&mut self) {
        tracing::warn!(
            "dump: {} tenants, {} guests, {} sessions, {} workers; {}; {}",
            self.tenants.len(),
            self.guests.len(),
            self.sessions.len(),
            self.workers.len(),
            self.starts,
            self.scrubber
        );
        for guest in self.guests.values().filter(|guest| guest.session.is_none()) {
            tracing::warn!(
                "dump: a guest of tenant {} has no session yet",
                guest.tenant
            );
        }
        for worker in self.workers.values() {
            tracing::warn!("dump: {worker}");
        }
        let now = Instant::now();
        let mut last = std::mem::take(&mut self.last_dump.0);
        for (key, session) in &self.sessions {
            let snapshot = session.counters.snapshot();
            let moved = match last.remove(key) {
                None => String::new(),
                Some((then, before)) => {
                    let seconds = now.duration_since(then).as_secs_f64();
                    if snapshot.is_as(&before) {
                        format!(", as {seconds:.1} s before")
                    } else {
                        let taken = snapshot.taken().wrapping_sub(before.taken());
                        format!(", {taken} taken in the last {seconds:.1} s")
                    }
                }
            };
            tracing::warn!("dump: {session}: {snapshot}{moved}");
            self.last_dump.0.insert(*key, (now, snapshot));
        }
    }
}
