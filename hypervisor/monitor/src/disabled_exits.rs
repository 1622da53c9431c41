//! Disables exits of a VM that its vCPUs do not need.

use kvm_bindings::kvm_enable_cap;
use kvm_ioctls::{Kvm, VmFd};

use crate::vm::{VmError, kvm_error};

/// VM exits to disable (KVM_CAP_X86_DISABLE_EXITS).
///
/// With PAUSE exits enabled, a vCPU that spins on a word in shared memory exits every few thousand
/// iterations; with HLT exits enabled, an idle vCPU exits. Disable PAUSE exits for a VM that polls
/// while another processor works for it. Disable HLT exits only if every vCPU has a processor of its
/// own: such a vCPU occupies its processor while it is idle, KVM cannot detect that, and the thread
/// that the vCPU waits for may never be scheduled. On hosts with few processors leave both enabled
/// (the default).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DisabledExits {
    /// Disables exits on PAUSE.
    pub pause: bool,
    /// Disables exits on HLT.
    pub halt: bool,
}

impl DisabledExits {
    /// Returns the exits that this machine's KVM can disable.
    pub fn offered() -> Result<Self, VmError> {
        let kvm = Kvm::new().map_err(kvm_error("/dev/kvm"))?;
        let offered = kvm.check_extension_raw(kvm_bindings::KVM_CAP_X86_DISABLE_EXITS.into());
        let offers = |bit: u32| offered.cast_unsigned() & bit != 0;
        Ok(Self {
            pause: offers(kvm_bindings::KVM_X86_DISABLE_EXITS_PAUSE),
            halt: offers(kvm_bindings::KVM_X86_DISABLE_EXITS_HLT),
        })
    }

    pub(crate) fn apply(self, vm: &VmFd) -> Result<(), VmError> {
        use kvm_bindings::{
            KVM_CAP_X86_DISABLE_EXITS, KVM_X86_DISABLE_EXITS_HLT, KVM_X86_DISABLE_EXITS_PAUSE,
        };
        let bit = |on: bool, bit: u32| if on { u64::from(bit) } else { 0 };
        let wanted = bit(self.pause, KVM_X86_DISABLE_EXITS_PAUSE)
            | bit(self.halt, KVM_X86_DISABLE_EXITS_HLT);
        if wanted == 0 {
            return Ok(());
        }
        let offered = vm.check_extension_raw(u64::from(KVM_CAP_X86_DISABLE_EXITS));
        let offered = u64::try_from(offered).unwrap_or(0);
        if wanted & !offered != 0 {
            return Err(VmError::DisableExits { wanted, offered });
        }
        vm.enable_cap(&kvm_enable_cap {
            cap: KVM_CAP_X86_DISABLE_EXITS,
            args: [wanted, 0, 0, 0],
            ..Default::default()
        })
        .map_err(kvm_error("to disable exits"))
    }
}
