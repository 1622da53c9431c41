//! Checks ELF files of machine code before the driver reads them.
//!
//! The driver trusts the offsets and lengths in headers (measured on driver 580: a section table outside the file
//! crashes it). A file passes if every header, section, segment, name and symbol lies within it (ELF-64 object file
//! format). In machine code a symbol must also lie within its section, since the driver tells address and size of a
//! variable by its symbol, and the worker admits both as memory of the device. The driver checks the sections' content.

use object::LittleEndian;
use object::elf::{EM_CUDA, FileHeader64};
use object::read::elf::{FileHeader, ProgramHeader, SectionHeader, Sym};

/// NVIDIA's type of sections of global memory, without bytes in a relocatable file.
const GLOBAL: u32 = 0x7000_0007;
/// NVIDIA's section types without bytes in a relocatable file, like `SHT_NOBITS`: global and shared memory (found in
/// files that `nvcc` 13 writes).
pub const WITHOUT_BYTES: [u32; 2] = [GLOBAL, 0x7000_000a];

/// Prefixes of the names of sections of shared memory. Symbols may lie behind the end of such a section: that of an
/// array of unknown size, and in relocatable files those whose place is aligned (as `nvcc` 13 writes them).
const SHARED: [&[u8]; 2] = [b".nv.shared", b".nv_debug.shared"];
/// End of shared memory, whose addresses have 32 bits.
const SHARED_END: u64 = 1 << 32;
/// End of symbols without a section, and of those in sections without bytes: no device has as much memory. The value of an
/// undefined symbol is an alignment or an offset in shared memory, its size that of a variable of another file.
const OUTER_END: u64 = 1 << 40;

type Header = FileHeader64<LittleEndian>;

/// Returns whether the bytes begin like an ELF file.
pub fn is_elf(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\x7fELF")
}

/// Returns whether an ELF file is machine code for a GPU and contains all that its headers name.
pub fn is_whole(image: &[u8]) -> bool {
    machine(image) == Some(EM_CUDA)
}

/// Returns the machine (`e_machine`) of an ELF file. `None` if the file lacks anything that its headers name.
pub fn machine(image: &[u8]) -> Option<u16> {
    let header = Header::parse(image).ok()?;
    let endian = header.endian().ok()?;
    for segment in header.program_headers(endian, image).ok()? {
        segment.data(endian, image).ok()?;
    }
    let machine = header.e_machine(endian);
    let is_of_gpu = machine == EM_CUDA;
    let sections = header.sections(endian, image).ok()?;
    let mut ends = Vec::with_capacity(sections.len());
    for section in sections.iter() {
        if !WITHOUT_BYTES.contains(&section.sh_type(endian)) {
            section.data(endian, image).ok()?;
        }
        let name = sections.section_name(endian, section).ok()?;
        let is_shared = section.sh_type(endian) != GLOBAL
            && SHARED.iter().any(|prefix| name.starts_with(prefix));
        ends.push(if is_shared {
            SHARED_END
        } else {
            // The file bounds only a section that has bytes in it.
            section.sh_size(endian).min(OUTER_END)
        });
        let link = usize::try_from(section.sh_link(endian)).ok()?;
        if link >= sections.len() {
            return None;
        }
    }
    for (index, section) in sections.enumerate() {
        let table = section.symbols(endian, image, &sections, index).ok()?;
        let Some(symbols) = table else {
            continue;
        };
        for (index, symbol) in symbols.enumerate() {
            symbol.name(endian, symbols.strings()).ok()?;
            let home = symbols.symbol_section(endian, symbol, index).ok()?;
            let end = match home {
                Some(home) => *ends.get(home.0)?,
                None => OUTER_END,
            };
            let symbol_end = symbol.st_value(endian).checked_add(symbol.st_size(endian));
            if is_of_gpu && symbol_end.is_none_or(|symbol_end| symbol_end > end) {
                return None;
            }
        }
    }
    Some(machine)
}

#[cfg(test)]
pub(crate) mod tests {
    use object::elf::{SHN_ABS, SHN_COMMON};
    use wormhole_fatbin::fields::u64_at;

    use super::*;
    use crate::managed::tests;

    pub(crate) fn image() -> Vec<u8> {
        tests::image(2, false)
    }

    #[test]
    fn a_file_that_lacks_what_its_headers_name_is_not_whole() {
        let whole = image();
        assert!(is_whole(&whole));
        for length in 0..whole.len() {
            assert!(!is_whole(&whole[..length]), "cut at {length}");
        }
    }

    #[test]
    fn no_offset_or_length_in_a_header_is_believed() {
        const NO_BITS: u8 = 8;
        let whole = image();
        let table = usize::try_from(u64_at(&whole, 40).unwrap()).unwrap();
        let is_refused = |field: usize| {
            let mut damaged = whole.clone();
            damaged[field + 6] = 0x7f;
            !is_whole(&damaged)
        };
        assert!(is_refused(40), "the table of sections lies elsewhere");
        for section in (table..whole.len()).step_by(64).skip(1) {
            let has_bytes = whole[section + 4] != NO_BITS;
            assert_eq!(is_refused(section + 24), has_bytes, "offset of {section}");
            assert_eq!(is_refused(section + 32), has_bytes, "size of {section}");
        }
    }

    /// The image's third symbol is a variable of 8 bytes in a section of 16.
    #[test]
    fn a_symbol_reaches_no_further_than_its_section() {
        let whole = image();
        let table = usize::try_from(u64_at(&whole, 40).unwrap()).unwrap();
        let symbols = usize::try_from(u64_at(&whole, table + 64 + 24).unwrap()).unwrap();
        let with = |symbol: usize, value: u64, size: u64| {
            let mut changed = whole.clone();
            let facts = symbols + symbol * 24;
            changed[facts + 8..facts + 16].copy_from_slice(&value.to_le_bytes());
            changed[facts + 16..facts + 24].copy_from_slice(&size.to_le_bytes());
            changed
        };
        for (value, size) in [(0, 16), (8, 8), (16, 0)] {
            assert!(is_whole(&with(3, value, size)), "{value} {size}");
        }
        let before = 0_u64.wrapping_sub(0x1000);
        for (value, size) in [
            (0, 17),
            (9, 8),
            (17, 0),
            (0, 1 << 44),
            (before, 8),
            (before, 0x1000),
            (before, 0x1008),
            (8, u64::MAX),
        ] {
            assert!(!is_whole(&with(3, value, size)), "{value:#x} {size:#x}");
        }
        // Shared memory.
        let named = |mut image: Vec<u8>| {
            image[table + 3 * 64] = tests::SHARED_NAME;
            image
        };
        assert!(is_whole(&named(with(3, 16, 8))));
        assert!(!is_whole(&named(with(3, 1 << 32, 1))));
        // The first symbol has no section.
        assert!(is_whole(&with(0, 0x40, 1 << 39)));
        assert!(!is_whole(&with(0, 1 << 40, 1)));
        for section in [SHN_ABS, SHN_COMMON] {
            let mut far = with(3, 1 << 46, 8);
            let home = symbols + 3 * 24 + 6;
            far[home..home + 2].copy_from_slice(&section.to_le_bytes());
            assert!(!is_whole(&far), "{section:#x}");
        }
    }

    #[test]
    fn a_program_of_the_host_is_not_for_a_gpu() {
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert!(is_elf(&own) && !is_whole(&own));
    }
}
