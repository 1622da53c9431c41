//! Builds a guest image whose kernel claims the window as system RAM before it can be mapped, to test the guest's
//! error message.
//!
//! Linux 6.12 binds soft-reserved memory to its `kmem` driver if that is loaded before the window is bound to
//! `device_dax`, and if the firmware assigns the memory to a NUMA node. The monitor's ACPI tables do not, so
//! the image contains a table that does (Documentation/admin-guide/acpi/initrd_table_override.rst of Linux).

use crate::error::ImageError;
use crate::image::{BuildOptions, Content, Image, OVERLAY, VIRTIO, build};

/// Prefix of the image's folder name.
pub const TAKEN: &str = "guest-taken-window";

/// Modules as on a distribution that lets the kernel use soft-reserved memory.
const WINDOW: [(&str, &str); 3] = [("dax_hmem", ""), ("kmem", ""), ("device_dax", "")];

/// Path from which the kernel loads additional ACPI tables.
const TABLE: &str = "kernel/firmware/acpi/srat.aml";

/// Builds the image unless it exists.
pub fn build_guest_that_takes_its_window(options: &BuildOptions<'_>) -> Result<Image, ImageError> {
    let content = Content {
        modules: &[&VIRTIO[..], &OVERLAY, &WINDOW].concat(),
        file: Some((TABLE, &affinity())),
        driver: None,
    };
    build(TAKEN, &content, options)
}

/// Builds a System Resource Affinity Table (ACPI 6.5, 5.2.16) that assigns all memory up to 1 TiB to node 0.
fn affinity() -> Vec<u8> {
    const LENGTH: u8 = 48 + 40;
    let mut table = b"SRAT".to_vec();
    table.extend([LENGTH, 0, 0, 0]);
    // Revision, checksum, OEM and creator ids.
    table.extend([3, 0]);
    table.extend(b"WORMHOWORMHOLE");
    table.extend([1, 0, 0, 0]);
    table.extend(b"WORM");
    table.extend([1, 0, 0, 0]);
    // A reserved word with the value 1, and a reserved field.
    table.extend([1, 0, 0, 0]);
    table.extend([0; 8]);
    // Memory affinity: type, length, node, base, length, flags (enabled).
    table.extend([1, 40]);
    table.extend([0; 6]);
    table.extend(0u64.to_le_bytes());
    table.extend((1u64 << 40).to_le_bytes());
    table.extend([0; 4]);
    table.extend([1, 0, 0, 0]);
    table.extend([0; 8]);
    let sum = table.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
    table[9] = sum.wrapping_neg();
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_the_length_and_the_checksum_that_the_kernel_checks() {
        let table = affinity();
        assert_eq!(table[4..8], [88, 0, 0, 0]);
        assert_eq!(table.len(), 88);
        assert_eq!(
            table.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)),
            0
        );
    }
}
