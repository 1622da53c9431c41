//! Output of kernels (`printf`): it arrives with the answer to a synchronization and is written to the program's
//! standard streams before the call returns. Only work of kernels that may print makes a synchronization a request.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use wormhole_api::handle::Stream as StreamKind;
use wormhole_api::{Handle, Synchronize, TakeOutput};

use super::Target;
use super::due::Due;
use crate::device::MOST;
use crate::error::Result;
use crate::object::context::Scope;
use crate::session::output::show;

/// Streams on which kernels were launched that may print, by device.
static PRINTING: [Due; MOST] = [const { Due::new() }; MOST];
/// Number of threads that wait for text, or write it. Their notes are taken already.
static SHOWING: AtomicUsize = AtomicUsize::new(0);
/// True once any kernel may print, as far as this library can tell.
static ALWAYS: AtomicBool = AtomicBool::new(false);

/// Makes every synchronization fetch text from now on.
pub fn expect_always() {
    ALWAYS.store(true, Ordering::Release);
}

impl Target {
    /// Notes that a kernel was launched that may print. Called when it is in the ring.
    #[cold]
    pub fn printed(self, scope: Scope) {
        PRINTING[self.device(scope)].note(Some(self.handle));
    }
}

/// Returns whether a synchronization on the device with this ordinal must fetch text.
pub fn is_due(device: usize) -> bool {
    // A thread takes a note after it has counted itself.
    ALWAYS.load(Ordering::Acquire)
        || PRINTING[device].is_set()
        || SHOWING.load(Ordering::Acquire) != 0
}

/// Waits for a stream of the device or for all its work, and writes the kernels' output so far.
pub fn synchronize(scope: Scope, device: usize, stream: Option<Handle<StreamKind>>) -> Result {
    SHOWING.fetch_add(1, Ordering::AcqRel);
    let due = &PRINTING[device];
    let was_due = due.take(stream);
    let shown = fetch(scope, stream);
    if was_due && shown.is_err() {
        due.note(stream);
    }
    SHOWING.fetch_sub(1, Ordering::AcqRel);
    shown
}

fn fetch(scope: Scope, stream: Option<Handle<StreamKind>>) -> Result {
    let mut remaining = scope.session.request(&Synchronize { stream }, |reply| {
        show(reply.stdout, reply.stderr);
        reply.remaining
    })?;
    while remaining > 0 {
        remaining = scope.session.request(&TakeOutput {}, |reply| {
            show(reply.stdout, reply.stderr);
            reply.remaining
        })?;
    }
    Ok(())
}
