//! Checks ELF files of machine code before the driver reads them.
//!
//! The driver trusts the offsets and lengths in headers (measured on driver 580: a section table outside the file
//! crashes it). A file passes if every header, section, segment, name and symbol lies within it (ELF-64 object file
//! format), and if its tables have the [form](form) that compilers write. In machine code a symbol must also lie within
//! its section, since the driver tells address and size of a variable by its symbol, and a section may [refer](relations)
//! only to symbols and sections that are there. The driver checks the sections' content.

mod form;
mod relations;

use std::ops::RangeInclusive;

use object::LittleEndian;
use object::elf::{EM_CUDA, FileHeader64, SectionHeader64};
use object::read::elf::{FileHeader, ProgramHeader, SectionHeader, SectionTable, Sym};

pub use relations::may_be_relocated;

/// Section types that a processor's manufacturer defines (`SHT_LOPROC` to `SHT_HIPROC`).
const OF_PROCESSOR: RangeInclusive<u32> = 0x7000_0000..=0x7fff_ffff;
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
type Section = SectionHeader64<LittleEndian>;
type Sections<'a> = SectionTable<'a, Header>;

/// Returns whether the bytes begin like an ELF file.
pub fn is_elf(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\x7fELF")
}

/// Returns whether an ELF file is machine code for a GPU and contains all that its headers name.
pub fn is_whole(image: &[u8]) -> bool {
    machine(image) == Some(EM_CUDA)
}

