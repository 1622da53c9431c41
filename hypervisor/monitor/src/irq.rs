//! Routes interrupts: the legacy lines as KVM does by default, and one route per MSI.

use std::collections::BTreeSet;
use std::sync::Arc;

use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE, KvmIrqRouting, kvm_irq_routing_entry,
};
use kvm_ioctls::VmFd;
use vmm_sys_util::eventfd::EventFd;
use wormhole_lock::Mutex;

/// Number of interrupt lines of the IOAPIC. The GSIs of MSIs follow them.
pub const IOAPIC_PINS: u32 = 24;

/// Error from setting up an interrupt.
#[derive(Debug, thiserror::Error)]
pub enum IrqError {
    /// KVM refused the routing table.
    #[error("KVM refuses the interrupt routing")]
    Routing(#[source] kvm_ioctls::Error),
    /// The table is longer than KVM allows.
    #[error("{entries} interrupt routes are too many")]
    TooMany {
        /// Number of entries.
        entries: usize,
    },
    /// Another device uses the line.
    #[error("another device has interrupt line {line}")]
    LineTaken {
        /// Number of the line.
        line: u32,
    },
    /// The interrupt controllers have no such line.
    #[error("there is no interrupt line {line}: the IOAPIC has {IOAPIC_PINS}")]
    NoLine {
        /// Number of the line.
        line: u32,
    },
    /// An eventfd cannot be created.
    #[error("cannot make an eventfd")]
    EventFd(#[source] std::io::Error),
    /// KVM refused an irqfd.
    #[error("KVM refuses to connect an eventfd to interrupt {gsi}")]
    IrqFd {
        /// Number of the global system interrupt.
        gsi: u32,
        /// Error from KVM.
        source: kvm_ioctls::Error,
    },
}

/// Address and data of a message-signalled interrupt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MsiMessage {
    /// Address to which the message is written.
    pub address: u64,
    /// Data that is written.
    pub data: u32,
}

/// A controller that delivers message-signalled interrupts.
pub trait MsiController: std::fmt::Debug + Send + Sync {
    /// Allocates an MSI. Returns its number and the eventfd that raises it once it is routed.
    fn allocate_msi(&self) -> Result<(usize, EventFd), IrqError>;
    /// Routes an MSI to `message`.
    fn route_msi(&self, index: usize, message: MsiMessage) -> Result<(), IrqError>;
    /// Lets an eventfd raise its MSI again, also by what it has counted meanwhile.
    fn connect_msi(&self, index: usize, event: &EventFd) -> Result<(), IrqError>;
    /// Lets an eventfd count, and raise nothing.
    fn disconnect_msi(&self, index: usize, event: &EventFd) -> Result<(), IrqError>;
}

/// The VM's interrupt routing table.
#[derive(Debug)]
pub struct IrqRouter {
    vm: Arc<VmFd>,
    /// Legacy lines in use.
    lines: Mutex<BTreeSet<u32>>,
    messages: Mutex<Vec<Option<MsiMessage>>>,
}

impl IrqRouter {
    /// Creates a router for a VM with an in-kernel interrupt controller.
    pub fn new(vm: Arc<VmFd>) -> Self {
        Self {
            vm,
            lines: Mutex::default(),
            messages: Mutex::default(),
        }
    }

    /// Connects a new eventfd to an unused legacy line.
    pub fn legacy_line(&self, line: u32) -> Result<EventFd, IrqError> {
        claim(&mut self.lines.lock(), line)?;
        self.irqfd(line)
    }

    fn irqfd(&self, gsi: u32) -> Result<EventFd, IrqError> {
        let event =
            EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).map_err(IrqError::EventFd)?;
        self.connect(&event, gsi)?;
        Ok(event)
    }

    fn connect(&self, event: &EventFd, gsi: u32) -> Result<(), IrqError> {
        self.vm
            .register_irqfd(event, gsi)
            .map_err(|source| IrqError::IrqFd { gsi, source })
    }
}

