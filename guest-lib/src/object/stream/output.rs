//! Output of kernels (`printf`): it arrives with the answer to a synchronization and is written to the program's
//! standard streams before the call returns.

use std::io::Write;
use std::os::fd::FromRawFd;

use wormhole_api::handle::Stream as StreamKind;
use wormhole_api::{Handle, Synchronize, TakeOutput};

use crate::error::Result;
use crate::object::context::Scope;

/// Waits for a stream or for all work, and writes the kernels' output so far.
pub fn synchronize(scope: Scope, stream: Option<Handle<StreamKind>>) -> Result {
    let waited = scope.session.request(&Synchronize { stream }, |reply| {
        show(reply.stdout, reply.stderr);
        reply.remaining
    });
    let mut remaining = match waited {
        Ok(remaining) => remaining,
        Err(error) => {
            // After a fault the earlier output, and an assertion's message, are still available.
            show_the_rest(scope);
            return Err(error);
        }
    };
    while remaining > 0 {
        remaining = scope.session.request(&TakeOutput {}, |reply| {
            show(reply.stdout, reply.stderr);
            reply.remaining
        })?;
    }
    Ok(())
}

fn show_the_rest(scope: Scope) {
    let mut remaining = 1;
    while remaining > 0 {
        let taken = scope.session.request_after_end(&TakeOutput {}, |reply| {
            show(reply.stdout, reply.stderr);
            reply.remaining
        });
        remaining = taken.unwrap_or(0);
    }
}

/// Writes output to the same streams as the native driver. Flushes the program's own buffers first, because their
/// text was printed earlier.
fn show(stdout: &[u8], stderr: &[u8]) {
    if stdout.is_empty() && stderr.is_empty() {
        return;
    }
    // SAFETY: a null stream means all streams of the C library.
    unsafe { libc::fflush(std::ptr::null_mut()) };
    for (descriptor, text) in [(libc::STDOUT_FILENO, stdout), (libc::STDERR_FILENO, stderr)] {
        // SAFETY: the descriptor is borrowed: `ManuallyDrop` keeps it open.
        let file = unsafe { std::fs::File::from_raw_fd(descriptor) };
        let mut file = std::mem::ManuallyDrop::new(file);
        // The native driver loses output to a closed standard stream too.
        let _ = file.write_all(text);
    }
}