/// Returns the machine (`e_machine`) of an ELF file. `None` if the file lacks anything that its headers name, or has
/// tables of another form than compilers write.
pub fn machine(image: &[u8]) -> Option<u16> {
    let header = Header::parse(image).ok()?;
    if !form::is_literal(header) {
        return None;
    }
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
    let is_usual = form::has_usual_tables(header, &sections);
    if !is_usual || is_of_gpu && !relations::are_good(&sections, image) {
        return None;
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
    use object::elf::{
        SHF_EXECINSTR, SHN_ABS, SHN_COMMON, SHN_XINDEX, SHT_DYNSYM, SHT_REL, SHT_SYMTAB,
        SHT_SYMTAB_SHNDX,
    };
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
        let home = symbols + 3 * 24 + 6;
        // The section's number would be in another table.
        assert!(!is_whole(&self::with(
            &whole,
            home,
            &SHN_XINDEX.to_le_bytes()
        )));
        for section in [SHN_ABS, SHN_COMMON] {
            let mut far = with(3, 1 << 46, 8);
            far[home..home + 2].copy_from_slice(&section.to_le_bytes());
            assert!(!is_whole(&far), "{section:#x}");
        }
    }

    /// Number of the section that relocations are for, and of the relocations, in the image.
    const BANK: usize = 5;
    const RELOCATIONS: usize = 6;

    /// Offset in the image of a section's header.
    fn header_of(image: &[u8], section: usize) -> usize {
        usize::try_from(u64_at(image, 40).unwrap()).unwrap() + section * 64
    }

    fn with(image: &[u8], at: usize, bytes: &[u8]) -> Vec<u8> {
        let mut changed = image.to_vec();
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        changed
    }

    #[test]
    fn a_header_says_by_itself_where_tables_are() {
        let whole = image();
        let count = whole[60];
        for (what, at, bytes) in [
            ("no table of sections", 40, &[0; 8][..]),
            ("the table in the header", 40, &[56, 0, 0, 0, 0, 0, 0, 0]),
            ("the header's size", 52, &[0, 0]),
            ("entries of 40 bytes", 58, &[40, 0]),
            ("entries without bytes", 58, &[0, 0]),
            ("no sections", 60, &[0, 0]),
            ("the count in the first section", 60, &[0, 0xff]),
            ("no names", 62, &[0, 0]),
            ("names of a section behind the last", 62, &[count, 0]),
            (
                "names of a section that the first one names",
                62,
                &[0xff, 0xff],
            ),
        ] {
            assert!(!is_whole(&with(&whole, at, bytes)), "{what}");
        }
        // One segment, behind everything else.
        let at = whole.len() as u64;
        let segmented = [&whole[..], &[0; 56]].concat();
        let segmented = with(&segmented, 32, &at.to_le_bytes());
        let segmented = with(&segmented, 54, &[56, 0, 1, 0]);
        assert!(is_whole(&segmented));
        for (what, at, bytes) in [
            ("no table of segments", 32, &[0; 8][..]),
            ("entries of 32 bytes", 54, &[32, 0]),
            ("the count in the first section", 56, &[0xff, 0xff]),
        ] {
            assert!(!is_whole(&with(&segmented, at, bytes)), "{what}");
        }
    }

    #[test]
    fn tables_have_the_form_that_compilers_write() {
        let whole = image();
        let (symbols, relocations) = (header_of(&whole, 1), header_of(&whole, RELOCATIONS));
        for (what, at, bytes) in [
            ("symbols without a size", symbols + 56, [0; 8]),
            ("symbols of 16 bytes", symbols + 56, 16_u64.to_le_bytes()),
            ("part of a symbol", symbols + 32, 95_u64.to_le_bytes()),
            ("relocations without a size", relocations + 56, [0; 8]),
            (
                "relocations of 16 bytes",
                relocations + 56,
                16_u64.to_le_bytes(),
            ),
            (
                "part of a relocation",
                relocations + 32,
                71_u64.to_le_bytes(),
            ),
        ] {
            assert!(!is_whole(&with(&whole, at, &bytes)), "{what}");
        }
        // A second table of symbols, and one of indices for many sections, in 24 bytes that no relocation is for.
        let bank = header_of(&whole, BANK);
        let free = with(&whole, relocations + 32, &[0]);
        let free = with(&free, relocations + 44, &[3]);
        let entries = with(&free, bank + 56, &24_u64.to_le_bytes());
        let linked = with(&entries, bank + 40, &[2]);
        assert!(is_whole(&linked));
        for kind in [SHT_SYMTAB, SHT_DYNSYM, SHT_SYMTAB_SHNDX] {
            let second = with(&linked, bank + 4, &kind.to_le_bytes());
            assert!(!is_whole(&second), "{kind}");
        }
    }

    #[test]
    fn no_table_is_part_of_a_section_that_can_change() {
        let whole = image();
        let bank = header_of(&whole, BANK);
        let offset = |section| u64_at(&whole, header_of(&whole, section) + 24).unwrap();
        let at = |start: u64, bytes: u64| {
            let moved = with(&whole, bank + 24, &start.to_le_bytes());
            with(&moved, bank + 32, &bytes.to_le_bytes())
        };
        let end = whole.len() as u64;
        for (what, start, bytes) in [
            ("the header", 40, 24),
            ("symbols", offset(1) + 24, 24),
            ("names", offset(2), 24),
            ("relocations", offset(RELOCATIONS) - 8, 32),
            ("the table of sections", end - 64, 64),
            ("everything", 0, end),
        ] {
            assert!(!is_whole(&at(start, bytes)), "{what}");
        }
        assert!(
            is_whole(&at(offset(3), 24 + 16)),
            "data shares bytes with data"
        );
    }

    /// The first of the image's three relocations is one of 64 bits.
    #[test]
    fn a_relocation_is_in_its_section_and_for_a_symbol() {
        const OTHER_KIND: u8 = 73;
        let whole = image();
        let table = header_of(&whole, RELOCATIONS);
        let entry = usize::try_from(u64_at(&whole, table + 24).unwrap()).unwrap();
        let at = |offset: u64, kind: u8| {
            let moved = with(&whole, entry, &offset.to_le_bytes());
            with(&moved, entry + 8, &[kind])
        };
        for (offset, kind, is_good) in [
            (16, 2, true),
            (17, 2, false),
            (17, 4, false),
            (23, OTHER_KIND, true),
            (24, OTHER_KIND, false),
            (u64::MAX, 2, false),
            (u64::MAX, OTHER_KIND, false),
        ] {
            assert_eq!(is_whole(&at(offset, kind)), is_good, "{kind} at {offset}");
        }
        let symbol = |index: u32| with(&whole, entry + 12, &index.to_le_bytes());
        assert!(is_whole(&symbol(3)));
        assert!(!is_whole(&symbol(4)) && !is_whole(&symbol(u32::MAX)));
        // Headers, symbols, names, a section without bytes, the relocations, none.
        for target in [0, 1, 2, 4, 6, 7, u32::MAX] {
            let other = with(&whole, table + 44, &target.to_le_bytes());
            assert!(!is_whole(&other), "section {target}");
        }
        // Entries without addends, of 16 bytes.
        let mut short = with(&whole, table + 4, &SHT_REL.to_le_bytes());
        short = with(&short, table + 32, &16_u64.to_le_bytes());
        short = with(&short, table + 56, &16_u64.to_le_bytes());
        assert!(is_whole(&short));
        assert!(!is_whole(&with(&short, entry, &24_u64.to_le_bytes())));
        assert!(!is_whole(&with(&short, entry + 12, &[4])));
    }

    #[test]
    fn a_section_names_sections_and_symbols_that_are_there() {
        let whole = image();
        let count = whole[60];
        let (symbols, bank) = (header_of(&whole, 1), header_of(&whole, BANK));
        let info =
            |image: &[u8], section: usize, info: u8| is_whole(&with(image, section + 44, &[info]));
        assert!(info(&whole, symbols, 4) && !info(&whole, symbols, 5));
        let facts = with(&whole, bank + 4, &[0, 0, 0, 0x70]);
        assert!(info(&facts, bank, count - 1) && !info(&facts, bank, count));
        // Code names its symbol, and the number of its registers.
        let code = with(&whole, bank + 8, &SHF_EXECINSTR.to_le_bytes());
        let code = with(&code, bank + 47, &[0xff]);
        assert!(info(&code, bank, 3) && !info(&code, bank, 4));
    }

    #[test]
    fn a_program_of_the_host_is_not_for_a_gpu() {
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert!(is_elf(&own) && !is_whole(&own));
    }
}