impl MsiController for IrqRouter {
    fn allocate_msi(&self) -> Result<(usize, EventFd), IrqError> {
        let mut messages = self.messages.lock();
        let index = messages.len();
        let event = self.irqfd(gsi_of(index))?;
        messages.push(None);
        Ok((index, event))
    }

    fn route_msi(&self, index: usize, message: MsiMessage) -> Result<(), IrqError> {
        let mut messages = self.messages.lock();
        if let Some(slot) = messages.get_mut(index) {
            *slot = Some(message);
        }
        let table = table(&messages);
        let routing = KvmIrqRouting::from_entries(&table).map_err(|_| IrqError::TooMany {
            entries: table.len(),
        })?;
        self.vm.set_gsi_routing(&routing).map_err(IrqError::Routing)
    }

    fn connect_msi(&self, index: usize, event: &EventFd) -> Result<(), IrqError> {
        self.connect(event, gsi_of(index))
    }

    fn disconnect_msi(&self, index: usize, event: &EventFd) -> Result<(), IrqError> {
        let gsi = gsi_of(index);
        self.vm
            .unregister_irqfd(event, gsi)
            .map_err(|source| IrqError::IrqFd { gsi, source })
    }
}

/// Reserves a legacy line for one device.
fn claim(lines: &mut BTreeSet<u32>, line: u32) -> Result<(), IrqError> {
    if line >= IOAPIC_PINS {
        return Err(IrqError::NoLine { line });
    }
    if !lines.insert(line) {
        return Err(IrqError::LineTaken { line });
    }
    Ok(())
}

fn gsi_of(msi: usize) -> u32 {
    IOAPIC_PINS + u32::try_from(msi).unwrap_or(u32::MAX - IOAPIC_PINS)
}

/// Builds the whole table. KVM_SET_GSI_ROUTING replaces all routes, the default ones included.
fn table(messages: &[Option<MsiMessage>]) -> Vec<kvm_irq_routing_entry> {
    let chip = |gsi, irqchip, pin| {
        let mut entry = kvm_irq_routing_entry {
            gsi,
            type_: KVM_IRQ_ROUTING_IRQCHIP,
            ..Default::default()
        };
        entry.u.irqchip.irqchip = irqchip;
        entry.u.irqchip.pin = pin;
        entry
    };
    let mut table = Vec::new();
    for pin in 0..IOAPIC_PINS {
        if pin < 8 {
            table.push(chip(pin, KVM_IRQCHIP_PIC_MASTER, pin));
        } else if pin < 16 {
            table.push(chip(pin, KVM_IRQCHIP_PIC_SLAVE, pin - 8));
        }
        table.push(chip(pin, KVM_IRQCHIP_IOAPIC, pin));
    }
    for (index, message) in messages.iter().enumerate() {
        if let Some(message) = message {
            let mut entry = kvm_irq_routing_entry {
                gsi: gsi_of(index),
                type_: KVM_IRQ_ROUTING_MSI,
                ..Default::default()
            };
            let [a, b, c, d, e, f, g, h] = message.address.to_le_bytes();
            entry.u.msi.address_lo = u32::from_le_bytes([a, b, c, d]);
            entry.u.msi.address_hi = u32::from_le_bytes([e, f, g, h]);
            entry.u.msi.data = message.data;
            table.push(entry);
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_one_device() {
        let mut lines = BTreeSet::new();
        claim(&mut lines, 4).expect("free");
        assert!(matches!(
            claim(&mut lines, 4),
            Err(IrqError::LineTaken { line: 4 })
        ));
        assert!(matches!(
            claim(&mut lines, IOAPIC_PINS),
            Err(IrqError::NoLine { .. })
        ));
    }

    #[test]
    fn the_table_keeps_legacy_lines_and_adds_routed_messages_only() {
        let message = MsiMessage {
            address: 0xfee0_1000,
            data: 0x41,
        };
        let table = table(&[None, Some(message)]);
        assert_eq!(table.len(), 24 + 16 + 1);
        let msi = table.last().expect("entries");
        assert_eq!((msi.gsi, msi.type_), (25, KVM_IRQ_ROUTING_MSI));
    }
}
