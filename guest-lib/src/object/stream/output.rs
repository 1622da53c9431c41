//! What kernels print: it comes with the answer to a synchronization and goes to the program's own
//! standard streams before the call returns.

use std::io::Write;
use std::os::fd::FromRawFd;

use wormhole_api::handle::Stream as StreamKind;
use wormhole_api::{Handle, Synchronize, TakeOutput};

use crate::error::Result;
use crate::object::context::Scope;

/// Waits for a stream or for everything, and shows what kernels have printed by then.
pub fn synchronize(scope: Scope, stream: Option<Handle<StreamKind>>) -> Result {
    let waited = scope.session.request(&Synchronize { stream }, |reply| {
        show(reply.stdout, reply.stderr);
        reply.remaining
    });
    let mut remaining = match waited {
        Ok(remaining) => remaining,
        Err(error) => {
            // A fault: what was printed before it, and the text of an assertion, is still there.
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

/// Writes text where the native driver does. The program's own buffered output comes first: it was
/// printed before.
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
        // A closed standard stream loses its text natively too.
        let _ = file.write_all(text);
    }
}
