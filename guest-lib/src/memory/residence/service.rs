//! Threads that serve the program's accesses to absent pages.
//!
//! Two, because a thread that makes pages absent waits until the event has been read, and may hold the lock for which the
//! serving thread waits. The reading thread takes no lock.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};

use super::{TICK, state};
use crate::faults::{Access, Faults};
use crate::log;
use crate::signals::spawn_quiet;

/// Stack bytes of a thread. The program's libraries' thread-local storage is added to them.
const STACK: usize = 256 << 10;

/// Opens the descriptor and starts the threads. Logs why that is impossible.
pub fn start() -> Option<Arc<Faults>> {
    let started = try_start();
    started
        .inspect_err(|error| {
            log::write(
                log::Level::Warn,
                format_args!(
                    "managed memory stays on the host, where kernels reach it over PCIe: accesses cannot be served by \
                     userfaultfd ({error}); vm.unprivileged_userfaultfd=1 or access to /dev/userfaultfd permits it"
                ),
            );
        })
        .ok()
}

fn try_start() -> io::Result<Arc<Faults>> {
    let faults = Arc::new(Faults::open()?);
    let (sender, receiver) = channel();
    let reader = Arc::clone(&faults);
    spawn_quiet("wormhole-serve", STACK, move || serve(&receiver))?;
    spawn_quiet("wormhole-faults", STACK, move || read(&reader, &sender))?;
    Ok(faults)
}

fn read(faults: &Faults, sender: &Sender<Access>) {
    loop {
        match faults.next() {
            Ok(Some(access)) => {
                if sender.send(access).is_err() {
                    return;
                }
            }
            Ok(None) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                log::error!("accesses to managed memory cannot be served: {error}");
                std::process::abort();
            }
        }
    }
}

fn serve(receiver: &Receiver<Access>) {
    loop {
        let is_tainted = !state().tainted.is_empty();
        let received = if is_tainted {
            receiver.recv_timeout(TICK)
        } else {
            receiver.recv().map_err(RecvTimeoutError::from)
        };
        match received {
            Ok(access) => state().serve(access),
            Err(RecvTimeoutError::Timeout) => state().push_tainted(),
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
