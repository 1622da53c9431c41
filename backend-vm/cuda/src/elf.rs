//! Checks ELF files of machine code before the driver reads them.
//!
//! The driver trusts the offsets and lengths in headers (measured on driver 580: a section table outside the file
//! crashes it). A file passes if every header, section, segment, name and symbol lies within it (ELF-64 object file
//! format). The driver checks the sections' content.

use object::LittleEndian;
use object::elf::{EM_CUDA, FileHeader64};
use object::read::elf::{FileHeader, ProgramHeader, SectionHeader, Sym};

/// NVIDIA's section types without bytes in a relocatable file, like `SHT_NOBITS`: global and shared memory (found in
/// files that `nvcc` 13 writes).
pub const WITHOUT_BYTES: [u32; 2] = [0x7000_0007, 0x7000_000a];

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
    let sections = header.sections(endian, image).ok()?;
    for (index, section) in sections.enumerate() {
        if !WITHOUT_BYTES.contains(&section.sh_type(endian)) {
            section.data(endian, image).ok()?;
        }
        sections.section_name(endian, section).ok()?;
        let link = usize::try_from(section.sh_link(endian)).ok()?;
        if link >= sections.len() {
            return None;
        }
        let table = section.symbols(endian, image, &sections, index).ok()?;
        let Some(symbols) = table else {
            continue;
        };
        for (index, symbol) in symbols.enumerate() {
            symbol.name(endian, symbols.strings()).ok()?;
            let home = symbols.symbol_section(endian, symbol, index).ok()?;
            if home.is_some_and(|home| home.0 >= sections.len()) {
                return None;
            }
        }
    }
    Some(header.e_machine(endian))
}

#[cfg(test)]
pub(crate) mod tests {
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
        let table = usize::try_from(wormhole_fatbin::fields::u64_at(&whole, 40).unwrap()).unwrap();
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

    #[test]
    fn a_program_of_the_host_is_not_for_a_gpu() {
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert!(is_elf(&own) && !is_whole(&own));
    }
}
