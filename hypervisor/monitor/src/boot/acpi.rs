//! Builds the guest's ACPI tables: processors, the PCI host bridge, power button, power-off, reset, panic.
//!
//! The tables do not declare hardware-reduced ACPI, so that stock kernels keep using the legacy
//! interrupt controllers and the timer that KVM emulates. Register blocks are the ports of
//! [`crate::devices::power`].

use acpi_tables::fadt::{self, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::sdt::Sdt;
use acpi_tables::{Aml, aml, madt, rsdp, xsdt};
use vm_memory::{Bytes, GuestAddress};

use super::BootError;
use super::e820::{FIRMWARE_START, HIGH_MEMORY_START};
use crate::devices::{power, serial};
use crate::memory::{PCI_HOLE_END, PCI_HOLE_START, Range};
use crate::ram::GuestRam;

const OEM_ID: [u8; 6] = *b"WORMHO";
const OEM_TABLE_ID: [u8; 8] = *b"WORMHOLE";
const OEM_REVISION: u32 = 1;

/// Address of the IOAPIC that KVM emulates.
const IOAPIC_ADDRESS: u32 = 0xfec0_0000;
/// Address of the local APICs.
const LOCAL_APIC_ADDRESS: u32 = 0xfee0_0000;

/// P_LVL2_LAT above 100 µs: the processors do not support C2.
const NO_C2: u16 = 0xffff;
/// P_LVL3_LAT above 1000 µs: the processors do not support C3.
const NO_C3: u16 = 0xffff;
/// IAPC_BOOT_ARCH: legacy devices; no 8042 to probe, no VGA, no CMOS clock. The 8042's reset command
/// works without a probe.
const BOOT_ARCH: u16 = 1 | 1 << 2 | 1 << 5;

/// Writes the tables for `vcpus` processors. The PCI bus has the addresses `wide_bars` beside those below 4 GiB. Returns the
/// address of the RSDP.
pub fn write(ram: &GuestRam, vcpus: u8, wide_bars: Option<Range>) -> Result<u64, BootError> {
    let rsdp_address = FIRMWARE_START;
    let mut place = Placement {
        ram,
        next: FIRMWARE_START + 64,
    };
    let dsdt = place.put(dsdt(wide_bars).as_slice())?;
    let fadt = place.put(&aml_bytes(&fadt(dsdt)))?;
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

/// Builds the MADT (ACPI 6.5, 5.2.12): one local APIC per processor and the IOAPIC.
///
/// Writes the header by offset, since `madt::MADT` cannot set PCAT_COMPAT.
fn madt(vcpus: u8) -> Sdt {
    let mut table = Sdt::new(*b"APIC", 44, 5, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    table.write_u32(36, LOCAL_APIC_ADDRESS);
    table.write_u32(40, 1); // PCAT_COMPAT: the 8259 pair is there too
    for id in 0..vcpus {
        let enabled = madt::EnabledStatus::Enabled;
        let processor = madt::ProcessorLocalApic::new(id, id, enabled);
        processor.to_aml_bytes(&mut table);
    }
    madt::IoApic::new(0, IOAPIC_ADDRESS, 0).to_aml_bytes(&mut table);
    table
}

/// Builds the FADT (ACPI 6.5, 5.2.9).
fn fadt(dsdt: u64) -> fadt::FADT {
    let port =
        |port: u16, bits, access| GAS::new(AddressSpace::SystemIo, bits, 0, access, port.into());
    let mut table = fadt::FADTBuilder::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION)
        .flag(Flags::Wbinvd)
        .flag(Flags::ProcC1)
        // PWR_BUTTON stays clear: the power button is fixed hardware. SLP_BUTTON: there is no sleep button.
        .flag(Flags::SlpButton)
        .flag(Flags::ResetRegSup);
    // 32 bits suffice: the firmware area lies below 1 MiB.
    table.dsdt = u32::try_from(dsdt).unwrap_or(0).into();
    table.x_dsdt = dsdt.into();
    table.sci_int = power::SCI.into();
    table.pm1a_evt_blk = u32::from(power::PM1_EVENT).into();
    table.pm1a_cnt_blk = u32::from(power::PM1_CONTROL).into();
    table.pm1_evt_len = 4;
    table.pm1_cnt_len = 2;
    table.p_lvl2_lat = NO_C2.into();
    table.p_lvl3_lat = NO_C3.into();
    table.iapc_boot_arch = BOOT_ARCH.into();
    table.reset_reg = port(power::I8042_COMMAND, 8, AccessSize::ByteAccess);
    table.reset_value = power::I8042_RESET;
    table.x_pm1a_evt_blk = port(power::PM1_EVENT, 32, AccessSize::DwordAccess);
    table.x_pm1a_cnt_blk = port(power::PM1_CONTROL, 16, AccessSize::WordAccess);
    table.finalize()
}

fn dsdt(wide_bars: Option<Range>) -> Sdt {
    let mut code = Vec::new();
    let hole_end = u32::try_from(PCI_HOLE_END - 1).unwrap_or(u32::MAX);
    let ports = u8::try_from(serial::PORTS).unwrap_or(u8::MAX);
    let hole_start = u32::try_from(PCI_HOLE_START).unwrap_or(0);
    let bus_numbers = aml::AddressSpace::new_bus_number(0u16, 0u16);
    let config_ports = aml::IO::new(0xcf8, 0xcf8, 1, 8);
    let hole = aml::AddressSpace::new_memory(
        aml::AddressSpaceCacheable::NotCacheable,
        true,
        hole_start,
        hole_end,
        None,
    );
    let wide = wide_bars.map(|range| {
        let (start, last) = (range.start, range.end() - 1);
        let cacheable = aml::AddressSpaceCacheable::NotCacheable;
        aml::AddressSpace::new_memory(cacheable, true, start, last, None)
    });
    let mut resources: Vec<&dyn Aml> = vec![&bus_numbers, &config_ports, &hole];
    resources.extend(wide.as_ref().map(|wide| wide as &dyn Aml));
    aml::Device::new(
        "_SB_.PCI0".into(),
        vec![
            &aml::Name::new("_HID".into(), &aml::EISAName::new("PNP0A03")),
            &aml::Name::new("_ADR".into(), &aml::ZERO),
            &aml::Name::new("_BBN".into(), &aml::ZERO),
            &aml::Name::new("_UID".into(), &aml::ZERO),
            &aml::Name::new("_CRS".into(), &aml::ResourceTemplate::new(resources)),
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
                    &aml::IO::new(serial::COM1, serial::COM1, 1, ports),
                    &aml::Interrupt::new(true, true, false, false, serial::IRQ),
                ]),
            ),
        ],
    )
    .to_aml_bytes(&mut code);
    aml::Device::new(
        "_SB_.PEVT".into(),
        vec![
            // The id that Linux's driver pvpanic-mmio has, also for a port.
            &aml::Name::new("_HID".into(), &"QEMU0001"),
            &aml::Name::new(
                "_CRS".into(),
                &aml::ResourceTemplate::new(vec![&aml::IO::new(power::PANIC, power::PANIC, 1, 1)]),
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
        let pointer = write(&ram, 3, None).expect("tables");
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

    #[test]
    fn the_bus_has_a_range_above_4_gib_if_bars_are_there() {
        let range = Range {
            start: 0x12_3456_0000_0000,
            len: 0x1_0000_0000,
        };
        let has = |wide_bars, number: u64| {
            let table = dsdt(wide_bars);
            let number = number.to_le_bytes();
            table.as_slice().windows(8).any(|bytes| bytes == number)
        };
        for number in [range.start, range.end() - 1, range.len] {
            assert!(
                has(Some(range), number) && !has(None, number),
                "{number:#x}"
            );
        }
    }
}
