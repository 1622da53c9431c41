//! Sets up vCPUs: CPUID, MSRs, local APIC pins, and long mode at the Linux entry point.

use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, Msrs, kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs,
};
use kvm_ioctls::{Cap, Kvm, VcpuFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use crate::boot::ZERO_PAGE;
use crate::ram::GuestRam;

/// Address of the boot processor's GDT.
const GDT: u64 = 0x500;
/// Address of the boot processor's page tables: one PML4, one PDPT, four page directories.
const PAGE_TABLES: u64 = 0x9000;
const BOOT_STACK: u64 = 0x8ff0;

const MSR_IA32_MISC_ENABLE: u32 = 0x1a0;
const MISC_ENABLE_FAST_STRING: u64 = 1;
const MSR_MTRR_DEF_TYPE: u32 = 0x2ff;
/// MTRRs enabled, default type write-back, so that the window is cached.
const MTRR_WRITE_BACK: u64 = 1 << 11 | 6;

pub(crate) const CR0_PE: u64 = 1;
pub(crate) const CR0_MP: u64 = 1 << 1;
pub(crate) const CR0_ET: u64 = 1 << 4;
pub(crate) const CR0_NE: u64 = 1 << 5;
pub(crate) const CR0_WP: u64 = 1 << 16;
pub(crate) const CR0_PG: u64 = 1 << 31;
pub(crate) const CR4_PAE: u64 = 1 << 5;
pub(crate) const CR4_OSFXSR: u64 = 1 << 9;
pub(crate) const CR4_OSXMMEXCPT: u64 = 1 << 10;
pub(crate) const EFER_LME: u64 = 1 << 8;
pub(crate) const EFER_LMA: u64 = 1 << 10;
pub(crate) const EFER_NX: u64 = 1 << 11;
pub(crate) const EFER_SVME: u64 = 1 << 12;

/// Error from setting up a processor.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// KVM refused a setting.
    #[error("KVM refuses to set {what} of vCPU {vcpu}")]
    Set {
        /// The setting.
        what: &'static str,
        /// Number of the vCPU.
        vcpu: u8,
        /// Error from KVM.
        source: kvm_ioctls::Error,
    },
    /// A table of the processor cannot be written.
    #[error("cannot write the boot processor's {what} to guest memory")]
    Write {
        /// The table.
        what: &'static str,
        /// Underlying error.
        source: GuestMemoryError,
    },
    /// KVM_GET_SUPPORTED_CPUID failed.
    #[error("KVM does not tell which CPUID it supports")]
    SupportedCpuid(#[source] kvm_ioctls::Error),
}

/// Bits of virtualization in ECX: of Intel's processors in leaf 1, of AMD's in leaf 0x8000_0001.
const VMX: u32 = 1 << 5;
const SVM: u32 = 1 << 2;

/// Bit of the local APIC's timer with deadlines in ECX of leaf 1. KVM leaves it to the monitor.
const TSC_DEADLINE: u32 = 1 << 24;

/// Returns the CPUID that KVM supports, before its adaptation to one processor.
pub(crate) fn supported_cpuid(kvm: &Kvm) -> Result<CpuId, CpuError> {
    let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES);
    let mut supported = supported.map_err(CpuError::SupportedCpuid)?;
    if kvm.check_extension(Cap::TscDeadlineTimer) {
        let mut entries = supported.as_mut_slice().iter_mut();
        if let Some(features) = entries.find(|entry| entry.function == 1) {
            features.ecx |= TSC_DEADLINE;
        }
    }
    Ok(supported)
}

/// Returns the CPUID of processor `id`: each processor is a separate package with one thread. It offers no
/// virtualization, so that a guest does not reach KVM's code for guests of guests.
pub(crate) fn cpuid_of(supported: &CpuId, id: u8) -> CpuId {
    let mut cpuid = supported.clone();
    adapt(&mut cpuid, id.into());
    cpuid
}

/// Returns the number of bits of the guest's physical addresses: those of the processor, or fewer if the tables that
/// translate them map fewer.
pub(crate) fn address_bits(cpuid: &CpuId) -> u32 {
    /// Without the leaf, a processor has 36.
    const LEAST: u32 = 36;
    let mut entries = cpuid.as_slice().iter();
    let sizes = entries.find(|entry| entry.function == 0x8000_0008);
    sizes.map_or(LEAST, |sizes| {
        match (sizes.eax & 0xff, sizes.eax >> 16 & 0xff) {
            (bits, 0) => bits,
            (bits, mapped) => bits.min(mapped),
        }
    })
}

