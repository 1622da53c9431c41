//! The ACPI tables that the guest finds: processors, the PCI host bridge, power-off and reset.
//!
//! Not "hardware-reduced" ACPI: stock kernels then keep the legacy interrupt controllers and the
//! timer that KVM emulates. Register blocks are the ports of [`crate::devices::power`].

use acpi_tables::sdt::{GenericAddress, Sdt};
use acpi_tables::{Aml, aml, rsdp, xsdt};
use vm_memory::{Bytes, GuestAddress};

use super::BootError;
use super::e820::{FIRMWARE_START, HIGH_MEMORY_START};
use crate::devices::power;
use crate::memory::{PCI_HOLE_END, PCI_HOLE_START};
use crate::ram::GuestRam;

const OEM_ID: [u8; 6] = *b"WORMHO";
const OEM_TABLE_ID: [u8; 8] = *b"WORMHOLE";
const OEM_REVISION: u32 = 1;

/// Where the IOAPIC is, as KVM emulates it.
const IOAPIC_ADDRESS: u32 = 0xfec0_0000;
/// Where the local APICs are.
const LOCAL_APIC_ADDRESS: u32 = 0xfee0_0000;

/// The interrupt of the (silent) ACPI events.
const SCI: u16 = 9;

/// Bytes of a FADT of revision 6.
const FADT_LEN: u32 = 276;

/// Writes the tables for `vcpus` processors and returns the address of the RSDP.
pub fn write(ram: &GuestRam, vcpus: u8) -> Result<u64, BootError> {
    let rsdp_address = FIRMWARE_START;
    let mut place = Placement {
        ram,
        next: FIRMWARE_START + 64,
    };
    let dsdt = place.put(dsdt().as_slice())?;
    let fadt = place.put(fadt(dsdt).as_slice())?;
    let madt = place.put(madt(vcpus).as_slice())?;
    let mut root = xsdt::XSDT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    root.add_entry(fadt);
    root.add_entry(madt);
    let root = place.put(&aml_bytes(&root))?;
    let pointer = aml_bytes(&rsdp::Rsdp::new(OEM_ID, root));
    ram.write_slice(&pointer, GuestAddress(rsdp_address))
        .map_err(|source| BootError::Write {
            what: "the ACPI root pointer",
            source,
        })?;
    Ok(rsdp_address)
}

struct Placement<'a> {
    ram: &'a GuestRam,
    next: u64,
}

impl Placement<'_> {
    /// Writes one table and returns its address.
    fn put(&mut self, table: &[u8]) -> Result<u64, BootError> {
        let address = self.next;
        let end = address + table.len() as u64;
        if end > HIGH_MEMORY_START {
            return Err(BootError::AcpiTooLarge);
        }
        self.ram
            .write_slice(table, GuestAddress(address))
            .map_err(|source| BootError::Write {
                what: "an ACPI table",
                source,
            })?;
        self.next = end.next_multiple_of(16);
        Ok(address)
    }
}

fn aml_bytes(object: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    object.to_aml_bytes(&mut bytes);
    bytes
}

