//! Static windows: one file with the memory of all sessions of a tenant.
//!
//! The guest has the whole file mapped from its start on, so that its monitor need not map or unmap
//! anything while it runs: a monitor of others (QEMU), or one that shares no descriptors with this
//! system. The tables of segments are private as always. A file for each session frees its
//! memory when it is closed. Here the segments of a session that has ended are scrubbed before
//! another session gets them.

use std::io;
use std::os::fd::OwnedFd;

use wormhole_ring::control::{FEATURE_FILE_MEMORY, FEATURE_FILES, FEATURE_PROCESS, FEATURE_WITHIN};
use wormhole_ring::session::{Run, SessionId, SessionState};

use super::Id;
use super::sessions::advance;
use super::tenant_loop::TenantLoop;
use super::tenants::window_of;

/// Way in which a guest process maps the memory of its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum View {
    /// A process of this system gets the session's file.
    Process,
    /// The launcher maps the session's file into the window of a guest VM.
    Launcher,
    /// The guest's VM has mapped the static window, whose file holds the session's memory.
    Static,
}

impl View {
    /// Returns the features that the supervisor offers a guest, which may have memory for files. A worker gets no files of a
    /// process whose tenant has strangers beside it: a file system that never answers would keep the worker, and its part
    /// of the device, for good.
    pub fn features(self, has_strangers: bool, has_file_memory: bool) -> u64 {
        let of_all = FEATURE_PROCESS | FEATURE_WITHIN;
        match self {
            Self::Process if !has_strangers => of_all | FEATURE_FILES,
            Self::Launcher if has_file_memory => of_all | FEATURE_FILE_MEMORY,
            Self::Process | Self::Launcher | Self::Static => of_all,
        }
    }
}

/// Segments of a static window whose session has ended, while they are being scrubbed.
#[derive(Debug)]
pub(super) struct Returning {
    pub tenant: Id,
    session: SessionId,
    pub runs: Vec<Run>,
    /// Orders that are not done yet.
    orders: usize,
    /// Whether the segments may still contain data. They are not granted again then.
    failed: bool,
}

impl TenantLoop {
    /// Orders the scrubbing of segments of a session that has ended.
    pub(super) fn scrub_static(
        &mut self,
        key: Id,
        tenant: Id,
        session: SessionId,
        file: OwnedFd,
        runs: Vec<Run>,
    ) {
        let ordered = self.scrubber.scrub_ended(tenant, key, &file, &runs);
        self.scrubber.close(tenant, [file]);
        if let Err(error) = &ordered {
            tracing::error!("the segments of {session} cannot be scrubbed: {error}");
        }
        let returning = Returning {
            tenant,
            session,
            runs,
            failed: ordered.is_err(),
            orders: ordered.unwrap_or(0),
        };
        self.returning.insert(key, returning);
    }

    /// Frees the segments of an ended session once all of them are scrubbed.
    pub(super) fn static_scrubbed(&mut self, key: Id, result: io::Result<()>) {
        let Some(returning) = self.returning.get_mut(&key) else {
            return;
        };
        if let Err(error) = result {
            tracing::error!(
                "segments of {} cannot be scrubbed: {error}",
                returning.session
            );
            returning.failed = true;
        }
        returning.orders = returning.orders.saturating_sub(1);
        if returning.orders > 0 || returning.failed {
            return;
        }
        let Some(returning) = self.returning.remove(&key) else {
            return;
        };
        let Some(window) = window_of(&mut self.tenants, returning.tenant) else {
            return;
        };
        for run in returning.runs {
            if let Err(error) = window.segments.scrubbed(returning.session, run) {
                tracing::error!("{error}");
            }
        }
        let number = (returning.tenant, returning.session);
        advance(&self.tenants, number, SessionState::scrubbed);
        advance(&self.tenants, number, SessionState::release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datagram;
    use crate::descriptors::Descriptors;

    #[test]
    fn a_session_whose_segments_are_being_scrubbed_keeps_its_number() {
        let (_near, far) = datagram::pair().unwrap();
        let mut served = TenantLoop::new(far, Descriptors::claim().unwrap());
        let returning = Returning {
            tenant: 7,
            session: SessionId {
                index: 0,
                generation: 0,
            },
            runs: Vec::new(),
            orders: 1,
            failed: false,
        };
        served.returning.insert(1, returning);
        assert_eq!(served.id(), 2);
    }
}