fn adapt(cpuid: &mut CpuId, id: u32) {
    for entry in cpuid.as_mut_slice() {
        match (entry.function, entry.index) {
            (1, _) => {
                entry.ebx = entry.ebx & 0xffff | 1 << 16 | id << 24;
                entry.edx &= !(1 << 28); // one thread per package
                entry.ecx |= 1 << 31; // there is a hypervisor
                entry.ecx &= !VMX;
            }
            (4, _) => entry.eax &= 0x3fff, // one core, one thread per cache
            (0xb | 0x1f, level) => {
                entry.eax = 0;
                entry.ebx = 1;
                entry.ecx = level & 0xff | if level < 2 { (level + 1) << 8 } else { 0 };
                entry.edx = id;
            }
            (0x8000_0001, _) => entry.ecx &= !(1 << 1 | SVM), // CmpLegacy: no cores to count
            (0x8000_0008, _) => entry.ecx = 0,
            (0x8000_001e, _) => {
                entry.eax = id;
                entry.ebx = id;
                entry.ecx = 0;
            }
            _ => {}
        }
    }
}

/// Sets the MSRs that a kernel expects firmware to have set.
pub(crate) fn set_msrs(vcpu: &VcpuFd, id: u8) -> Result<(), CpuError> {
    for (index, data) in [
        (MSR_IA32_MISC_ENABLE, MISC_ENABLE_FAST_STRING),
        (MSR_MTRR_DEF_TYPE, MTRR_WRITE_BACK),
    ] {
        let msrs = Msrs::from_entries(&[kvm_msr_entry {
            index,
            data,
            ..Default::default()
        }]);
        // Creating a list of one entry cannot fail.
        if let Ok(msrs) = msrs {
            vcpu.set_msrs(&msrs).map_err(|source| CpuError::Set {
                what: "an MSR",
                vcpu: id,
                source,
            })?;
        }
    }
    Ok(())
}

/// Connects the interrupt pins of a local APIC: LINT0 to the 8259, LINT1 to NMI.
pub(crate) fn set_lapic_pins(vcpu: &VcpuFd, id: u8) -> Result<(), CpuError> {
    const LVT_LINT0: usize = 0x350;
    const LVT_LINT1: usize = 0x360;
    const EXT_INT: u32 = 0x700;
    const NMI: u32 = 0x400;
    let mut lapic = vcpu.get_lapic().map_err(|source| CpuError::Set {
        what: "the local APIC",
        vcpu: id,
        source,
    })?;
    for (offset, value) in [(LVT_LINT0, EXT_INT), (LVT_LINT1, NMI)] {
        for (reg, byte) in lapic.regs[offset..offset + 4]
            .iter_mut()
            .zip(value.to_le_bytes())
        {
            *reg = byte.cast_signed();
        }
    }
    vcpu.set_lapic(&lapic).map_err(|source| CpuError::Set {
        what: "the local APIC",
        vcpu: id,
        source,
    })
}

/// Sets the boot processor's registers to the kernel's 64-bit `entry`, with the first 4 GiB identity-mapped.
pub(crate) fn enter_linux(vcpu: &VcpuFd, ram: &GuestRam, entry: u64) -> Result<(), CpuError> {
    let set = |what| {
        move |source| CpuError::Set {
            what,
            vcpu: 0,
            source,
        }
    };
    write_gdt(ram).map_err(|source| CpuError::Write {
        what: "GDT",
        source,
    })?;
    write_identity_map(ram).map_err(|source| CpuError::Write {
        what: "page tables",
        source,
    })?;
    let mut sregs = vcpu.get_sregs().map_err(set("system registers"))?;
    long_mode(&mut sregs, PAGE_TABLES);
    let code = flat_segment(0x10, 0xb, 0, true);
    let data = flat_segment(0x18, 0x3, 0, false);
    sregs.cs = code;
    for segment in [
        &mut sregs.ds,
        &mut sregs.es,
        &mut sregs.fs,
        &mut sregs.gs,
        &mut sregs.ss,
    ] {
        *segment = data;
    }
    sregs.tr = task_segment();
    sregs.gdt.base = GDT;
    sregs.gdt.limit = 4 * 8 - 1;
    sregs.idt.base = 0;
    sregs.idt.limit = 0;
    vcpu.set_sregs(&sregs).map_err(set("system registers"))?;
    vcpu.set_regs(&kvm_regs {
        rip: entry,
        rsp: BOOT_STACK,
        rbp: BOOT_STACK,
        rsi: ZERO_PAGE,
        rflags: 2,
        ..Default::default()
    })
    .map_err(set("registers"))
}

