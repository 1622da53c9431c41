//! The doorbell of a payload, and the wait for its answer: a transport with VM exits, to be compared with the window.
//!
//! A payload rings by a write to [`RING`], which KVM turns into an event without the monitor. It waits by a read of [`WAIT`],
//! which lasts until the caller writes to the other event. A kernel would halt and be interrupted instead, but a nested KVM
//! may be unable to deliver interrupts to supervisor code.

use std::sync::Arc;

use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use vmm_sys_util::eventfd::EventFd;
use wormhole_lock::Mutex;

use crate::bus::{BusDevice, Buses, Effect};
use crate::vm::{VmError, kvm_error};

/// Port by which a payload rings.
const RING: u64 = 0xf6;
/// Port by which a payload waits.
const WAIT: u64 = 0xf7;

/// Events by which a payload rings for a call and learns of its end.
#[derive(Debug)]
pub struct Doorbell {
    /// Written by KVM when the payload rings.
    pub rung: EventFd,
    /// Ends the payload's wait when it is written.
    pub done: EventFd,
}

impl Doorbell {
    /// Connects the events to a VM and its ports.
    pub(super) fn connect(self, vm: &VmFd, buses: &Buses) -> Result<(), VmError> {
        vm.register_ioevent(&self.rung, &IoEventAddress::Pio(RING), NoDatamatch)
            .map_err(kvm_error("an ioeventfd"))?;
        let wait = Arc::new(Mutex::new(WaitPort(self.done)));
        Ok(buses.ports.insert(WAIT, 1, wait)?)
    }
}

/// The port [`WAIT`].
#[derive(Debug)]
struct WaitPort(EventFd);

impl BusDevice for WaitPort {
    fn read(&mut self, _: u64, data: &mut [u8]) {
        // A signal that stops the VM ends the wait too.
        let _ = self.0.read();
        data.fill(0);
    }

    fn write(&mut self, _: u64, _: &[u8]) -> Effect {
        Effect::Continue
    }
}
