//! Saves and restores a device behind the transport.

use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};

use super::{Registers, STATUS_DRIVER_OK, STATUS_FEATURES_OK, STATUS_NEEDS_RESET, VirtioPci};
use crate::devices::pci::{MsixState, NO_VECTOR};
use crate::devices::virtio::queue::QueueSetup;

/// Registers of a queue.
#[derive(Debug, Serialize, Deserialize)]
struct QueueState {
    size: u16,
    vector: u16,
    enabled: bool,
    descriptors: u64,
    available: u64,
    used: u64,
}

/// State of a device's registers and interrupts. Where a queue's device goes on is in the queue's used ring.
#[derive(Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(Default))]
pub struct VirtioPciState {
    /// The PCI configuration space.
    pub(crate) config: Vec<u8>,
    /// The device's own configuration, which stays the same.
    own_config: Vec<u8>,
    msix: MsixState,
    isr: u8,
    registers: Registers,
    queues: Vec<QueueState>,
}

impl VirtioPciState {
    pub(super) fn of(device: &VirtioPci) -> Self {
        let queues = device.queues.iter().map(|queue| QueueState {
            size: queue.size,
            vector: queue.vector,
            enabled: queue.enabled,
            descriptors: queue.descriptors,
            available: queue.available,
            used: queue.used,
        });
        Self {
            config: device.config.bytes().to_vec(),
            own_config: device.device.config().to_vec(),
            msix: device.msix.save(),
            isr: device.isr.load(Ordering::SeqCst),
            registers: device.registers,
            queues: queues.collect(),
        }
    }

    /// Returns a state with nothing but a configuration space.
    #[cfg(test)]
    pub(crate) fn of_config(config: &[u8]) -> Self {
        Self {
            config: config.to_vec(),
            ..Self::default()
        }
    }

    /// Gives the state to a device that no driver has started.
    ///
    /// # Errors
    /// The reason for which it does not fit.
    pub(super) fn apply(&self, device: &mut VirtioPci) -> Result<(), &'static str> {
        if self.own_config != device.device.config() {
            return Err("its size, address or name is another one");
        }
        if self.registers.driver_features & !device.features() != 0 {
            return Err("it lacks features that the driver uses");
        }
        if self.queues.len() != device.queues.len() {
            return Err("it has another number of queues");
        }
        if !device.config.restore(&self.config) {
            return Err("it is another device");
        }
        if !device.msix.restore(&self.msix) {
            return Err("it has another number of interrupts");
        }
        let has = |vector| vector == NO_VECTOR || device.msix.has(vector);
        let is_queue = |saved: &QueueState, queue: &QueueSetup| {
            saved.size <= queue.max_size && saved.size.is_power_of_two() && has(saved.vector)
        };
        let mut pairs = self.queues.iter().zip(&device.queues);
        if !has(self.registers.config_vector) || !pairs.all(|(saved, queue)| is_queue(saved, queue))
        {
            return Err("a size or an interrupt of its queues is impossible");
        }
        for (saved, queue) in self.queues.iter().zip(&mut device.queues) {
            *queue = QueueSetup {
                max_size: queue.max_size,
                size: saved.size,
                vector: saved.vector,
                enabled: saved.enabled,
                descriptors: saved.descriptors,
                available: saved.available,
                used: saved.used,
            };
        }
        device.isr.store(self.isr, Ordering::SeqCst);
        device.registers = self.registers;
        let is_negotiated =
            device.registers.status & STATUS_FEATURES_OK != 0 && device.accepts_features();
        let can_go_on = is_negotiated && device.active_queues().is_some();
        match is_started(device) && !can_go_on {
            true => Err("its driver cannot have started it so"),
            false => Ok(()),
        }
    }
}

/// Returns whether the driver has started the device, and the device could be started.
fn is_started(device: &VirtioPci) -> bool {
    device.registers.status & (STATUS_DRIVER_OK | STATUS_NEEDS_RESET) == STATUS_DRIVER_OK
}

/// Lets a device with a state serve the queues that its driver has set up, if it has.
///
/// # Errors
/// The reason for which it cannot.
pub(super) fn resume(device: &mut VirtioPci) -> Result<(), &'static str> {
    if !is_started(device) {
        return Ok(());
    }
    let queues = device.active_queues();
    let mut queues = queues.ok_or("its queues are not in the guest's memory")?;
    if !queues.iter_mut().all(|queue| queue.go_on(&device.memory)) {
        return Err("a used ring is not in the guest's memory");
    }
    let restarted = device
        .server
        .restart(queues, device.registers.driver_features);
    restarted.map_err(|_| "its thread has ended")
}
