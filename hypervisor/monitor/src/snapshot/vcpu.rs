//! Saves and restores the state that KVM has of a vCPU.
//!
//! The order of the calls matters (KVM API, and kvm_main.c): KVM_GET_MP_STATE makes the local APIC accept pending INIT and
//! SIPI, so that it comes first. A restored local APIC needs its base from the system registers, a deadline of the timer
//! needs the local APIC and the TSC.

use std::ops::RangeInclusive;

use kvm_bindings::{
    Msrs, kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs,
    kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{Kvm, VcpuFd};
use serde::{Deserialize, Serialize};

use super::SnapshotError;
use crate::cpu::EFER_SVME;

const MSR_TSC: u32 = 0x10;
const MSR_TSC_DEADLINE: u32 = 0x6e0;

/// MSRs that KVM keeps and does not list (arch/x86/kvm/x86.c, KVM_GET_MSR_INDEX_LIST): the memory types and the control of debugging.
const UNLISTED: [RangeInclusive<u32>; 6] = [
    MSR_DEBUGCTL..=MSR_DEBUGCTL,
    MSR_MTRR_FIRST..=MSR_MTRR_LAST,
    0x250..=0x250,
    0x258..=0x259,
    0x268..=0x26f,
    0x2ff..=0x2ff,
];
const MSR_DEBUGCTL: u32 = 0x1d9;
/// Bases and masks of the eight ranges that KVM has.
const MSR_MTRR_FIRST: u32 = 0x200;
const MSR_MTRR_LAST: u32 = 0x20f;

/// Entries that KVM takes in one call (`MAX_IO_MSRS`).
const MOST_MSRS: usize = 256;

/// Difference of two TSC frequencies that a guest's clocks tolerate, in parts of a million. NTP corrects 500.
const TOLERATED_PPM: u64 = 250;

/// State of one vCPU.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct VcpuState {
    mp_state: kvm_mp_state,
    regs: kvm_regs,
    sregs: kvm_sregs,
    xsave: kvm_xsave,
    xcrs: kvm_xcrs,
    debug_regs: kvm_debugregs,
    lapic: kvm_lapic_state,
    /// Index and value.
    msrs: Vec<(u32, u64)>,
    events: kvm_vcpu_events,
    tsc_khz: u32,
}

fn get<T>(what: &'static str, got: Result<T, kvm_ioctls::Error>) -> Result<T, SnapshotError> {
    got.map_err(|source| SnapshotError::Get { what, source })
}

fn set<T>(what: &'static str, done: Result<T, kvm_ioctls::Error>) -> Result<T, SnapshotError> {
    done.map_err(|source| SnapshotError::Set { what, source })
}

impl VcpuState {
    /// Reads the state of a vCPU that does not run and has no unfinished access. `indices` are those of [`msr_indices`].
    pub fn save(vcpu: &VcpuFd, indices: &[u32]) -> Result<Self, SnapshotError> {
        let mp_state = get("the multiprocessing state", vcpu.get_mp_state())?;
        let lapic = get("the local APIC", vcpu.get_lapic())?;
        let mut msrs = save_msrs(vcpu, indices)?;
        catch_expired_deadline(&mut msrs);
        Ok(Self {
            mp_state,
            regs: get("the registers", vcpu.get_regs())?,
            sregs: get("the system registers", vcpu.get_sregs())?,
            xsave: get("the extended state", vcpu.get_xsave())?,
            xcrs: get("the extended control registers", vcpu.get_xcrs())?,
            debug_regs: get("the debug registers", vcpu.get_debug_regs())?,
            lapic,
            msrs,
            events: get("the pending events", vcpu.get_vcpu_events())?,
            tsc_khz: get("the frequency of the TSC", vcpu.get_tsc_khz())?,
        })
    }