/// The interrupt controllers (ACPI 6.5, 5.2.12): one local APIC per processor and the IOAPIC.
fn madt(vcpus: u8) -> Sdt {
    let mut table = Sdt::new(*b"APIC", 44, 5, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    table.write_u32(36, LOCAL_APIC_ADDRESS);
    table.write_u32(40, 1); // PCAT_COMPAT: the 8259 pair is there too
    for id in 0..vcpus {
        // Processor Local APIC: type, length, UID, APIC id, flags (enabled).
        table.append_slice(&[0, 8, id, id, 1, 0, 0, 0]);
    }
    table.append_slice(&[1, 12, 0, 0]);
    table.append_slice(&IOAPIC_ADDRESS.to_le_bytes());
    table.append_slice(&0u32.to_le_bytes()); // first global interrupt
    table
}

/// The fixed table (ACPI 6.5, 5.2.9).
fn fadt(dsdt: u64) -> Sdt {
    let mut table = Sdt::new(*b"FACP", FADT_LEN, 6, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    // DSDT, 32 bits: the firmware's area lies below 1 MiB.
    table.write_u32(40, u32::try_from(dsdt).unwrap_or(0));
    table.write_u16(46, SCI);
    table.write_u32(56, u32::from(power::PM1_EVENT));
    table.write_u32(64, u32::from(power::PM1_CONTROL));
    table.write_u8(88, 4); // PM1_EVT_LEN
    table.write_u8(89, 2); // PM1_CNT_LEN
    table.write_u16(96, 0xffff); // no C2
    table.write_u16(98, 0xffff); // no C3
    // IAPC_BOOT_ARCH: legacy devices; no 8042 to probe, no VGA, no CMOS clock. The 8042's reset
    // command works without a probe.
    table.write_u16(109, 1 | 1 << 2 | 1 << 5);
    // Flags: WBINVD works, C1 works, power and sleep buttons are not fixed hardware, a reset
    // register is there.
    table.write_u32(112, 1 | 1 << 2 | 1 << 4 | 1 << 5 | 1 << 10);
    table.write(
        116,
        GenericAddress::io_port_address::<u8>(power::I8042_COMMAND),
    );
    table.write_u8(128, power::I8042_RESET);
    table.write_u8(131, 5); // minor revision
    table.write_u64(140, dsdt);
    table.write(
        148,
        GenericAddress::io_port_address::<u32>(power::PM1_EVENT),
    );
    table.write(
        172,
        GenericAddress::io_port_address::<u16>(power::PM1_CONTROL),
    );
    table.update_checksum();
    table
}

fn dsdt() -> Sdt {
    let mut code = Vec::new();
    let hole_end = u32::try_from(PCI_HOLE_END - 1).unwrap_or(u32::MAX);
    let hole_start = u32::try_from(PCI_HOLE_START).unwrap_or(0);
    aml::Device::new(
        "_SB_.PCI0".into(),
        vec![
            &aml::Name::new("_HID".into(), &aml::EISAName::new("PNP0A03")),
            &aml::Name::new("_ADR".into(), &aml::ZERO),
            &aml::Name::new("_BBN".into(), &aml::ZERO),
            &aml::Name::new("_UID".into(), &aml::ZERO),
            &aml::Name::new(
                "_CRS".into(),
                &aml::ResourceTemplate::new(vec![
                    &aml::AddressSpace::new_bus_number(0u16, 0u16),
                    &aml::IO::new(0xcf8, 0xcf8, 1, 8),
                    &aml::AddressSpace::new_memory(
                        aml::AddressSpaceCacheable::NotCacheable,
                        true,
                        hole_start,
                        hole_end,
                        None,
                    ),
                ]),
            ),
        ],
    )
    .to_aml_bytes(&mut code);
    aml::Device::new(
        "_SB_.COM1".into(),
        vec![
            &aml::Name::new("_HID".into(), &aml::EISAName::new("PNP0501")),
            &aml::Name::new("_UID".into(), &aml::ONE),
            &aml::Name::new(
                "_CRS".into(),
                &aml::ResourceTemplate::new(vec![
                    &aml::IO::new(0x3f8, 0x3f8, 1, 8),
                    &aml::Interrupt::new(true, true, false, false, 4),
                ]),
            ),
        ],
    )
    .to_aml_bytes(&mut code);
    aml::Name::new(
        "_S5_".into(),
        &aml::Package::new(vec![
            &power::SLEEP_TYPE_S5,
            &aml::ZERO,
            &aml::ZERO,
            &aml::ZERO,
        ]),
    )
    .to_aml_bytes(&mut code);
    let mut table = Sdt::new(*b"DSDT", 36, 6, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    table.append_slice(&code);
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checksum(bytes: &[u8]) -> u8 {
        bytes
            .iter()
            .fold(0, |sum: u8, byte| sum.wrapping_add(*byte))
    }

    fn table(ram: &GuestRam, address: u64) -> Vec<u8> {
        let len: u32 = ram.read_obj(GuestAddress(address + 4)).expect("length");
        let mut bytes = vec![0; len as usize];
        ram.read_slice(&mut bytes, GuestAddress(address))
            .expect("table");
        bytes
    }

    #[test]
    fn every_table_is_reachable_and_sums_to_zero() {
        let ram = crate::ram::test_ram(2 << 20);
        let pointer = write(&ram, 3).expect("tables");
        let mut root = [0u8; 36];
        ram.read_slice(&mut root, GuestAddress(pointer))
            .expect("rsdp");
        assert_eq!(&root[..8], b"RSD PTR ");
        assert_eq!(checksum(&root), 0);
        let root: u64 = ram
            .read_obj(GuestAddress(pointer + 24))
            .expect("xsdt address");
        let root = table(&ram, root);
        assert_eq!((&root[..4], checksum(&root)), (&b"XSDT"[..], 0));
        let mut seen = Vec::new();
        for entry in root[36..].chunks_exact(8) {
            let address = u64::from_le_bytes(entry.try_into().expect("8 bytes"));
            let bytes = table(&ram, address);
            assert_eq!(checksum(&bytes), 0);
            seen.push(bytes[..4].to_vec());
            if &bytes[..4] == b"FACP" {
                let dsdt = u32::from_le_bytes(bytes[40..44].try_into().expect("4 bytes"));
                let dsdt = table(&ram, u64::from(dsdt));
                assert_eq!((&dsdt[..4], checksum(&dsdt)), (&b"DSDT"[..], 0));
            }
            if &bytes[..4] == b"APIC" {
                // Three processors of 8 bytes and one IOAPIC of 12 after the header of 44.
                assert_eq!(bytes.len(), 44 + 3 * 8 + 12);
            }
        }
        assert_eq!(seen, [b"FACP".to_vec(), b"APIC".to_vec()]);
    }
}
