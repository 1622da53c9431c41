//! Saves and restores the chips that KVM emulates: interrupt controllers, timer, clock.

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_clock_data, kvm_irqchip,
    kvm_pit_state2,
};
use kvm_ioctls::VmFd;
use serde::{Deserialize, Serialize};

use super::SnapshotError;

const CHIPS: [u32; 3] = [
    KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE,
    KVM_IRQCHIP_IOAPIC,
];

/// State of the chips.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ChipsState {
    /// The interrupt controllers, in the order of [`CHIPS`].
    interrupts: [kvm_irqchip; CHIPS.len()],
    timer: kvm_pit_state2,
    clock: kvm_clock_data,
}

impl ChipsState {
    pub fn save(vm: &VmFd) -> Result<Self, SnapshotError> {
        let get = |what| move |source| SnapshotError::Get { what, source };
        let mut interrupts = CHIPS.map(|chip_id| kvm_irqchip {
            chip_id,
            ..Default::default()
        });
        for chip in &mut interrupts {
            vm.get_irqchip(chip)
                .map_err(get("an interrupt controller"))?;
        }
        Ok(Self {
            interrupts,
            timer: vm.get_pit2().map_err(get("the timer"))?,
            clock: vm.get_clock().map_err(get("the clock"))?,
        })
    }

    /// Writes the state of all chips but the clock.
    pub fn restore(&self, vm: &VmFd) -> Result<(), SnapshotError> {
        let set = |what| move |source| SnapshotError::Set { what, source };
        for (chip_id, chip) in CHIPS.into_iter().zip(&self.interrupts) {
            let chip = kvm_irqchip { chip_id, ..*chip };
            vm.set_irqchip(&chip)
                .map_err(set("an interrupt controller"))?;
        }
        vm.set_pit2(&self.timer).map_err(set("the timer"))
    }

    /// Lets the paravirtual clock go on from its time. Comes after the vCPUs, whose TSC it is computed from.
    pub fn restore_clock(&self, vm: &VmFd) -> Result<(), SnapshotError> {
        // No flag: with KVM_CLOCK_REALTIME the clock would jump over the time since the snapshot.
        let clock = kvm_clock_data {
            clock: self.clock.clock,
            ..Default::default()
        };
        vm.set_clock(&clock).map_err(|source| SnapshotError::Set {
            what: "the clock",
            source,
        })
    }
}

#[cfg(test)]
mod tests {
    use kvm_ioctls::Kvm;

    use super::*;
    use crate::chipset::create_chips;

    #[test]
    fn chips_and_clock_go_on_from_their_state() {
        let Ok(kvm) = Kvm::new() else {
            return eprintln!("skipped: there is no KVM");
        };
        let vm = || {
            let vm = kvm.create_vm().expect("a VM");
            create_chips(&vm).expect("chips");
            vm
        };
        let saved = ChipsState::save(&vm()).expect("chips");
        let mut text = serde_json::to_value(&saved).expect("it is text");
        // An entry of the IOAPIC, the mask of the first 8259, and a clock of an hour. The chips follow eight bytes.
        text["interrupts"][2][8 + 24] = 0x31.into();
        text["interrupts"][0][8 + 2] = 0xfb.into();
        let mut saved: ChipsState = serde_json::from_value(text).expect("it is a state");
        saved.clock.clock = 3_600_000_000_000;
        // A rate generator, which no PIT has after a reset.
        (saved.timer.channels[0].mode, saved.timer.channels[0].count) = (2, 11_932);
        let other = vm();
        saved.restore(&other).expect("it fits");
        saved.restore_clock(&other).expect("it fits");
        let restored = ChipsState::save(&other).expect("chips");
        let bytes = |state: &ChipsState| state.interrupts.map(|chip| serde_json::json!(chip));
        assert_eq!(bytes(&restored), bytes(&saved));
        assert!(restored.clock.clock >= saved.clock.clock);
        let timer = |state: &ChipsState| {
            state
                .timer
                .channels
                .map(|channel| (channel.mode, channel.count))
        };
        assert_eq!(timer(&restored), timer(&saved));
    }
}
