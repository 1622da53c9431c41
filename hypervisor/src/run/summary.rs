//! Summary of a run: forwarded calls and costs.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use wormhole_link::chain;
use wormhole_link::report::SessionReport;
use wormhole_monitor::exit_accounting::Accounts;

use crate::backend::Served;

/// Outcome of one `wormhole run`, for people (its `Display`) and machines (as JSON).
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Summary {
    /// `none`, `kvm` or `emulated`.
    pub guest: String,
    /// Wall time of the whole run in seconds.
    pub seconds: f64,
    pub records: u64,
    pub requests: u64,
    /// Number of calls answered in the guest, as counted by the guest.
    pub local_calls: u64,
    pub fences: u64,
    /// Bytes copied to and from the device.
    pub bytes_to_device: u64,
    pub bytes_from_device: u64,
    /// Number of VM exits of all vCPUs while the program ran, from KVM's statistics; none without a
    /// VM.
    pub vm_exits: Option<u64>,
    /// Name of the VM in KVM's statistics; none without a VM.
    pub vm: Option<String>,
    /// VM exits by the activity that the program reported; none without a VM.
    pub exit_accounts: Option<Accounts>,
    /// The backend's own VM; none if the backend is a process of this system.
    pub backend_vm: Option<BackendVmSummary>,
    /// Bytes of memory that the guest did not use any more and the host took back; none without a VM.
    pub reclaimed_bytes: Option<u64>,
    /// Reason why the backend ended before the program; none if it did not.
    pub backend_failure: Option<String>,
    /// Number of sessions: one for each guest process that used the driver.
    pub session_count: u64,
    /// Newest sessions in full. With more than [`wormhole_link::report::KEPT`] sessions, the first
    /// report contains the sums of the earlier ones.
    pub sessions: Vec<SessionReport>,
}

/// Figures of a run's backend VM.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BackendVmSummary {
    /// Name in KVM's statistics.
    pub vm: String,
    /// Identity of its kernel's boot (`/proc/sys/kernel/random/boot_id`).
    pub boot_id: String,
    /// Number of exits of its vCPU while the program ran.
    pub vm_exits: Option<u64>,
    /// VM exits of the backend VM by the activity that the guest's program reported.
    pub exit_accounts: Accounts,
}

impl Summary {
    pub fn of(served: Served, guest: &str, took: Duration) -> Self {
        let Served { sessions, failure } = served;
        let (session_count, sessions) = sessions.into_parts();
        let sum = |count: fn(&SessionReport) -> u64| {
            sessions.iter().map(count).fold(0, u64::saturating_add)
        };
        Self {
            guest: guest.to_owned(),
            seconds: took.as_secs_f64(),
            records: sum(|session| session.records),
            requests: sum(|session| session.requests),
            local_calls: sum(|session| session.local_calls),
            fences: sum(|session| session.fences),
            bytes_to_device: sum(|session| session.bytes_in),
            bytes_from_device: sum(|session| session.bytes_out),
            vm_exits: None,
            vm: None,
            exit_accounts: None,
            backend_vm: None,
            reclaimed_bytes: None,
            backend_failure: failure.map(|error| chain(&error)),
            session_count,
            sessions,
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "wormhole: guest {}, {} session{}: {} local calls, {} records, {} requests, {} fences, \
             {} bytes to the device, {} back, ",
            self.guest,
            self.session_count,
            if self.session_count == 1 { "" } else { "s" },
            self.local_calls,
            self.records,
            self.requests,
            self.fences,
            self.bytes_to_device,
            self.bytes_from_device,
        )?;
        if let Some(exits) = self.vm_exits {
            write!(f, "{exits} VM exits, ")?;
        }
        if let Some(exits) = self.backend_vm.as_ref().and_then(|vm| vm.vm_exits) {
            write!(f, "{exits} of the backend VM, ")?;
        }
        writeln!(f, "{:.2} s", self.seconds)?;
        for session in &self.sessions {
            let mut messages: Vec<_> = session
                .messages
                .iter()
                .filter(|(_, count)| **count > 0)
                .collect();
            messages.sort_by(|a, b| b.1.cmp(a.1).then(a.0.cmp(b.0)));
            let mut list: Vec<_> = messages
                .iter()
                .map(|(name, count)| format!("{name} {count}"))
                .collect();
            let (launches, chains) = (session.chained_launches, session.chains);
            if chains > 0 {
                list.push(format!("{launches} launches in {chains} chains"));
            }
            writeln!(
                f,
                "wormhole: session {}: {} ({})",
                session.session,
                list.join(", "),
                session.end
            )?;
        }
        Ok(())
    }
}
