//! Builds the guest's memory map (E820).

use crate::memory::Layout;

/// Usable memory.
pub const RAM: u32 = 1;
/// Memory that the kernel must not use.
pub const RESERVED: u32 = 2;
/// Legacy persistent memory (`E820_TYPE_PRAM`). Linux's `nd_e820` driver makes it a block device, which file systems map
/// directly.
pub const PERSISTENT: u32 = 12;
/// Soft-reserved memory (`E820_TYPE_SOFT_RESERVED`), which Linux's `dax_hmem` driver claims.
pub const SOFT_RESERVED: u32 = 0xefff_ffff;

/// End of conventional memory.
pub const LOW_MEMORY_END: u64 = 0x9_fc00;
/// Start of the firmware area, which holds the ACPI tables.
pub const FIRMWARE_START: u64 = 0xe_0000;
/// Start of memory above the firmware area.
pub const HIGH_MEMORY_START: u64 = 0x10_0000;

/// One entry of the map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// First guest physical address.
    pub start: u64,
    /// Size in bytes.
    pub len: u64,
    /// The E820 type.
    pub kind: u32,
}

/// Builds the map of a layout: ascending, without overlaps.
pub fn map(layout: &Layout) -> Vec<Entry> {
    let mut map = vec![
        Entry {
            start: 0,
            len: LOW_MEMORY_END,
            kind: RAM,
        },
        Entry {
            start: FIRMWARE_START,
            len: HIGH_MEMORY_START - FIRMWARE_START,
            kind: RESERVED,
        },
        Entry {
            start: HIGH_MEMORY_START,
            len: layout.low_ram().end() - HIGH_MEMORY_START,
            kind: RAM,
        },
    ];
    map.extend(layout.ram.iter().skip(1).map(|range| Entry {
        start: range.start,
        len: range.len,
        kind: RAM,
    }));
    map.extend(layout.soft_reserved.iter().map(|range| Entry {
        start: range.start,
        len: range.len,
        kind: SOFT_RESERVED,
    }));
    map.extend(layout.file_memory.map(|range| Entry {
        start: range.start,
        len: range.len,
        kind: PERSISTENT,
    }));
    map
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aperture::{MAX_SLOTS, Slots};
    use proptest::prelude::*;

    #[test]
    fn the_window_is_soft_reserved_and_last() {
        let layout = Layout::new(4096, Some(256 << 20)).expect("layout");
        let map = map(&layout);
        let last = map.last().expect("entries");
        assert_eq!(
            (last.kind, last.start, last.len),
            (SOFT_RESERVED, 5 << 30, 256 << 20)
        );
    }

    #[test]
    fn the_slots_of_an_aperture_are_entries_of_their_own() {
        let slots = Slots {
            count: MAX_SLOTS,
            bytes: 258 << 20,
        };
        let layout = Layout::new(4096, Some(256 << 30)).expect("layout");
        let map = map(&layout.divided(slots));
        let reserved = map.iter().filter(|entry| entry.kind == SOFT_RESERVED);
        assert!(reserved.clone().all(|entry| entry.len == 258 << 20));
        assert_eq!(reserved.count(), 64);
        for pair in map.windows(2).filter(|pair| pair[0].kind == SOFT_RESERVED) {
            assert!(pair[0].start + pair[0].len < pair[1].start, "{pair:?}");
        }
    }

    proptest! {
        #[test]
        fn entries_ascend_without_overlap(
            mib in 16u64..100_000,
            window in proptest::option::of(1u64..10_000),
            files in proptest::option::of(1u64..10_000),
        ) {
            let layout = Layout::new(mib, window.map(|units| units << 21)).expect("layout");
            let layout = layout.with_file_memory(files.map(|units| units << 21));
            let map = map(&layout);
            for pair in map.windows(2) {
                prop_assert!(pair[0].start + pair[0].len <= pair[1].start);
            }
            prop_assert!(map.iter().all(|entry| entry.len > 0));
            prop_assert_eq!(map.iter().any(|entry| entry.kind == SOFT_RESERVED), window.is_some());
            prop_assert_eq!(map.iter().any(|entry| entry.kind == PERSISTENT), files.is_some());
        }
    }
}