    /// Writes the state to a new vCPU, which has its CPUID. `indices` are those of [`msr_indices`]: the monitor may set MSRs
    /// that a guest may not.
    pub fn restore(&self, vcpu: &VcpuFd, indices: &[u32]) -> Result<(), SnapshotError> {
        if let Some(&(index, _)) = self.msrs.iter().find(|(index, _)| !indices.contains(index)) {
            return Err(SnapshotError::MsrIndex { index });
        }
        // KVM takes the bit whatever the processor's features say. It refuses Intel's, VMXE of CR4.
        if self.sregs.efer & EFER_SVME != 0 {
            return Err(SnapshotError::Virtualization);
        }
        let here = get("the frequency of the TSC", vcpu.get_tsc_khz())?;
        if !is_same_frequency(self.tsc_khz, here) {
            return Err(SnapshotError::Frequency {
                saved: self.tsc_khz,
                here,
            });
        }
        set(
            "the multiprocessing state",
            vcpu.set_mp_state(self.mp_state),
        )?;
        set("the registers", vcpu.set_regs(&self.regs))?;
        set("the system registers", vcpu.set_sregs(&self.sregs))?;
        set("the extended control registers", vcpu.set_xcrs(&self.xcrs))?;
        // SAFETY: KVM reads more than the 4096 bytes of `kvm_xsave` only if the process has asked for dynamic features of
        // the state (ARCH_REQ_XCOMP_GUEST_PERM), which this one does not.
        let done = unsafe { vcpu.set_xsave(&self.xsave) };
        set("the extended state", done)?;
        set("the debug registers", vcpu.set_debug_regs(&self.debug_regs))?;
        set("the local APIC", vcpu.set_lapic(&self.lapic))?;
        restore_msrs(vcpu, &self.msrs)?;
        set("the pending events", vcpu.set_vcpu_events(&self.events))
    }
}

/// Returns the indices of the MSRs of a snapshot.
pub(crate) fn msr_indices(kvm: &Kvm) -> Result<Vec<u32>, SnapshotError> {
    let list = get("the list of MSRs", kvm.get_msr_index_list())?;
    let mut indices = list.as_slice().to_vec();
    let unlisted = UNLISTED.into_iter().flatten();
    let unlisted: Vec<_> = unlisted.filter(|index| !indices.contains(index)).collect();
    indices.extend(unlisted);
    Ok(indices)
}

/// Returns the entries as KVM takes them, which is at most [`MOST_MSRS`].
fn entries(msrs: &[(u32, u64)]) -> Option<Msrs> {
    let entries: Vec<_> = msrs
        .iter()
        .take(MOST_MSRS)
        .map(|&(index, data)| kvm_msr_entry {
            index,
            data,
            ..Default::default()
        })
        .collect();
    Msrs::from_entries(&entries).ok()
}

/// Reads MSRs. KVM also lists MSRs that depend on the CPUID and cannot be read: these are left out.
fn save_msrs(vcpu: &VcpuFd, indices: &[u32]) -> Result<Vec<(u32, u64)>, SnapshotError> {
    let wanted: Vec<_> = indices.iter().map(|index| (*index, 0)).collect();
    let mut saved = Vec::with_capacity(wanted.len());
    let mut rest = &wanted[..];
    while let Some(mut msrs) = entries(rest).filter(|_| !rest.is_empty()) {
        let count = get("the MSRs", vcpu.get_msrs(&mut msrs))?;
        let read = msrs.as_slice().iter().take(count);
        saved.extend(read.map(|entry| (entry.index, entry.data)));
        // KVM stops before an entry that it cannot read.
        let passed = if count == msrs.as_slice().len() {
            count
        } else {
            count + 1
        };
        rest = rest.get(passed..).unwrap_or_default();
    }
    // The TSC before what depends on it, and the deadline last.
    saved.sort_by_key(|(index, _)| (*index == MSR_TSC_DEADLINE, *index != MSR_TSC));
    Ok(saved)
}

/// Sets a deadline that has passed. KVM reports 0 for a timer that has fired and whose interrupt is not in the local APIC
/// yet; without a deadline the guest would wait for that interrupt for ever. A guest that has set none has no use for it in
/// another mode of its timer, and ignores one interrupt more in this one.
fn catch_expired_deadline(msrs: &mut [(u32, u64)]) {
    let find = |wanted| msrs.iter().position(|(index, _)| *index == wanted);
    if let (Some(tsc), Some(deadline)) = (find(MSR_TSC), find(MSR_TSC_DEADLINE))
        && msrs[deadline].1 == 0
    {
        msrs[deadline].1 = msrs[tsc].1;
    }
}

