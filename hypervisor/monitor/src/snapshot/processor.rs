//! Tells whether a machine offers its guests the processor of a snapshot.
//!
//! A restored guest has the CPUID of the snapshot. So the machine may offer more, as it does with a new kernel or microcode:
//! further leaves, and further bits where each bit is a feature of its own. All other values must be the same.

use kvm_bindings::kvm_cpuid_entry2;

use super::SnapshotError;

/// Refuses a processor that is not offered.
///
/// # Errors
/// The first leaf that is not offered.
pub(super) fn check(
    saved: &[kvm_cpuid_entry2],
    here: &[kvm_cpuid_entry2],
) -> Result<(), SnapshotError> {
    let is_offered = |saved: &&kvm_cpuid_entry2| {
        let same =
            |here: &&kvm_cpuid_entry2| (here.function, here.index) == (saved.function, saved.index);
        match here.iter().find(same) {
            Some(here) => offers(here, saved),
            None => registers(saved) == [0; 4],
        }
    };
    match saved.iter().find(|saved| !is_offered(saved)) {
        Some(entry) => Err(SnapshotError::Processor {
            leaf: entry.function,
        }),
        None => Ok(()),
    }
}

fn registers(entry: &kvm_cpuid_entry2) -> [u32; 4] {
    [entry.eax, entry.ebx, entry.ecx, entry.edx]
}

/// Meaning of a register.
#[derive(Clone, Copy)]
enum Meaning {
    /// A value, such as a name or a width, which must be the same.
    Value,
    /// Features, and bits of values among them. A machine may offer more features.
    Features { values: u32 },
    /// A number of leaves or bytes, which may be larger.
    Size,
}

fn offers(here: &kvm_cpuid_entry2, saved: &kvm_cpuid_entry2) -> bool {
    let pairs = registers(here).into_iter().zip(registers(saved));
    pairs
        .zip(meanings(saved.function, saved.index))
        .all(|((here, saved), meaning)| match meaning {
            Meaning::Value => here == saved,
            Meaning::Features { values } => (here ^ saved) & values == 0 && saved & !here == 0,
            Meaning::Size => here >= saved,
        })
}

/// Returns the meanings of a leaf's registers (Intel's SDM and AMD's APM under CPUID; KVM's cpuid.rst).
fn meanings(function: u32, index: u32) -> [Meaning; 4] {
    /// Leaf 7: the FPU keeps no pointers of data and no selectors. A processor with such a bit can do less.
    const LESS: u32 = 1 << 6 | 1 << 13;
    /// Leaf 7: a width.
    const MAWAU: u32 = 0x1f << 17;
    /// Leaf 8000_0008: the width of addresses that a guest can map, 0 from KVM before Linux 6.10.
    const GUEST_WIDTH: u32 = 0xff << 16;
    const V: Meaning = Meaning::Value;
    const S: Meaning = Meaning::Size;
    const F: Meaning = Meaning::Features { values: 0 };
    const fn with(values: u32) -> Meaning {
        Meaning::Features { values }
    }
    match (function, index) {
        (0 | 0x4000_0000 | 0x8000_0000, _) => [S, V, V, V],
        (1, _) => [V, V, F, F],
        (7, 0) => [S, with(LESS), with(MAWAU), F],
        (7, _) | (0x4000_0001, _) => [F, F, F, F],
        // The states of XSAVE, and the bytes that all of them take.
        (0xd, 0) => [F, S, S, F],
        (0xd, 1) => [F, S, F, F],
        (0x8000_0001, _) => [V, V, F, F],
        (0x8000_0007, _) => [V, V, V, F],
        (0x8000_0008, _) => [with(!GUEST_WIDTH), F, V, V],
        (0x8000_000a, _) => [V, V, V, F],
        (0x8000_001f | 0x8000_0021, _) => [F, V, V, V],
        _ => [V; 4],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(function: u32, index: u32, [eax, ebx, ecx, edx]: [u32; 4]) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 {
            function,
            index,
            eax,
            ebx,
            ecx,
            edx,
            ..Default::default()
        }
    }

    fn refused(saved: kvm_cpuid_entry2, here: &[kvm_cpuid_entry2]) -> Option<u32> {
        match check(&[saved], here) {
            Ok(()) => None,
            Err(SnapshotError::Processor { leaf }) => Some(leaf),
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn a_machine_may_offer_more_features_and_no_fewer() {
        for (function, index, saved, more) in [
            (0, 0, [0xd, 1, 2, 3], [0x10, 1, 2, 3]),
            (1, 0, [5, 6, 0b100, 0b10], [5, 6, 0b110, 0b11]),
            (7, 0, [0, 1, 1, 1 << 10], [2, 3, 3, 1 << 10 | 1 << 26]),
            (7, 2, [0, 0, 0, 1], [0, 0, 0, 3]),
            (0xd, 0, [7, 0x340, 0x340, 0], [0xe7, 0x340, 0xa88, 0]),
            (0x4000_0001, 0, [1, 0, 0, 0], [3, 0, 0, 0]),
            (
                0x8000_0008,
                0,
                [0x3030, 1 << 12, 0, 0],
                [0x3030, 3 << 12, 0, 0],
            ),
        ] {
            let (saved, more) = (entry(function, index, saved), entry(function, index, more));
            let others = [entry(0x24, 0, [1; 4]), more];
            assert_eq!(refused(saved, &others), None, "{function:#x}");
            assert_eq!(refused(more, &[saved]), Some(function), "{function:#x}");
            assert_eq!(refused(saved, &others[..1]), Some(function));
        }
    }

    #[test]
    fn other_values_and_bits_that_take_something_away_are_refused() {
        for (function, index, saved, other) in [
            (0, 0, [1, 2, 3, 4], [1, 2, 3, 5]),
            (1, 0, [0x806f8, 0, 0, 0], [0x806f9, 0, 0, 0]),
            (7, 0, [0; 4], [0, 1 << 13, 0, 0]),
            (7, 0, [0; 4], [0, 0, 1 << 17, 0]),
            (0xd, 2, [256, 576, 0, 0], [256, 640, 0, 0]),
            (0x8000_0008, 0, [0x3030, 0, 0, 0], [0x3034, 0, 0, 0]),
            (0x15, 0, [1, 2, 3, 0], [1, 2, 4, 0]),
        ] {
            let (saved, other) = (entry(function, index, saved), entry(function, index, other));
            assert_eq!(refused(saved, &[other]), Some(function), "{function:#x}");
        }
        let empty = entry(0x1c, 0, [0; 4]);
        assert_eq!(refused(empty, &[]), None, "a leaf without contents");
    }
}
