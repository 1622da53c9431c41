//! Dump of pending waits to the log, on SIGUSR1.
//!
//! A dump compares each session's progress with the previous dump. Each worker then logs a line for
//! each queue of its device, unless earlier messages to it are still queued.

use std::collections::BTreeMap;
use std::time::Instant;

use event_manager::EventOps;
use wormhole_link::progress::Snapshot;

use super::tenant_loop::TenantLoop;
use super::{Id, Supervisor};

/// Progress of each session in the last dump, with its time.
#[derive(Debug, Default)]
pub struct LastDump(BTreeMap<Id, (Instant, Snapshot)>);

impl Supervisor {
    /// Logs the pending starts of workers, and has the tenants' processes log what else is pending.
    pub(super) fn dump(&mut self) {
        tracing::warn!(
            "dump: {} tenants, {} more wait for a process, {} workers; {}; {}",
            self.tenants.len(),
            self.waiting.len(),
            self.workers.len(),
            self.pool.starts,
            self.refusals
        );
        for worker in self.workers.values() {
            tracing::warn!("dump: {worker}");
        }
        self.process_logs.begin_dump();
        self.dump_tenants();
    }
}

impl TenantLoop {
    /// Logs the pending waits of all guests, sessions and workers.
    pub(super) fn dump(&mut self, ops: &mut EventOps<'_>) {
        tracing::warn!(
            "dump: {} guests, {} sessions, {} workers; {}",
            self.guests.len(),
            self.sessions.len(),
            self.workers.len(),
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
        let mut sessions: Vec<Id> = self.sessions.keys().copied().collect();
        sessions.retain(|key| self.is_granted(*key));
        for session in sessions {
            if let Some(worker) = self.worker_of(session)
                && let Err(error) = worker.ask_for_queues(ops)
            {
                tracing::warn!(
                    "dump: a worker cannot be asked: {}",
                    wormhole_link::chain(&error)
                );
            }
        }
    }
}