/// Writes MSRs. One that KVM refuses must have the value already.
fn restore_msrs(vcpu: &VcpuFd, msrs: &[(u32, u64)]) -> Result<(), SnapshotError> {
    let mut rest = msrs;
    while let Some(wanted) = entries(rest).filter(|_| !rest.is_empty()) {
        let count = set("the MSRs", vcpu.set_msrs(&wanted))?;
        rest = rest.get(count..).unwrap_or_default();
        if count == wanted.as_slice().len() {
            continue;
        }
        let Some(((index, value), others)) = rest.split_first() else {
            break;
        };
        if save_msrs(vcpu, &[*index])?.first() != Some(&(*index, *value)) {
            return Err(SnapshotError::Msr {
                index: *index,
                value: *value,
            });
        }
        rest = others;
    }
    Ok(())
}

fn is_same_frequency(saved: u32, here: u32) -> bool {
    u64::from(saved.abs_diff(here)) * 1_000_000 <= u64::from(here) * TOLERATED_PPM
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expired_deadline_is_due_at_once_and_another_one_stays() {
        let mut msrs = [(MSR_TSC, 1000), (7, 1), (MSR_TSC_DEADLINE, 0)];
        catch_expired_deadline(&mut msrs);
        assert_eq!(msrs, [(MSR_TSC, 1000), (7, 1), (MSR_TSC_DEADLINE, 1000)]);
        let mut msrs = [(MSR_TSC, 1000), (MSR_TSC_DEADLINE, 2000)];
        catch_expired_deadline(&mut msrs);
        assert_eq!(msrs[1], (MSR_TSC_DEADLINE, 2000));
        catch_expired_deadline(&mut [(MSR_TSC_DEADLINE, 0)]);
    }

    #[test]
    fn frequencies_may_differ_as_much_as_a_clock_is_corrected() {
        assert!(is_same_frequency(3_000_000, 3_000_000));
        assert!(is_same_frequency(3_000_700, 3_000_000));
        assert!(!is_same_frequency(3_000_800, 3_000_000));
        assert!(!is_same_frequency(0, 3_000_000));
        assert!(!is_same_frequency(u32::MAX, 1));
    }

    #[test]
    fn a_vcpu_has_the_state_of_another_one() {
        const STAR: u32 = 0xc000_0081;
        const MSR_MTRR_DEF_TYPE: u32 = 0x2ff;
        let Ok(kvm) = Kvm::new() else {
            return eprintln!("skipped: there is no KVM");
        };
        let indices = msr_indices(&kvm).expect("a list");
        let made = || {
            let vm = kvm.create_vm().expect("a VM");
            crate::chipset::create_chips(&vm).expect("chips");
            let vcpu = vm.create_vcpu(0).expect("a vCPU");
            let supported = crate::cpu::supported_cpuid(&kvm).expect("a list");
            let cpuid = crate::cpu::cpuid_of(&supported, 0);
            vcpu.set_cpuid2(&cpuid).expect("it is supported");
            (vcpu, vm)
        };
        let (vcpu, _vm) = made();
        let regs = kvm_regs {
            rax: 0x1234_5678_9abc_def0,
            rip: 0x10_0000,
            rflags: 2,
            ..Default::default()
        };
        vcpu.set_regs(&regs).expect("registers");
        let mut sregs = vcpu.get_sregs().expect("registers");
        (sregs.cr2, sregs.fs.base, sregs.idt.limit) = (0x1234_5000, 0x7fff_0000, 0x7f);
        vcpu.set_sregs(&sregs).expect("registers");
        let written = [
            (STAR, 0x23_0010_0000_0000),
            // A range of memory, its mask, and another type for the rest.
            (MSR_MTRR_FIRST, 0xe000_0000),
            (MSR_MTRR_FIRST + 1, 0xff_f000_0800),
            (MSR_MTRR_DEF_TYPE, 0xc00),
        ];
        let msrs = entries(&written).expect("few entries");
        assert_eq!(vcpu.set_msrs(&msrs).expect("MSRs"), written.len());
        let mut debug_regs = vcpu.get_debug_regs().expect("registers");
        debug_regs.db[0] = 0x10_1000;
        vcpu.set_debug_regs(&debug_regs).expect("registers");
        let mut lapic = vcpu.get_lapic().expect("registers");
        // The divisor of the timer.
        lapic.regs[0x3e0] = 0xb;
        vcpu.set_lapic(&lapic).expect("registers");
        let mut events = vcpu.get_vcpu_events().expect("events");
        events.nmi.masked = 1;
        vcpu.set_vcpu_events(&events).expect("events");
        let mut saved = VcpuState::save(&vcpu, &indices).expect("a state");
        // XMM0, and the components in use: x87 and SSE.
        saved.xsave.region[40] = 0x5a5a_5a5a;
        saved.xsave.region[128] |= 3;
        let text = serde_json::to_string(&saved).expect("it is text");
        let saved: VcpuState = serde_json::from_str(&text).expect("it is a state");
        let (other, _other_vm) = made();
        saved.restore(&other, &indices).expect("it fits");
        let restored = VcpuState::save(&other, &indices).expect("a state");
        assert_eq!(restored.regs, regs);
        assert_eq!(restored.sregs, sregs);
        assert_eq!(restored.xsave.region[40], 0x5a5a_5a5a);
        assert_eq!(restored.xcrs.xcrs[0].value, saved.xcrs.xcrs[0].value);
        assert_eq!(restored.debug_regs.db[0], 0x10_1000);
        assert_eq!(restored.lapic.regs, saved.lapic.regs);
        assert_eq!(restored.lapic.regs[0x3e0], 0xb);
        assert_eq!(restored.events.nmi.masked, 1);
        let msrs = |state: &VcpuState| -> Vec<(u32, u64)> {
            // Time changes these MSRs.
            let moves = |index: u32| [MSR_TSC, MSR_TSC_DEADLINE].contains(&index);
            let msrs = state.msrs.iter().copied();
            msrs.filter(|(index, _)| !moves(*index)).collect()
        };
        for msr in &written {
            assert!(msrs(&saved).contains(msr), "{msr:x?}");
        }
        assert_eq!(msrs(&restored), msrs(&saved));
        let tsc = |state: &VcpuState| {
            state
                .msrs
                .iter()
                .find(|(index, _)| *index == MSR_TSC)
                .copied()
        };
        assert!(tsc(&restored) > tsc(&saved));
    }

    #[test]
    fn no_snapshot_lets_its_guest_run_virtual_machines() {
        let Ok(kvm) = Kvm::new() else {
            return eprintln!("skipped: there is no KVM");
        };
        let vm = kvm.create_vm().expect("a VM");
        crate::chipset::create_chips(&vm).expect("chips");
        let vcpu = vm.create_vcpu(0).expect("a vCPU");
        let indices = [MSR_TSC];
        let mut state = VcpuState::save(&vcpu, &indices).expect("a state");
        state.sregs.efer |= EFER_SVME;
        assert!(matches!(
            state.restore(&vcpu, &indices),
            Err(SnapshotError::Virtualization)
        ));
    }

    #[test]
    fn an_msr_that_no_snapshot_has_is_not_set() {
        /// The revision of the microcode, which KVM lets the monitor alone set.
        const UCODE_REVISION: u32 = 0x8b;
        let Ok(kvm) = Kvm::new() else {
            return eprintln!("skipped: there is no KVM");
        };
        let vm = kvm.create_vm().expect("a VM");
        crate::chipset::create_chips(&vm).expect("chips");
        let vcpu = vm.create_vcpu(0).expect("a vCPU");
        let indices = [MSR_TSC];
        let mut state = VcpuState::save(&vcpu, &indices).expect("a state");
        state.msrs.push((UCODE_REVISION, 7));
        let refused = state
            .restore(&vcpu, &indices)
            .expect_err("it is not listed");
        assert!(
            matches!(
                refused,
                SnapshotError::MsrIndex {
                    index: UCODE_REVISION
                }
            ),
            "{refused}"
        );
    }
}