/// Enables long mode and paging with the page tables at `cr3`.
pub(crate) fn long_mode(sregs: &mut kvm_sregs, cr3: u64) {
    sregs.cr3 = cr3;
    sregs.cr4 |= CR4_PAE;
    sregs.cr0 = CR0_PE | CR0_ET | CR0_NE | CR0_MP | CR0_PG;
    sregs.efer |= EFER_LME | EFER_LMA;
}

/// Returns a flat segment; `kind` is the descriptor's type, `dpl` its privilege level.
pub(crate) fn flat_segment(selector: u16, kind: u8, dpl: u8, code: bool) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_: kind,
        present: 1,
        dpl,
        db: u8::from(!code),
        s: 1,
        l: u8::from(code),
        g: 1,
        avl: 0,
        unusable: 0,
        padding: 0,
    }
}

/// Returns a busy 64-bit TSS, which VM entry requires.
pub(crate) fn task_segment() -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: 0x67,
        selector: 0x20,
        type_: 0xb,
        present: 1,
        ..Default::default()
    }
}

fn write_gdt(ram: &GuestRam) -> Result<(), GuestMemoryError> {
    // The boot protocol requires code at selector 0x10 and data at 0x18.
    const TABLE: [u64; 4] = [0, 0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff];
    for (index, descriptor) in (0..).zip(TABLE) {
        ram.write_obj(descriptor, GuestAddress(GDT + 8 * index))?;
    }
    Ok(())
}

fn write_identity_map(ram: &GuestRam) -> Result<(), GuestMemoryError> {
    const PRESENT_WRITABLE: u64 = 0b11;
    const LARGE: u64 = 1 << 7;
    let pdpt = PAGE_TABLES + 0x1000;
    ram.write_obj(pdpt | PRESENT_WRITABLE, GuestAddress(PAGE_TABLES))?;
    for gib in 0..4 {
        let directory = pdpt + 0x1000 * (gib + 1);
        ram.write_obj(directory | PRESENT_WRITABLE, GuestAddress(pdpt + 8 * gib))?;
        for index in 0..512 {
            let address = gib << 30 | index << 21;
            ram.write_obj(
                address | PRESENT_WRITABLE | LARGE,
                GuestAddress(directory + 8 * index),
            )?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use kvm_bindings::kvm_cpuid_entry2;

    use super::*;

    #[test]
    fn addresses_have_the_bits_of_the_processor_or_of_the_tables_that_map_them() {
        let of = |function, eax| {
            let entry = kvm_cpuid_entry2 {
                function,
                eax,
                ..Default::default()
            };
            address_bits(&CpuId::from_entries(&[entry]).expect("one entry"))
        };
        assert_eq!(of(0x8000_0008, 0x3027), 39);
        assert_eq!(of(0x8000_0008, 0x30_3934), 48);
        assert_eq!(of(0x8000_0008, 0x34_302e), 46);
        assert_eq!(of(1, 0x3027), 36);
    }

    #[test]
    fn a_guest_is_offered_no_virtualization_and_its_own_number() {
        let all = |function| kvm_cpuid_entry2 {
            function,
            ecx: u32::MAX,
            ..Default::default()
        };
        let mut cpuid = CpuId::from_entries(&[all(1), all(0x8000_0001)]).expect("two entries");
        adapt(&mut cpuid, 3);
        let [features, extended] = cpuid.as_slice() else {
            panic!("two entries");
        };
        assert_eq!(features.ecx, !VMX);
        assert_eq!(features.ebx >> 24, 3);
        assert_eq!(extended.ecx & (SVM | 1 << 1), 0);
    }
}
