//! Probes whether this machine's KVM can run Linux guests, payloads only, or neither.

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES};
use kvm_ioctls::{Cap, Kvm};

/// The API version of every KVM since 2007.
const KVM_API_VERSION: i32 = 12;

/// Leaf 1 ECX: SSSE3, FMA, SSE4.1, SSE4.2, MOVBE, POPCNT, AES, AVX, F16C, RDRAND. KVM changes none of
/// these bits at run time.
const LEAF_1_ECX: u32 = 1 << 9
    | 1 << 12
    | 1 << 19
    | 1 << 20
    | 1 << 22
    | 1 << 23
    | 1 << 25
    | 1 << 28
    | 1 << 29
    | 1 << 30;
/// Leaf 7 EBX: FSGSBASE, BMI1, AVX2, BMI2, ERMS, RDSEED, ADX, SMAP.
const LEAF_7_EBX: u32 = 1 | 1 << 3 | 1 << 5 | 1 << 8 | 1 << 9 | 1 << 18 | 1 << 19 | 1 << 20;

/// Kinds of guests that this machine's KVM can run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KvmCaps {
    /// KVM is not usable.
    Missing {
        /// One line with the reason and the remedy.
        why: String,
    },
    /// KVM is there, and this process may not use it.
    Denied {
        /// One line with the reason and the remedy.
        why: String,
    },
    /// KVM runs payloads (programs in user mode without a kernel), but not Linux.
    PayloadOnly {
        /// One line with the reason and the remedy.
        why: String,
    },
    /// KVM runs Linux guests.
    Linux,
}

impl KvmCaps {
    /// Returns the reason for a limitation, if there is one.
    pub fn why(&self) -> Option<&str> {
        match self {
            Self::Missing { why } | Self::Denied { why } | Self::PayloadOnly { why } => Some(why),
            Self::Linux => None,
        }
    }
}

/// Probes `/dev/kvm`.
///
/// A paravirtual nested KVM runs the guest's user mode on the real processor but interprets its
/// kernel, incompletely: stock Linux does not boot on it. Such a KVM ignores KVM_SET_CPUID2, which
/// identifies it: cleared bits are set again when the CPUID is read back.
pub fn probe() -> KvmCaps {
    let missing = |what: &str, error: &dyn std::fmt::Display| KvmCaps::Missing {
        why: format!("{what}: {error}; use --host emulated"),
    };
    let kvm = match Kvm::new() {
        Ok(kvm) => kvm,
        Err(error) => {
            return denied(error.errno())
                .unwrap_or_else(|| missing("/dev/kvm cannot be used", &error));
        }
    };
    let version = kvm.get_api_version();
    if version != KVM_API_VERSION {
        return missing("/dev/kvm has an unknown API version", &version);
    }
    for (cap, name) in [
        (Cap::Irqchip, "an interrupt controller"),
        (Cap::Irqfd, "irqfd"),
        (Cap::Ioeventfd, "ioeventfd"),
        (Cap::UserMemory, "user memory"),
        (Cap::ImmediateExit, "immediate_exit"),
    ] {
        if !kvm.check_extension(cap) {
            return missing("/dev/kvm lacks what a guest needs", &name);
        }
    }
    match returned_bits(&kvm) {
        Err(error) => missing("KVM cannot make a VM", &error),
        Ok((0, 0)) => KvmCaps::Linux,
        Ok((leaf_1, leaf_7)) => KvmCaps::PayloadOnly {
            why: format!(
                "this machine's KVM interprets guest kernels and ignores the CPUID it is given \
                 (cleared bits came back: leaf 1 {leaf_1:#x}, leaf 7 {leaf_7:#x}), so Linux guests \
                 do not boot on it: use --host emulated"
            ),
        },
    }
}

/// Returns what to do where KVM is there and this process may not use it; `None` for other errors.
fn denied(errno: i32) -> Option<KvmCaps> {
    let remedy = match errno {
        libc::EACCES => {
            "add the user to the group of /dev/kvm (`sudo usermod --append --groups kvm USER`, and log in again), or, \
             where it has none, let root run `chgrp kvm /dev/kvm` and `chmod 660 /dev/kvm`"
        }
        libc::EPERM => {
            "let the container or the cgroup have the device, as `docker run --device /dev/kvm` does"
        }
        _ => return None,
    };
    let error = kvm_ioctls::Error::new(errno);
    let why = format!(
        "/dev/kvm is there, and this user may not open it ({error}): {remedy}; or use --host emulated"
    );
    Some(KvmCaps::Denied { why })
}

/// Clears bits of leaves 1 and 7 and returns the bits that are set again when they are read back.
fn returned_bits(kvm: &Kvm) -> Result<(u32, u32), kvm_ioctls::Error> {
    let vm = kvm.create_vm()?;
    let vcpu = vm.create_vcpu(0)?;
    let mut cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?;
    for entry in cpuid.as_mut_slice() {
        match (entry.function, entry.index) {
            (1, _) => entry.ecx &= !LEAF_1_ECX,
            (7, 0) => entry.ebx &= !LEAF_7_EBX,
            _ => {}
        }
    }
    vcpu.set_cpuid2(&cpuid)?;
    Ok(set_bits(&vcpu.get_cpuid2(KVM_MAX_CPUID_ENTRIES)?))
}

fn set_bits(cpuid: &CpuId) -> (u32, u32) {
    cpuid
        .as_slice()
        .iter()
        .fold((0, 0), |(leaf_1, leaf_7), entry| {
            match (entry.function, entry.index) {
                (1, _) => (leaf_1 | entry.ecx & LEAF_1_ECX, leaf_7),
                (7, 0) => (leaf_1, leaf_7 | entry.ebx & LEAF_7_EBX),
                _ => (leaf_1, leaf_7),
            }
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kvm_that_may_not_be_used_is_not_a_missing_one() {
        let why = |errno| denied(errno).and_then(|caps| caps.why().map(str::to_owned));
        assert!(why(libc::EACCES).is_some_and(|why| why.contains("--groups kvm")));
        assert!(why(libc::EPERM).is_some_and(|why| why.contains("--device /dev/kvm")));
        assert_eq!(why(libc::ENOENT), None);
    }

    #[test]
    fn every_lack_says_what_to_do() {
        let caps = probe();
        if let Some(why) = caps.why() {
            assert!(why.contains("--host emulated"), "{why}");
            assert!(!why.contains('\n'), "{why}");
        }
    }
}
